"""Rules at their limits: situations without a finding or with another one, and the texts of findings."""

from dataclasses import replace
from datetime import date

import kernel_muster as km
import pytest
from kernel_muster.audit.rules.lookups import owner_contract
from kernel_muster.registry.contract.specs import Provider, Registered
from kernel_muster.registry.selection.catalog import Catalog, PluginRow

WHY = "not ported to this chip yet"


# registrations without a lookup


def test_dead_registration_is_one_whose_plugin_nothing_asked_for(world):
    base = world.plugin(kernels=[world.spec("base::add")], contracts=[])
    plugins = {"acme": world.acme("acme::mul", "acme::softmax"), "base": base}
    assert world.run(world.ask("acme::mul", "base::add"), plugins).codes == []
    assert world.run(world.ask("base::add"), plugins).finding("DEAD_REGISTRATION").subject == "acme"


def test_what_only_an_opt_in_lever_asks_for_is_not_dead(world):
    turbo = world.plugin(kernels=[world.spec("turbo::mul", opt_in="MUSTER_PREFER")], contracts=[])
    plugins = {"acme": world.acme("acme::mul"), "turbo": turbo}
    assert world.run(world.ask("acme::mul"), plugins).codes == []


def test_registration_that_looks_like_a_miss_is_dead_though_others_of_it_live(world):
    outcome = world.run(world.ask("acme::mul", "acme::softmaxx"), {"acme": world.acme("acme::mul", "acme::softmax")})
    assert outcome.codes == ["DEAD_REGISTRATION", "MISSING"]
    assert "acme::softmax looks like acme::softmaxx, which missed" in outcome.finding("DEAD_REGISTRATION").why


def test_registration_that_looks_like_a_waived_miss_is_not_dead(world):
    waived = f'[expected_absent.acme]\nsoftmaxx = "{WHY}"'
    plugins = {"acme": world.acme("acme::mul", "acme::softmax")}
    assert world.run(world.ask("acme::mul", "acme::softmaxx"), plugins, waived).codes == []
    outcome = world.run(world.ask("acme::softmaxx", "acme::mull"), plugins, waived)
    assert outcome.finding("DEAD_REGISTRATION").why == "acme::mul looks like acme::mull, which missed"


def test_key_asked_for_by_its_old_name_is_not_dead(world):
    plugins = {"acme": world.acme("acme::mul", aliases=("acme::old",))}
    assert world.run(world.ask("acme::old"), plugins).codes == ["KEY_RENAMED"]


def test_request_that_nobody_gives_a_reason_for_says_so(world):
    def ask(boot):
        boot.kernels.request_failed("MUSTER_DISABLE", "")

    outcome = world.run(ask, {"acme": world.acme("acme::mul")})
    assert outcome.finding("REQUEST_NOT_HONORED").why == "no reason was given"


# --quant


def test_quant_that_is_not_the_manifests_is_not_honored(world):
    plugins = {"acme": world.acme("acme::mul")}
    assert world.run(world.ask("acme::mul"), plugins, quant="nvfp4").codes == []
    outcome = world.run(world.ask("acme::mul"), plugins, quant="bf16")
    assert outcome.codes == ["REQUEST_NOT_HONORED"]
    found = outcome.finding("REQUEST_NOT_HONORED")
    assert (found.subject, found.severity) == ("quant", "refuse")
    assert found.why == "bf16 was asked for, but the model was built as its manifest says: nvfp4"
    assert found.where == (outcome.session.manifest.where("model", "quant"),)
    assert outcome.replay().findings == outcome.report.findings


# MUSTER_DISABLE and MUSTER_PREFER


def test_disable_of_a_key_that_nobody_has_is_not_honored(world):
    levers = {"MUSTER_DISABLE": "acme::mull"}
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul")}, levers=levers)
    assert outcome.codes == ["REQUEST_NOT_HONORED"]
    assert "did you mean acme::mul?" in outcome.finding("REQUEST_NOT_HONORED").why


def test_disable_of_a_module_in_the_place_of_a_function_names_its_keys(world):
    plugins = {"acme": world.acme("acme::mul", "acme_fused::softmax")}
    outcome = world.run(world.ask("acme::mul"), plugins, levers={"MUSTER_DISABLE": "other::acme_fused"})
    assert outcome.finding("REQUEST_NOT_HONORED").why.endswith("; did you mean acme_fused::softmax?")


@pytest.mark.parametrize(("name", "value"), [("MUSTER_DISABLE", "mul"), ("MUSTER_PREFER", "mull=acme")])
def test_list_of_what_is_no_key_names_the_key_and_where_it_was_set(world, name, value):
    plugins, build = {"acme": world.acme("acme::mul")}, world.ask("acme::mul")
    finding = world.run(build, plugins, levers={name: value}).finding("BAD_LEVER")
    assert finding.why.endswith("is not a key: expected module::func; did you mean acme::mul?")
    assert finding.where == ("boot(levers=...)",)
    outcome = world.run(build, plugins, f'[defaults]\n{name} = "{value}"')
    assert outcome.finding("BAD_LEVER").where == (outcome.session.manifest.where("defaults", name),)


def test_disable_of_a_key_that_nothing_asks_for_is_no_finding(world):
    plugins = {"acme": world.acme("acme::mul", "acme::softmax")}
    assert world.run(world.ask("acme::mul"), plugins, levers={"MUSTER_DISABLE": "acme::softmax"}).codes == []


def test_disabled_key_that_is_waived_is_excused(world):
    outcome = world.run(
        world.ask("acme::mul", "acme::softmax"),
        {"acme": world.acme("acme::mul", "acme::softmax")},
        f'[expected_absent.acme]\nsoftmax = "{WHY}"',
        levers={"MUSTER_DISABLE": "acme::softmax"},
    )
    assert outcome.codes == []


def test_disable_of_an_old_name_switches_that_name_off(world):
    plugins = {"acme": world.acme("acme::mul", aliases=("acme::old",))}
    old = world.run(world.ask("acme::old", "acme::mul"), plugins, levers={"MUSTER_DISABLE": "acme::old"})
    assert [(f.code, f.subject) for f in old.report.findings] == [("DISABLED", "acme::old")]
    new = world.run(world.ask("acme::old"), plugins, levers={"MUSTER_DISABLE": "acme::mul"})
    assert new.finding("DISABLED").remedies[0] == "take acme::mul out of MUSTER_DISABLE"


def test_layout_that_many_weights_lack_is_one_finding_with_all_their_layers(world):
    def build(boot):
        handle, other = (boot.kernels.kernel("acme", name) for name in ("mul", "add"))
        for layer in range(12):
            boot.kernels.layouts.want(f"layers.{layer}.ffn.down_proj", "acme_tiled", handle.key)
        boot.kernels.layouts.want("layers.3.ffn.up_proj", "acme_tiled", handle.key, other.key)

    outcome = world.run(build, {"acme": world.acme("acme::mul", "acme::add", weight_layout="acme_tiled")})
    assert [(f.subject, f.why) for f in outcome.report.findings] == [
        ("12 weights in acme_tiled", "read by acme::mul, but the layout plan does not build these copies"),
        ("layers.3.ffn.up_proj in acme_tiled",
         "read by acme::add, acme::mul, but the layout plan does not build this copy"),
    ]  # fmt: skip
    assert [len(f.layers) for f in outcome.report.findings] == [12, 1]


def test_preference_for_two_distributions_at_once_is_a_bad_lever(world):
    two_distributions(world)
    levers = {"MUSTER_PREFER": "acme::mul=rival,acme::mul=acme-kernels"}
    finding = world.run(world.ask("acme::mul"), levers=levers).finding("BAD_LEVER")
    assert "acme::mul is to be served by rival and by acme-kernels" in finding.why


def test_circle_of_overrides_is_one_also_where_somebody_else_serves(world):
    for name, other in (("one", "two"), ("two", "one")):
        rival = world.plugin(kernels=[world.spec("acme::mul", overrides=other)], contracts=[])
        world.distribution(name, rival)
    world.distribution("acme", world.acme("acme::mul"))
    outcome = world.run(world.ask("acme::mul"))
    assert outcome.codes == ["BAD_OVERRIDE"]
    assert outcome.finding("BAD_OVERRIDE").why == "one 1.0, two 1.0 override each other"


def test_chain_of_overrides_is_no_circle(world):
    for name, other in (("one", "two"), ("two", "acme")):
        rival = world.plugin(kernels=[world.spec("acme::mul", overrides=other)], contracts=[])
        world.distribution(name, rival)
    world.distribution("acme", world.acme("acme::mul"))
    outcome = world.run(world.ask("acme::mul"))
    assert outcome.codes == ["OVERRIDDEN"]
    assert outcome.report.kernels[0].distribution == "one"


@pytest.mark.parametrize(
    ("theirs", "mine", "target", "reason"),
    [
        ({"archs": ("sm_80+",)}, {"archs": ("sm_90a",)}, "sm_90a", "sm_80+ is less specific than sm_90a"),
        ({"tier": "reference"}, {}, "cpu", "tier reference; a fast kernel serves"),
    ],
)
def test_kernel_that_serves_before_another_distributions_is_noted(world, theirs, mine, target, reason):
    world.distribution("acme-kernels", world.acme("acme::mul", **theirs), plugin="acme")
    fork = world.plugin(kernels=[world.spec("acme::mul", **mine)], contracts=[])
    world.distribution("fork", fork)
    outcome = world.run(world.ask("acme::mul"), target=target, stage="registered")
    assert outcome.codes == ["OVERRIDDEN"]
    found = outcome.finding("OVERRIDDEN")
    assert (found.severity, found.where) == ("note", ("fork 1.0",))
    assert found.why == f"fork 1.0 serves before acme-kernels 1.0: {reason}"
    assert found.remedies == (
        'nothing, if this is meant; else block what serves: no_plugins=["fork"]',
        'or let the other say overrides="fork"',
    )
    assert outcome.report.kernels[0].distribution == "fork"
    (replayed,) = outcome.replay(stage="registered").findings  # of the command, with its words
    assert replayed.remedies[0] == "nothing, if this is meant; else block what serves: --no-plugin fork"
    assert replace(replayed, remedies=found.remedies) == found


def test_kernels_of_one_distribution_replace_nobody(world):
    kernels = [world.spec("acme::mul", tier=tier) for tier in ("fast", "reference")]
    world.distribution("acme-kernels", world.plugin(kernels=kernels), plugin="acme")
    assert world.run(world.ask("acme::mul")).codes == []


def test_what_cannot_serve_the_target_is_not_replaced(world):
    world.distribution("acme-kernels", world.acme("acme::mul", archs=("sm_80+",)), plugin="acme")
    world.distribution("fork", world.plugin(kernels=[world.spec("acme::mul")], contracts=[]))
    assert world.run(world.ask("acme::mul")).codes == []


def two_distributions(world):
    world.distribution("acme-kernels", world.acme("acme::mul"), plugin="acme")
    rival = world.plugin(kernels=[world.spec("acme::mul")], contracts=[])
    world.distribution("rival", rival)


def test_prefer_decides_a_duplicate(world):
    two_distributions(world)
    assert world.run(world.ask("acme::mul")).codes == ["DUPLICATE_KERNEL"]
    outcome = world.run(world.ask("acme::mul"), levers={"MUSTER_PREFER": "acme::mul=rival"})
    assert outcome.codes == []
    assert outcome.report.kernels[0].distribution == "rival"


def test_preference_and_override_name_a_distribution_in_any_spelling(world):
    world.distribution("Acme_Kernels", world.acme("acme::mul"), plugin="acme")
    kernels = [world.spec("acme::mul", overrides="acme.kernels")]
    world.distribution("Fast_Rival", world.plugin(kernels=kernels, contracts=[]), plugin="rival")
    outcome = world.run(world.ask("acme::mul"), levers={"MUSTER_PREFER": "acme::mul=fast-rival"})
    assert outcome.codes == ["OVERRIDDEN"]
    assert outcome.report.kernels[0].distribution == "Fast_Rival"
    assert world.run(world.ask("acme::mul"), no_plugins=["Rival"]).codes == []


@pytest.mark.parametrize(
    ("prefer", "why"), [("acme::mul=nobody", "does not provide"), ("acme::softmax=rival", "does not provide")]
)
def test_preference_that_cannot_be_had_is_not_honored(world, prefer, why):
    two_distributions(world)
    outcome = world.run(world.ask("acme::mul"), levers={"MUSTER_PREFER": prefer})
    assert outcome.codes[-1] == "REQUEST_NOT_HONORED"
    assert why in outcome.finding("REQUEST_NOT_HONORED").why


@pytest.mark.parametrize(
    ("levers", "codes"),
    [
        ({"MUSTER_DISABLE": "acme"}, ["BAD_LEVER"]),
        ({"MUSTER_PREFER": "acme::mul"}, ["BAD_LEVER"]),
        ({"MUSTER_PREFER": "acme=rival"}, ["BAD_LEVER"]),
        ({"MUSTER_PREFER": "acme::mul=rival", "MUSTER_DISABLE": "acme::mul"}, ["LEVER_CONFLICT"]),
    ],
)
def test_malformed_or_contradicting_lists_of_keys_refuse_at_the_door(world, levers, codes):
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul")}, levers=levers)
    assert outcome.codes == codes
    assert outcome.report.counts.lookups == 0


# declarations of the manifest


def test_waiver_out_of_scope_neither_excuses_nor_is_unused(world):
    manifest = f'[expected_absent.acme.softmax]\nreason = "{WHY}"\narchs = ["sm_90a"]'
    plugins = {"acme": world.acme("acme::mul", archs=("cpu", "sm_80+"))}
    assert world.run(world.ask("acme::mul", "acme::softmax"), plugins, manifest).codes == ["MISSING"]
    there = {"target": "sm_90a", "stage": "registered"}
    assert world.run(world.ask("acme::mul", "acme::softmax"), plugins, manifest, **there).codes == []
    assert world.run(world.ask("acme::mul"), plugins, manifest).codes == []


@pytest.mark.parametrize(
    ("scope", "codes"),
    [
        ('quants = ["fp8"]', ["MISSING"]),
        ('quants = ["nvfp4"]', []),
        ('levers = ["MUSTER_PLUGIN_TIMEOUT_S=8"]', ["MISSING"]),
        ('levers = ["MUSTER_PLUGIN_TIMEOUT_S=9"]', []),
    ],
)
def test_waiver_scoped_by_quant_or_lever_excuses_there_alone(world, scope, codes):
    manifest = f'[expected_absent.acme.softmax]\nreason = "{WHY}"\n{scope}'
    plugins, levers = {"acme": world.acme("acme::mul")}, {"MUSTER_PLUGIN_TIMEOUT_S": "9"}
    assert world.run(world.ask("acme::mul", "acme::softmax"), plugins, manifest, levers=levers).codes == codes


def test_expired_waiver_still_excuses_while_serving(world):
    manifest = f'[expected_absent.acme.softmax]\nreason = "{WHY}"\nuntil = 2030-01-01'
    plugins = {"acme": world.acme("acme::mul")}
    outcome = world.run(world.ask("acme::mul", "acme::softmax"), plugins, manifest, as_of=date(2030, 1, 2))
    assert outcome.codes == ["EXPIRED_WAIVER"]
    assert outcome.report.passed
    assert outcome.report.counts.waived == 1


def test_expected_kernel_that_is_asked_for_and_missing_has_the_miss_alone(world):
    manifest = '[expected_present.acme]\nsoftmax = "the main path of this model"'
    outcome = world.run(world.ask("acme::mul", "acme::softmax"), {"acme": world.acme("acme::mul")}, manifest)
    assert outcome.codes == ["MISSING"]


def test_default_of_the_manifest_that_finds_no_kernel_is_not_honored(world):
    def build(boot):
        boot.kernels.kernel("acme", "mul")
        if boot.levers.flag("MUSTER_TURBO"):
            boot.kernels.try_kernel("acme", "turbo", requested_by="MUSTER_TURBO")

    lever = km.Lever(name="MUSTER_TURBO", kind="bool", default=False, doc="Take turbo.")
    plugins = {"acme": world.plugin(kernels=[world.spec("acme::mul")], levers=[lever])}
    assert world.run(build, plugins, "[defaults]\nMUSTER_TURBO = true").codes == ["REQUEST_NOT_HONORED"]
    assert world.run(build, plugins, "[defaults]\nMUSTER_TURBO = true", levers={"MUSTER_TURBO": "0"}).codes == []


def test_lever_that_the_manifest_sets_and_nobody_declares_refuses(world):
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul")}, "[defaults]\nMUSTER_TURBO = true")
    assert outcome.codes == ["UNKNOWN_LEVER"]
    (where,) = outcome.finding("UNKNOWN_LEVER").where
    assert where.endswith("MODEL.toml:6")


def test_remedies_of_a_miss_are_in_their_order(world):
    (provide, gate, declare) = world.run(world.ask("acme::mul")).finding("MISSING").remedies
    assert provide.startswith("install the distribution that provides acme::mul")
    assert "gate the lookup on the model's configuration" in gate
    assert '[expected_absent.acme] mul = "..."' in declare


def test_remedy_of_a_required_miss_is_no_waiver(world):
    outcome = world.run(lambda boot: boot.kernels.kernel("acme", "mul"))
    assert outcome.finding("MISSING").remedies[-1] == "it is required: a waiver cannot excuse it"


# the owner of a key's contract


@pytest.mark.parametrize("guest", ["acme", "zeta"])
def test_contract_of_a_built_in_key_is_the_hosts_whatever_a_guest_is_called(world, guest):
    plugins = (PluginRow("gemv", guest, "1.0", "loaded"), PluginRow("w4a16_gemv", "kernel-muster", "0.1", "loaded"))
    kernels = (
        Registered(world.spec("gemv::dense", contract="of_guest"), Provider("gemv", guest, "1.0")),
        Registered(world.spec("gemv::dense", contract="of_host"), Provider("w4a16_gemv", "kernel-muster", "0.1")),
    )
    assert owner_contract(Catalog(plugins, kernels), km.KernelKey("gemv", "dense")) == "of_host"


# an expected key may not be allowed away


def test_expected_kernel_whose_absence_was_allowed_still_refuses(world):
    manifest = '[expected_present.acme]\nsoftmax = "the main path of this model"'
    plugins = {"acme": world.acme("acme::mul")}
    allowed = {"dangerously_allow_unresolved": ["acme::softmax"]}
    assert world.run(world.ask("acme::mul", "acme::softmax"), plugins, **allowed).report.verdict == "passed"
    outcome = world.run(world.ask("acme::mul", "acme::softmax"), plugins, manifest, **allowed)
    assert outcome.report.verdict == "refused"
    assert "absent, which was allowed" in outcome.finding("EXPECTED_NOT_ASKED").why


def test_expected_kernel_asked_for_by_its_old_name_was_asked_for(world):
    manifest = '[expected_present.acme]\nmul = "the main path of this model"'
    plugins = {"acme": world.acme("acme::mul", aliases=("acme::old",))}
    assert world.run(world.ask("acme::old"), plugins, manifest).codes == ["KEY_RENAMED"]


# waivers without effect


def test_waiver_of_another_scope_is_named_where_its_key_is_missing(world):
    manifest = '[expected_absent.acme.mul]\nreason = "nobody ships it"\narchs = ["sm_90"]'
    plugins = {"acme": world.acme("acme::add", archs=("sm_80+",))}
    outcome = world.run(world.ask("acme::mul"), plugins, manifest, target="sm_90a", stage="registered")
    remedy = outcome.finding("MISSING").remedies[-1]
    assert remedy.startswith("or correct the scope in the manifest: waived at ")
    assert remedy.endswith("MODEL.toml:5, but only on sm_90; this target is sm_90a")
    assert [row for row in outcome.replay(stage="registered").findings if row.remedies[-1] == remedy]


@pytest.mark.parametrize("entry", ["zeta]\nrms_axpi", "zet]\nrms_axpy"])
def test_misspelt_waiver_and_the_miss_that_it_should_excuse_name_each_other(world, entry):
    plugins = {"zeta": world.acme("zeta::rms")}
    outcome = world.run(world.ask("zeta::rms", "zeta::rms_axpy"), plugins, f'[expected_absent.{entry} = "{WHY}"')
    named = entry.replace("]\n", "::")
    miss, unused = outcome.finding("MISSING"), outcome.finding("UNUSED_WAIVER")
    assert unused.why == "nothing asked for it; did you mean zeta::rms_axpy?"
    assert unused.remedies[:2] == (
        "correct the key: zeta::rms_axpy is asked for, and absent",
        f"or remove expected_absent.{named.replace('::', '.')}",
    )
    assert miss.remedies[2].endswith(f"MODEL.toml:6: it names {named}, which nothing asks for")


def test_misspelt_waiver_is_no_hint_of_what_is_waived_or_served(world):
    plugins = {"zeta": world.acme("zeta::rms_axpz")}
    manifest = f'[expected_absent.zeta]\nrms_axpi = "{WHY}"\nrms_axpy = "{WHY}"'
    outcome = world.run(world.ask("zeta::rms_axpz", "zeta::rms_axpy"), plugins, manifest)
    assert outcome.finding("UNUSED_WAIVER").why == "nothing asked for it"


def test_allowed_absence_of_what_is_not_absent_is_said(world):
    local = {"acme": world.acme("acme::mul")}
    allowed = ["acme::add", "acme::div", "acme::mul", "acme::sub"]
    waiver = '[expected_absent.acme]\ndiv = "not ported yet"'

    def build(boot):
        boot.kernels.kernel("acme", "mul")
        boot.kernels.try_kernel("acme", "add")
        boot.kernels.try_kernel("acme", "div")

    outcome = world.run(build, local, waiver, dangerously_allow_unresolved=allowed)
    assert outcome.report.degraded
    idle = [f for f in outcome.report.findings if f.code == "UNUSED_WAIVER"]
    assert [(f.subject, f.where, f.severity) for f in idle] == [
        (key, ("--dangerously-allow-unresolved",), "warn") for key in ("acme::div", "acme::mul", "acme::sub")
    ]


def test_expected_kernel_whose_name_is_misspelt_is_told_what_is_asked_for(world):
    manifest = '[expected_present.zeta]\nrmss = "the main path of this model"'
    finding = world.run(world.ask("zeta::rms"), {"zeta": world.acme("zeta::rms")}, manifest).finding(
        "EXPECTED_NOT_ASKED"
    )
    assert finding.why.endswith("the main path of this model; did you mean zeta::rms?")
    assert finding.remedies[0] == "correct the key: zeta::rms is asked for"


def test_name_that_is_no_key_is_to_be_corrected_and_not_declared(world):
    def build(boot):
        boot.kernels.try_kernel("acme", "mul")
        boot.kernels.try_kernel("Acme", "mul")

    found = world.run(build, {"acme": world.acme("acme::mul")}).finding("MISSING")
    assert found.subject == "Acme::mul"
    assert found.remedies[0] == "correct the key that is asked for: both names are small letters, digits and _"
    assert not any("expected_absent" in remedy or "install" in remedy for remedy in found.remedies)
