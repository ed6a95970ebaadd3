"""Kill-one: without any single registration that a model needs, its audit refuses with a remedy.

Each model is really booted once. Then a registration is removed from the catalog of that boot's evidence, and all
rules judge again: lookups do not depend on the results of earlier ones (tests/models/test_lookups.py).
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import kernel_muster as km
import pytest
from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.verdict import Verdict, judge_boot
from kernel_muster.MODEL_toml.waivers import Waiver
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey

MODELS = (
    "qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3.8-27b", "ornith-1.0-35b", "qwen3.6-35b-a3b-heretic", "holo-3.1-35b-a3b",
    "qwen3.6-35b-a3b-dflash",
)  # fmt: skip
# Levers that use other keys: parents of the 3-stage twins, the opt-in variant, FP32 routing.
OTHER_LEVERS = {
    "parents": {"MUSTER_NO_TGEMM_PIPELINE3": "1", "MUSTER_NO_K64_PIPELINE3": "1"},
    "variants": {"MUSTER_W4A16_VARIANT": "v2"},
    "fp32": {"MUSTER_FP32_ROUTING": "1"},
    "batched": {"MUSTER_FFN_ARM": "batched"},
    "atomic": {"MUSTER_FFN_ARM": "atomic_c4"},
    "hopper": {},
}
# The one target with lookups of its own.
TARGETS = {"hopper": "sm_90a"}
BOOTS = [(model, "") for model in MODELS] + [
    ("qwen3.6-27b", "parents"), ("qwen3.6-27b", "variants"), ("qwen3.6-35b-a3b", "fp32"),
    ("qwen3.6-35b-a3b", "batched"), ("qwen3.6-35b-a3b", "atomic"), ("qwen3.6-27b", "hopper"),
]  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """How a key was asked for, everywhere together."""

    is_required: bool
    requested_by: str | None
    sites: frozenset[str]


@cache
def recorded(model: str, levers: str) -> Evidence:
    """Boot a model and return what its rules looked at."""
    target = TARGETS.get(levers, "cpu")
    session = km.boot(model, target=target, stage="registered", levers=OTHER_LEVERS.get(levers, {}))
    with session as boot:
        km.build_model(boot.manifest, boot.kernels)
    assert session.report.findings == ()
    return session._evidence()


def keys_of(evidence: Evidence) -> dict[KernelKey, Asked]:
    """Return every key that was tried and found."""
    found: dict[KernelKey, Asked] = {}
    for row in evidence.rows:
        for key in evidence.evaluated(row):
            if evidence.decide(key).chosen is not None:
                old = found.get(key, Asked(False, None, frozenset()))
                # A preferred member may be absent if waived; a required chain needs one present member.
                only = row.kind == "required" and (not row.is_chain or row.members[-1] == key)
                sites = old.sites | set(row.sites)
                found[key] = Asked(old.is_required or only, row.requested_by or old.requested_by, sites)
    return found


def without(evidence: Evidence, key: KernelKey) -> Evidence:
    """Take out the registration that serves a key, and what serves behind it; those for other targets stay."""
    while (chosen := evidence.decide(key).chosen) is not None:
        kernels = tuple(row for row in evidence.catalog.kernels if row is not chosen)
        assert len(kernels) == len(evidence.catalog.kernels) - 1
        evidence = changed(evidence, catalog=replace(evidence.catalog, kernels=kernels))
    return evidence


def changed(evidence: Evidence, **changes: Any) -> Evidence:
    """Return other evidence about the same questions, without folding them again."""
    other = replace(evidence, **changes)
    vars(other)["rows"] = evidence.rows
    return other


def waived(evidence: Evidence, key: KernelKey) -> Evidence:
    path = ("expected_absent", key.module, key.func)
    waiver = Waiver(key=key, reason="taken out by a test", where="MODEL.toml:1", path=path)
    return changed(evidence, manifest=replace(evidence.manifest, waivers=(*evidence.manifest.waivers, waiver)))


def refusing(verdict: Verdict) -> list[Finding]:
    return [judged.finding for judged in verdict.findings if judged.refuses]


def problems_without(evidence: Evidence, key: KernelKey, asked: Asked) -> list[str]:
    """Say what a refusal for one missing kernel lacks."""
    found = refusing(judge_boot(without(evidence, key)))
    if len(found) != 1:
        return [f"{key}: {len(found)} refusing findings: {[(f.code, f.subject) for f in found]}"]
    (finding,) = found
    wanted = {"REQUEST_NOT_HONORED"} if asked.requested_by else {"MISSING", "FALLBACK_TAKEN", "WRONG_ARCH"}
    problems = [] if finding.code in wanted else [f"{key}: the code is {finding.code}"]
    if str(key) not in f"{finding.subject} {finding.why}":
        problems.append(f"{key}: not named in {finding.subject}: {finding.why}")
    if {re.sub(r" \(\d+x\)$", "", site) for site in finding.where} != asked.sites:
        problems.append(f"{key}: sites {finding.where}, expected {sorted(asked.sites)}")
    remedy = " ".join(finding.remedies)
    if not finding.layers or "install" not in remedy:
        problems.append(f"{key}: layers {finding.layers}, remedies {finding.remedies}")
    return problems


def problems_waived(evidence: Evidence, key: KernelKey, asked: Asked) -> list[str]:
    """Say where a waiver does not do what it should."""
    verdict = judge_boot(waived(without(evidence, key), key))
    codes = [(j.finding.code, j.finding.subject) for j in verdict.findings]
    if asked.requested_by:
        expected = [("REQUEST_NOT_HONORED", asked.requested_by), ("UNUSED_WAIVER", str(key))]
        return [] if codes[:1] == expected[:1] else [f"{key}: {codes}"]
    expected = [("WAIVED_REQUIRED", str(key))] if asked.is_required else []
    return [] if codes == expected else [f"{key}: waived gives {codes}, expected {expected}"]


@pytest.mark.parametrize(("model", "levers"), BOOTS)
def test_any_missing_kernel_refuses_naming_key_sites_and_remedy(model: str, levers: str) -> None:
    evidence = recorded(model, levers)
    keys = keys_of(evidence)
    assert len(keys) > 20
    assert [problem for key, asked in keys.items() for problem in problems_without(evidence, key, asked)] == []


@pytest.mark.parametrize(("model", "levers"), BOOTS)
def test_missing_kernel_that_is_waived_passes_unless_it_is_required(model: str, levers: str) -> None:
    evidence = recorded(model, levers)
    keys = keys_of(evidence)
    assert {asked.is_required for asked in keys.values()} == {True, False}
    assert [problem for key, asked in keys.items() for problem in problems_waived(evidence, key, asked)] == []


@pytest.mark.parametrize(("model", "levers"), BOOTS)
def test_waiver_of_a_kernel_that_is_there_is_a_finding(model: str, levers: str) -> None:
    evidence = recorded(model, levers)
    for key in keys_of(evidence):
        verdict = judge_boot(waived(evidence, key))
        assert [(j.finding.code, j.finding.subject) for j in verdict.findings] == [("STALE_WAIVER", str(key))]


@pytest.mark.parametrize("model", MODELS)
def test_waivers_of_the_manifest_are_those_that_follow_from_the_lookups(model: str) -> None:
    evidence = recorded(model, "")
    absent = {key for key in evidence.asked_keys if evidence.decide(key).chosen is None}
    assert {waiver.key for waiver in evidence.manifest.waivers} == absent
    for waiver in evidence.manifest.waivers:
        fewer = tuple(one for one in evidence.manifest.waivers if one is not waiver)
        bare = changed(evidence, manifest=replace(evidence.manifest, waivers=fewer))
        assert [(f.code, f.subject) for f in refusing(judge_boot(bare))] == [("MISSING", str(waiver.key))]


@pytest.mark.parametrize(("model", "plugin", "key"), [
    ("qwen3.6-27b", "silu", "silu::silu_mul"),
    ("holo-3.1-35b-a3b", "embedding", "embedding::gather"),
    ("qwen3.6-35b-a3b-dflash", "rope", "rope::rope_yarn"),
    ("qwen3.6-35b-a3b", "prefill_paged", "prefill_paged::prefill_paged_attn"),
])  # fmt: skip
def test_real_boot_without_a_plugin_refuses_and_names_the_block(model: str, plugin: str, key: str) -> None:
    session = km.boot(model, target="cpu", levers={}, no_plugins=[plugin])
    with pytest.raises(km.BootRefused) as refused, session as boot:
        km.build_model(boot.manifest, boot.kernels)
    findings = {finding.subject: finding for finding in session.report.findings}
    assert findings[key].code == "MISSING"
    assert any(f"unblock plugin {plugin}" in remedy for remedy in findings[key].remedies)
    assert key in str(refused.value)
    assert all(site in str(refused.value) for site in findings[key].where)


@pytest.mark.parametrize("model", MODELS)
def test_disabling_any_one_key_for_real_refuses_a_real_boot(model: str) -> None:
    key = sorted(keys_of(recorded(model, "")))[len(model) % 5]
    session = km.boot(model, target="cpu", levers={"MUSTER_DISABLE": str(key)})
    with pytest.raises(km.BootRefused), session as boot:
        km.build_model(boot.manifest, boot.kernels)
    assert [(finding.code, finding.subject) for finding in session.report.findings] == [("DISABLED", str(key))]
