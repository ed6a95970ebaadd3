"""Preference chains: every combination of present, absent, waived and disabled members."""

from itertools import product

import kernel_muster as km
import pytest
from kernel_muster.registry.errors import UsageError

STATES = ("present", "absent", "waived", "disabled", "disabled and waived")
# Dissimilar names, so no near-name hint adds a finding.
FUNCS = ("quantize", "embedding", "softmax")


def expected(states, required):
    """Return (code, subject) of every finding, and the member that serves: the rules of docs/add-a-model.md again."""
    served = next((i for i, state in enumerate(states) if state == "present"), None)
    tried = range(len(states) if served is None else served)
    findings = {("DISABLED", FUNCS[i]) for i in tried if states[i] == "disabled"}
    absent = [FUNCS[i] for i in tried if states[i] == "absent"]
    if absent and len(states) == 1:
        findings.add(("MISSING", absent[0]))
    elif absent:
        findings.add(("MISSING" if served is None and required else "FALLBACK_TAKEN", absent[0]))
    if served is None and required and all("waived" in state for state in states):
        findings.add(("WAIVED_REQUIRED", FUNCS[0]))
    after = () if served is None else range(served + 1, len(states))
    findings |= {("UNUSED_WAIVER", FUNCS[i]) for i in after if "waived" in states[i]}
    return findings, served


def chain_boot(world, states, required):
    there = [f"acme::{f}" for f, s in zip(FUNCS, states, strict=False) if s == "present" or "disabled" in s]
    disabled = [f"acme::{f}" for f, s in zip(FUNCS, states, strict=False) if "disabled" in s]
    waived = [f'{f} = "not ported yet"' for f, s in zip(FUNCS, states, strict=False) if "waived" in s]
    handles = []

    def build(boot):
        handles.append(boot.kernels.first_of(*(("acme", f) for f in FUNCS[: len(states)]), required=required))
        boot.kernels.kernel("acme", "zzz")

    outcome = world.run(
        build,
        {"acme": world.acme("acme::zzz", *there)},
        "[expected_absent.acme]\n" + "\n".join(waived),
        levers={"MUSTER_DISABLE": ",".join(disabled)},
    )
    return outcome, handles[0]


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_chain_in_every_combination_of_members_gives_exactly_its_findings(world, length, required):
    for states in product(STATES, repeat=length):
        outcome, handle = chain_boot(world, states, required)
        findings, served = expected(states, required)
        said = {(f.code, f.subject.removeprefix("acme::")) for f in outcome.report.findings}
        assert said == findings, (states, required, outcome.said)
        assert len(outcome.report.findings) == len(findings)
        assert bool(handle) is (served is not None)
        if handle:
            assert handle.key.func == FUNCS[served]


def test_chain_row_names_what_serves(world):
    outcome, _ = chain_boot(world, ("waived", "present", "absent"), required=True)
    row = next(row for row in outcome.report.kernels if row.chain)
    assert (row.key, row.served_by, row.outcome) == ("acme::quantize", "acme::embedding", "fallback")
    assert row.chain == ("acme::quantize", "acme::embedding", "acme::softmax")
    assert [w.key for w in outcome.report.waivers] == ["acme::quantize"]


def test_chain_that_falls_back_names_every_absent_member(world):
    outcome, _ = chain_boot(world, ("absent", "absent", "present"), required=True)
    why = outcome.finding("FALLBACK_TAKEN").why
    assert "acme::quantize: " in why
    assert "acme::embedding: " in why
    assert "fell back to acme::softmax" in why


def test_chains_behind_one_absent_launch_are_one_finding_with_its_reason_once(world):
    def build(boot):
        for part in ("embedding", "softmax"):
            boot.kernels.first_of(("acme", "quantize"), ("acme", part), required=True)

    outcome = world.run(build, {"acme": world.acme("acme::embedding", "acme::softmax")})
    (found,) = outcome.report.findings
    assert (found.code, found.subject) == ("FALLBACK_TAKEN", "acme::quantize")
    assert found.why.count("no plugin registers acme::quantize") == 1
    for part in ("embedding", "softmax"):
        assert f"chain acme::quantize > acme::{part}: fell back to acme::{part}" in found.why


def test_chains_with_one_first_member_keep_each_others_reasons(world):
    def build(boot):
        boot.kernels.first_of(("acme", "quantize"), ("acme", "softmax"))
        boot.kernels.first_of(("acme", "quantize"), ("acme", "embedding"), ("acme", "softmax"))

    outcome = world.run(build, {"acme": world.acme("acme::softmax")})
    found = outcome.finding("FALLBACK_TAKEN")
    assert "acme::embedding" in found.why
    assert len(found.where) == 2


def test_chain_without_members_is_refused_at_once(world):
    def build(boot):
        boot.kernels.kernel("acme", "mul")
        with pytest.raises(UsageError, match="at least one"):
            boot.kernels.first_of()

    assert world.run(build, {"acme": world.acme("acme::mul")}).codes == ["REQUEST_NOT_HONORED"]


def test_chain_of_bare_names_is_refused_with_what_it_takes(world):
    def build(boot):
        boot.kernels.kernel("acme", "mul")
        with pytest.raises(UsageError, match=r"takes \(module, func\) tuples, got acme"):
            boot.kernels.first_of("acme", "mul")

    assert world.run(build, {"acme": world.acme("acme::mul")}).codes == ["REQUEST_NOT_HONORED"]


def test_one_lever_that_asks_for_two_absent_kernels_names_both(world):
    def build(boot):
        boot.kernels.try_kernel("acme", "quantize", requested_by="MUSTER_X")
        boot.kernels.try_kernel("acme", "softmax", requested_by="MUSTER_X")

    lever = km.Lever(name="MUSTER_X", kind="bool", default=False, doc="Ask for both.")
    outcome = world.run(build, {"acme": world.plugin(levers=[lever])}, levers={"MUSTER_X": "1"})
    found = outcome.finding("REQUEST_NOT_HONORED")
    assert "acme::quantize" in found.why
    assert "acme::softmax" in found.why
    assert len(found.where) == 2


def test_waiver_does_not_excuse_what_a_lever_asked_for(world):
    def build(boot):
        boot.kernels.try_kernel("acme", "quantize", requested_by="MUSTER_X")

    lever = km.Lever(name="MUSTER_X", kind="bool", default=False, doc="Ask for it.")
    manifest = '[expected_absent.acme]\nquantize = "not ported yet"'
    outcome = world.run(build, {"acme": world.plugin(levers=[lever])}, manifest, levers={"MUSTER_X": "1"})
    assert outcome.codes == ["REQUEST_NOT_HONORED"]


@pytest.mark.parametrize("required", [False, True])
def test_allowing_one_absent_member_of_a_chain_does_not_excuse_another(world, required):
    def build(boot):
        boot.kernels.first_of(("acme", "quantize"), ("acme", "embedding"), required=required)
        boot.kernels.kernel("acme", "zzz")

    plugins = {"acme": world.acme("acme::zzz")}
    one = world.run(build, plugins, dangerously_allow_unresolved=["acme::quantize"])
    assert [(f.subject, f.allowed) for f in one.report.findings] == [("acme::embedding", False)]
    assert one.error is not None
    both = world.run(build, plugins, dangerously_allow_unresolved=["acme::quantize", "acme::embedding"])
    assert (both.report.passed, both.report.degraded) == (True, True)
