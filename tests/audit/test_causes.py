"""One finding for each cause: a failed or blocked plugin explains the misses of all its keys."""

from dataclasses import replace

import kernel_muster as km
import pytest
from kernel_muster.registry.discovery.family_keys import FAMILY_KEYS


def explained(finding):
    """Return the keys that a finding explains."""
    return [text.split(": ")[0].split()[1] for text in finding.explains]


def fails(*keys):
    """Return what the hook of kernels returns for some keys, with something that makes the plugin fail."""
    return [*keys, 42]


@pytest.mark.parametrize("family", ["nvfp4_gemv", "dense_gemm", "moe", "w4a16", "norm"])
def test_blocked_family_is_one_finding_whatever_the_modules_of_its_keys(family):
    session = km.boot("qwen3.6-35b-a3b", target="cpu", levers={}, no_plugins=[family])
    with pytest.raises(km.BootRefused), session as boot:
        km.build_model(boot.manifest, boot.kernels)
    (finding,) = session.report.findings
    absent = {row.key for row in session.report.kernels if row.outcome in ("absent", "fallback")}
    assert {finding.subject, *explained(finding)} == absent <= set(FAMILY_KEYS[family])
    assert finding.remedies[0].startswith(f"unblock plugin {family} (no_plugins), which is there to provide")
    reasons = {row.reason for row in session.report.kernels if row.key in absent and row.reason}
    said = f"plugin {family} of kernel-muster, which provides it, is blocked"
    assert reasons
    assert all(reason.endswith(said) for reason in reasons)


def test_key_that_a_blocked_family_does_not_have_is_a_cause_of_its_own(world):
    outcome = world.run(world.ask("w4a16_gemv::w4a16_gemv", "w4a16_gemv::nothing"))
    assert [(f.code, f.subject) for f in outcome.report.findings] == [
        ("MISSING", "w4a16_gemv::nothing"),
        ("MISSING", "w4a16_gemv::w4a16_gemv"),
    ]
    nothing, gemv = outcome.report.findings
    assert "block" not in "".join((nothing.why, *nothing.remedies))
    assert gemv.why.endswith("plugin nvfp4_gemv of kernel-muster, which provides it, is blocked")


def blocked(world, *, allowed=(), manifest="", build=None):
    plugins = {"acme": world.acme("acme::a", "acme::b", "acme::c"), "other": world.acme("other::d")}
    build = build or world.ask("acme::a", "acme::b", "acme::c", "other::d")
    return world.run(build, plugins, manifest, no_plugins=["acme"], dangerously_allow_unresolved=allowed)


def test_misses_of_a_blocked_plugin_are_one_finding_in_a_replay_too(world):
    outcome = blocked(world, build=world.ask("acme::a", "acme::b", "acme::c"))
    for report in (outcome.report, outcome.replay()):
        (finding,) = (f for f in report.findings if f.code == "MISSING")
        assert (finding.subject, explained(finding)) == ("acme::a", ["acme::b", "acme::c"])
        assert (
            "plugin acme of (local) is blocked, and provides 3 keys that are asked for: acme::a, acme::b, acme::c"
            in (finding.why)
        )


def test_allowed_key_of_a_blocked_plugin_excuses_no_other(world):
    outcome = blocked(world, allowed=["acme::a"])
    missing = [(f.subject, f.allowed, explained(f)) for f in outcome.report.findings if f.code == "MISSING"]
    assert missing == [("acme::b", False, ["acme::c"]), ("acme::a", True, [])]
    assert outcome.report.is_refused
    everything = blocked(world, allowed=["acme::a", "acme::b", "acme::c"])
    assert [(f.subject, f.allowed) for f in everything.report.findings if f.code == "MISSING"] == [
        ("acme::a", True), ("acme::b", True), ("acme::c", True),
    ]  # fmt: skip


def test_waived_key_of_a_blocked_plugin_is_no_consequence(world):
    outcome = blocked(world, manifest='[expected_absent.acme]\nb = "nobody ships it for this chip"')
    (finding,) = (f for f in outcome.report.findings if f.code == "MISSING")
    assert (finding.subject, explained(finding)) == ("acme::a", ["acme::c"])


def test_chain_behind_a_blocked_plugin_is_a_consequence_of_the_block(world):
    def build(boot):
        boot.kernels.first_of(("acme", "a"), ("other", "d"))
        boot.kernels.kernel("acme", "b")

    (finding,) = (f for f in blocked(world, build=build).report.findings if f.severity == "refuse")
    assert (finding.code, finding.subject) == ("MISSING", "acme::b")
    assert finding.explains[0].startswith("FALLBACK_TAKEN acme::a: asked for at ")


def test_key_that_a_lever_asked_for_is_a_consequence_of_the_plugin_that_failed(world):
    def build(boot):
        boot.kernels.try_kernel("acme", "a", requested_by="MUSTER_PREFER")

    outcome = world.run(build, {"acme": world.plugin(kernels=fails(world.spec("acme::a")))})
    assert outcome.codes == ["BAD_SPEC"]
    assert outcome.finding("BAD_SPEC").explains[0].startswith("REQUEST_NOT_HONORED MUSTER_PREFER: asked for at ")


def test_lever_that_asked_for_two_keys_is_no_consequence_of_what_one_of_them_lacks(world):
    def build(boot):
        boot.kernels.try_kernel("acme", "a", requested_by="MUSTER_PREFER")
        boot.kernels.try_kernel("nobody", "b", requested_by="MUSTER_PREFER")

    outcome = world.run(build, {"acme": world.plugin(kernels=fails(world.spec("acme::a")))})
    assert outcome.codes == ["BAD_SPEC", "REQUEST_NOT_HONORED"]
    assert "nobody::b" in outcome.finding("REQUEST_NOT_HONORED").why


def test_lever_that_asked_for_a_key_of_a_blocked_plugin_names_the_block(world):
    def build(boot):
        boot.kernels.try_kernel("acme", "a", requested_by="MUSTER_PREFER")

    finding = blocked(world, build=build).finding("REQUEST_NOT_HONORED")
    assert "plugin acme of (local), which owns its module, is blocked" in finding.why
    assert finding.remedies[0].startswith("unblock plugin acme")


def test_misses_of_a_plugin_are_consequences_of_the_plugin_whose_contracts_it_needs(world):
    base = world.plugin(contracts=[world.contract("base_double")], kernels=fails())
    user = world.plugin(contracts=[], kernels=[world.spec("user::a", contract="base_double")])
    outcome = world.run(world.ask("user::a"), {"base": base, "user": user})
    assert outcome.codes == ["BAD_SPEC"]
    assert [text.split(": ")[0] for text in outcome.finding("BAD_SPEC").explains] == [
        "plugin user needs the contract base_double of base, which failed", "MISSING user::a",
    ]  # fmt: skip


def test_misses_of_all_plugins_at_fault_are_consequences_of_their_one_finding(world):
    def plugin(key):
        return world.plugin(
            kernels=[world.spec(key)], levers=[km.Lever(name="MUSTER_E", kind="bool", default=False, doc="x")]
        )

    world.distribution("one-kernels", plugin("one::a"), plugin="one")
    world.distribution(
        "two-kernels",
        world.plugin(
            contracts=[],
            levers=[km.Lever(name="MUSTER_E", kind="bool", default=False, doc="x")],
            kernels=[world.spec("two::b")],
        ),
        plugin="two",
    )
    outcome = world.run(world.ask("one::a", "two::b"))
    assert outcome.codes == ["BAD_SPEC"]
    assert explained(outcome.finding("BAD_SPEC")) == ["one::a", "two::b"]


def test_plugins_of_one_name_explain_their_misses(world):
    for name in ("one-kernels", "two-kernels"):
        world.distribution(name, None, plugin="acme")
    outcome = world.run(world.ask("acme::a"))
    assert outcome.codes == ["PLUGIN_DUPLICATE"]
    assert explained(outcome.finding("PLUGIN_DUPLICATE")) == ["acme::a"]


@pytest.fixture
def forgetful(world, tmp_path):
    """Boot with a third party's plugin for another plugin's open keys, and again without it; return how that ended."""

    def boot(build, second, **options):
        opened = replace(world.contract("open_double"), open_keys=("host::tile", "host::other"))
        host = world.plugin(contracts=[opened])
        kernels = [world.spec(key, contract="open_double") for key in ("host::tile", "host::other")]
        site = world.distribution("acme-kernels", world.plugin(contracts=[], kernels=kernels), plugin="acme")
        levers = {"MUSTER_CACHE_DIR": str(tmp_path / "cache")}
        first = world.run(world.ask("host::tile"), {"host": host}, levers=levers)
        assert first.report.kernels[0].distribution == "acme-kernels", first.said
        if second == "failed":
            (site / "acme_kernels-1.0.dist-info" / "entry_points.txt").write_text("[kernel_muster.v1]\nacme = gone\n")
        blocks = ["acme"] if second == "blocked" else []
        return world.run(build, {"host": host}, levers=levers, no_plugins=blocks, **options)

    return boot


def test_plugin_that_fails_explains_misses_of_keys_that_it_had_when_it_last_loaded(world, forgetful):
    outcome = forgetful(world.ask("host::tile", "host::other", "host::nothing"), "failed")
    for report in (outcome.report, outcome.replay()):
        assert [(f.code, f.subject, explained(f)) for f in report.findings if f.severity == "refuse"] == [
            ("MISSING", "host::nothing", []), ("PLUGIN_LOAD_FAILED", "acme", ["host::other", "host::tile"]),
        ]  # fmt: skip
    reasons = {row.key: row.reason for row in outcome.report.kernels}
    assert reasons["host::tile"].endswith(
        "plugin acme of acme-kernels, which provided it when it last loaded, did not load"
    )


def test_plugin_that_is_blocked_explains_misses_of_keys_that_it_had_when_it_last_loaded(world, forgetful):
    outcome = forgetful(world.ask("host::tile", "host::other"), "blocked")
    (finding,) = outcome.report.findings
    assert (finding.code, finding.subject, explained(finding)) == ("MISSING", "host::other", ["host::tile"])
    assert outcome.report.is_refused


@pytest.mark.parametrize("second", ["failed", "blocked"])
def test_last_keys_excuse_nothing(world, forgetful, second):
    outcome = forgetful(world.ask("host::tile"), second, dangerously_allow_unresolved=["host::other"])
    assert outcome.report.is_refused
