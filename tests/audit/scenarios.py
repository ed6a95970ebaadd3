"""How each finding code arises.

A scenario is one function of the world: with ``trip`` it does the wrong thing, without it the right one.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Any

import kernel_muster as km
import pytest
from kernel_muster.registry import levers
from kernel_muster.registry.hardware import target

SITE = r"^tests/audit/(scenarios|conftest)\.py:\d+ in .*build$"
LATE_SITE = r"^tests/audit/scenarios\.py:\d+ in late_"


@dataclass(frozen=True)
class Scenario:
    """How one code arises, and what its finding must say."""

    code: str
    run: Callable[..., Any]
    subject: str
    remedy: str
    where: str | None
    also: tuple[str, ...]  # notes of the situation, with or without the finding
    has_trace: bool


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    code: str,
    subject: str,
    remedy: str,
    where: str | None = SITE,
    also: Iterable[str] = (),
    has_trace: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        SCENARIOS[code] = Scenario(code, run, subject, remedy, where, tuple(also), has_trace)
        return run

    return register


def base(world: Any, **more: object) -> dict[str, object]:
    """Return plugins of which ``base`` has the key that every boot here asks for."""
    kernels = [world.spec("base::add", contract="base_add")]
    module = world.plugin("base_plugin", kernels=kernels, contracts=[world.contract("base_add")])
    return {"base": module, **more}


def ask_base(boot: km.BootSession) -> None:
    boot.kernels.kernel("base", "add")


# lookups


@scenario("MISSING", "acme::mul", "install the distribution that provides acme::mul")
def missing(world, trip, **options):
    return world.run(world.ask("acme::mul"), {} if trip else {"acme": world.acme("acme::mul")}, **options)


@scenario("FALLBACK_TAKEN", "acme::fast", "install the distribution that provides acme::fast")
def fallback_taken(world, trip, **options):
    def build(boot):
        assert boot.kernels.first_of(("acme", "fast"), ("acme", "plain"))

    keys = ("acme::plain",) if trip else ("acme::plain", "acme::fast")
    return world.run(build, {"acme": world.acme(*keys)}, **options)


@scenario("WRONG_ARCH", "acme::mul", "install a distribution that provides acme::mul for sm_100a")
def wrong_arch(world, trip, **options):
    plugins = {"acme": world.acme("acme::mul", archs=("sm_90a",))}
    target = "sm_100a" if trip else "sm_90a"
    return world.run(world.ask("acme::mul"), plugins, target=target, stage="registered", **options)


@scenario("DISABLED", "acme::mul", "take acme::mul out of MUSTER_DISABLE")
def disabled(world, trip, **options):
    levers = {"MUSTER_DISABLE": "acme::mul"} if trip else {}
    return world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul")}, levers=levers, **options)


@scenario("SHADOWED", "acme::add", "add add to the distribution that replaces module acme", also=["OVERRIDDEN"])
def shadowed(world, trip, **options):
    world.distribution("acme-kernels", world.acme("acme::mul", "acme::add"), plugin="acme")
    names = ["acme::mul"] if trip else ["acme::mul", "acme::add"]
    fork = [world.spec(name, replaces_module=("acme", "acme-kernels")) for name in names]
    world.distribution("fork", world.plugin(kernels=fork, contracts=[]))
    return world.run(world.ask("acme::mul", "acme::add"), **options)


@scenario("SLOW_TIER", "acme::mul", "install a distribution with a fast kernel for acme::mul")
def slow_tier(world, trip, **options):
    plugins = {"acme": world.acme("acme::mul", archs=("sm_80+",), tier="reference" if trip else "fast")}
    return world.run(world.ask("acme::mul"), plugins, target="sm_90a", stage="registered", **options)


@scenario("REQUEST_NOT_HONORED", "MUSTER_ACME_TURBO", "unset MUSTER_ACME_TURBO")
def request_not_honored(world, trip, **options):
    def build(boot):
        boot.kernels.kernel("acme", "mul")
        if boot.levers.flag("MUSTER_ACME_TURBO"):
            boot.kernels.try_kernel("acme", "turbo", requested_by="MUSTER_ACME_TURBO")

    lever = km.Lever(name="MUSTER_ACME_TURBO", kind="bool", default=False, doc="Take the turbo kernel.")
    specs = [world.spec("acme::mul"), *([] if trip else [world.spec("acme::turbo")])]
    plugins = {"acme": world.plugin(kernels=specs, levers=[lever])}
    return world.run(build, plugins, levers={"MUSTER_ACME_TURBO": "on"}, **options)


@scenario("LAYOUT_MISSING", "layers.0.w in acme_tiled", "build the copy in the model's layout plan", where=None)
def layout_missing(world, trip, **options):
    def build(boot):
        handle = boot.kernels.kernel("acme", "mul")
        boot.kernels.layouts.want("layers.0.w", handle.weight_layout, handle.key)
        if not trip:
            boot.kernels.layouts.build("layers.0.w", "acme_tiled", 64, "acme::mul reads it")

    return world.run(build, {"acme": world.acme("acme::mul", weight_layout="acme_tiled")}, **options)


@scenario("SIGNATURE_MISMATCH", "acme::mul", "implement contract acme_double", also=["OVERRIDDEN"])
def signature_mismatch(world, trip, **options):
    world.distribution("acme-kernels", world.acme("acme::mul"), plugin="acme")
    name = "fork_double" if trip else "acme_double"
    fork = world.spec("acme::mul", overrides="acme-kernels", contract=name)
    world.distribution("fork", world.plugin(kernels=[fork], contracts=[world.contract("fork_double")]))
    return world.run(world.ask("acme::mul"), **options)


# build


@scenario("NO_DEVICE", "cuda", "make the GPU and its driver visible", where=None, has_trace=False)
def no_device(world, trip, **options):
    # No machine has a thousandth GPU, whether it has a driver or not.
    return world.run(ask_base, base(world), target="cuda:999" if trip else "cpu", **options)


@scenario("TOOLCHAIN_MISSING", "cupy", "kernel-muster[cuda13]", where="Pretended GPU", has_trace=False)
def toolchain_missing(world, trip, **options):
    device = target.Device(0, "Pretended GPU", (9, 0), 132, 2**37, "13.0")
    world.monkeypatch.setattr(target, "read_devices", lambda: [device])
    world.monkeypatch.setitem(sys.modules, "cupy", None)  # makes ``import cupy`` fail
    return world.run(ask_base, base(world), target="cuda" if trip else "cpu", **options)


# after the seal


@scenario("LATE_MISS", "acme::mul", "look the kernel up while the model is built", where=LATE_SITE)
def late_miss(world, trip, **options):
    plugins = base(world, acme=world.acme("acme::mul"))
    outcome = world.run(world.ask("base::add", "acme::mul"), plugins, on_late_miss="count", **options)
    if trip:
        outcome = world.run(ask_base, base(world), on_late_miss="count", **options)
        outcome.session.kernels.try_kernel("acme", "mul")
    return outcome.judged_late(**options)


@scenario("LATE_HIT", "acme::mul", "look the kernel up while the model is built", where=LATE_SITE)
def late_hit(world, trip, **options):
    plugins = base(world, acme=world.acme("acme::mul"))
    outcome = world.run(world.ask("base::add", "acme::mul"), plugins, **options)
    if trip:
        outcome.session.kernels.try_kernel("acme", "mul")
    return outcome.judged_late(**options)


@scenario("LATE_REGISTRATION", "acme", "boot(local_plugins=...)", where=LATE_SITE)
def late_registration(world, trip, **options):
    def build(boot):
        if not trip:
            boot.register("acme", world.acme("acme::mul"))
        ask_base(boot)
        boot.kernels.try_kernel("acme", "mul")

    plugins = base(world) if not trip else base(world, acme2=world.acme("acme2::mul"))
    outcome = world.run(world.ask("base::add", "acme2::mul") if trip else build, plugins, **options)
    if trip:
        with pytest.raises(km.LateRegistration, match=r"acme was registered at .*scenarios"):
            outcome.session.register("acme", world.acme("acme::mul"))
    return outcome.judged_late(**options)


# plugins


@scenario("PLUGIN_LOAD_FAILED", "acme", "leave acme out of local_plugins", where=r"\(local\)")
def plugin_load_failed(world, trip, **options):
    def kernels():
        if trip:
            raise ZeroDivisionError("no kernel today")
        return [world.spec("acme::mul")]

    plugins = base(world, acme=world.plugin(kernels=kernels))
    return world.run(world.ask("base::add", *(() if trip else ("acme::mul",))), plugins, **options)


@scenario("PLUGIN_NOT_FOUND", "bass", "install the distribution that offers it", where="plugins")
def plugin_not_found(world, trip, **options):
    return world.run(ask_base, base(world), plugins=["bass" if trip else "base"], **options)


@scenario("PLUGIN_DUPLICATE", "acme", "uninstall all but one of", where="acme-one 1.0")
def plugin_duplicate(world, trip, **options):
    for name in ("acme-one", "acme-two"):
        world.distribution(name, world.plugin(audit_finished=lambda report: None), plugin="acme" if trip else name)
    return world.run(ask_base, base(world), **options)


@scenario("PLUGIN_EMPTY", "acme", "mark its functions @km.hookimpl", where=r"\(local\)")
def plugin_empty(world, trip, **options):
    hooks = {} if trip else {"audit_finished": lambda report: None}
    return world.run(ask_base, base(world, acme=world.plugin(**hooks)), **options)


@scenario("PROCESS_CHANGED", "acme", "take that out of its import and its hooks", where=r"\(local\)")
def process_changed(world, trip, **options):
    def levers():
        if trip:
            os.chdir(world.folder)
        return []

    return world.run(
        ask_base, base(world, acme=world.plugin(levers=levers, audit_finished=lambda report: None)), **options
    )


@scenario("UNKNOWN_HOOK", "acme", "hooks are muster_contracts", where=r"\(local\)")
def unknown_hook(world, trip, **options):
    hooks = {"kernel" if trip else "kernels": [], "audit_finished": lambda report: None}
    return world.run(ask_base, base(world, acme=world.plugin(**hooks)), **options)


@scenario("API_MISMATCH", "acme", "for kernel_muster.v1", where="acme 1.0")
def api_mismatch(world, trip, **options):
    module = None if trip else world.plugin(audit_finished=lambda report: None)
    world.distribution("acme", module, group="v2" if trip else "v1")
    return world.run(ask_base, base(world), **options)


@scenario("DUPLICATE_KERNEL", "acme::mul", "remove all but one from (local)", where=r"\(local\)")
def duplicate_kernel(world, trip, **options):
    plugins = {"acme": world.acme(*["acme::mul"] * (2 if trip else 1))}
    return world.run(world.ask("acme::mul"), plugins, **options)


@scenario("BAD_SPEC", "acme", "correct the plugin", where=r"\(local\)")
def bad_spec(world, trip, **options):
    plugins = base(world, acme=world.plugin(kernels=[42] if trip else [], audit_finished=lambda report: None))
    return world.run(ask_base, plugins, **options)


@scenario("BAD_OVERRIDE", "acme", "correct the distribution's name", where=r"\(local\)")
def bad_override(world, trip, **options):
    plugins = base(world, acme=world.acme("acme::mul", overrides="nobody" if trip else None))
    return world.run(world.ask("base::add", *(() if trip else ("acme::mul",))), plugins, **options)


@scenario("OVERRIDDEN", "acme::mul", "uninstall fork", where="fork 1.0")
def overridden(world, trip, **options):
    world.distribution("acme-kernels", world.acme("acme::mul"), plugin="acme")
    key = "acme::mul" if trip else "fork::mul"
    fork = world.spec(key, overrides="acme-kernels" if trip else None)
    world.distribution("fork", world.plugin(kernels=[fork], contracts=[]))
    return world.run(world.ask("acme::mul", key), **options)


@scenario("DEAD_REGISTRATION", "acme", "correct the keys", where=r"\(local\)")
def dead_registration(world, trip, **options):
    plugins = base(world, acme=world.acme("acme::mul"))
    return world.run(world.ask("base::add", *(() if trip else ("acme::mul",))), plugins, **options)


@scenario("KEY_RENAMED", "acme::old", "look up acme::mul")
def key_renamed(world, trip, **options):
    plugins = {"acme": world.acme("acme::mul", aliases=("acme::old",))}
    return world.run(world.ask("acme::old" if trip else "acme::mul"), plugins, **options)


# manifest


@scenario("BAD_MANIFEST", "model.nmae", "correct the name", where=r"MODEL\.toml:4", has_trace=False)
def bad_manifest(world, trip, **options):
    return world.run(ask_base, base(world), world.manifest(model='nmae = "x"' if trip else ""), **options)


def _waiver(until: str = "") -> str:
    return f'[expected_absent.acme.mul]\nreason = "not ported to this chip yet"\n{until}'


@scenario("EXPIRED_WAIVER", "acme::mul", "renew its date", where=r"MODEL\.toml:\d+")
def expired_waiver(world, trip, **options):
    options = {"as_of": date(2030, 1, 2 if trip else 1)} | options
    manifest = _waiver("until = 2030-01-01") if trip else _waiver()
    return world.run(world.ask("base::add", "acme::mul"), base(world), manifest, **options)


@scenario("WAIVER_EXPIRING", "acme::mul", "renew its date", where=r"MODEL\.toml:\d+")
def waiver_expiring(world, trip, **options):
    options = {"as_of": date(2030, 1, 1)} | options
    manifest = _waiver(f"until = 2030-{'01-31' if trip else '02-01'}")
    return world.run(world.ask("base::add", "acme::mul"), base(world), manifest, **options)


@scenario("STALE_WAIVER", "acme::mul", "remove expected_absent.acme.mul", where=r"MODEL\.toml:\d+")
def stale_waiver(world, trip, **options):
    plugins = base(world, **({"acme": world.acme("acme::mul")} if trip else {}))
    return world.run(world.ask("base::add", "acme::mul"), plugins, _waiver(), **options)


@scenario("UNUSED_WAIVER", "acme::mul", "remove expected_absent.acme.mul", where=r"MODEL\.toml:\d+")
def unused_waiver(world, trip, **options):
    return world.run(world.ask("base::add", *(() if trip else ("acme::mul",))), base(world), _waiver(), **options)


@scenario("WAIVED_REQUIRED", "acme::mul", "drop the waiver at")
def waived_required(world, trip, **options):
    def build(boot):
        (boot.kernels.kernel if trip else boot.kernels.try_kernel)("acme", "mul")

    return world.run(build, base(world, base=world.plugin()), _waiver(), no_plugins=["base"], **options)


@scenario("EXPECTED_NOT_ASKED", "base::add", "or remove expected_present.base.add", where=r"MODEL\.toml:\d+")
def expected_not_asked(world, trip, **options):
    manifest = '[expected_present.base]\nadd = "the main path of this model"'
    plugins = base(world, base=world.acme("base::add", "base::mul"))
    return world.run(world.ask("base::mul", *(() if trip else ("base::add",))), plugins, manifest, **options)


@scenario("UNKNOWN_MODEL", "'tinny'", "muster models lists all of them", where=None, has_trace=False)
def unknown_model(world, trip, **options):
    options["manifest_folders"] = [world.manifest().parent.parent]
    return world.run(ask_base, base(world), None, model="tinny" if trip else "tiny", **options)


@scenario("AMBIGUOUS_MODEL", "(acme_moe, 2048)", "name one of them: one, two", where="MODEL.toml", has_trace=False)
def ambiguous_model(world, trip, **options):
    types = '[[model_types]]\nmodel_type = "acme_moe"\nhidden_size = 2048'
    folders = [world.manifest(types, name).parent.parent for name in ("one", "two")]
    config = world.folder / "config.json"
    config.write_text(json.dumps({"model_type": "acme_moe", "hidden_size": 2048}))
    options = {"model": None if trip else "two", "config": config, "manifest_folders": folders} | options
    return world.run(ask_base, base(world), None, **options)


_ACME_TYPE = '[[model_types]]\nmodel_type = "acme_moe"\nhidden_size = 2048'


def _with_config(world, folders, config, reference=None, **options):
    """Boot the model that a config.json resolves to among the manifests of some folders."""
    file = world.folder / "config.json"
    file.write_text(json.dumps({"model_type": "acme_moe", "hidden_size": 2048} | config))
    options = {"model": reference, "config": file, "manifest_folders": folders} | options
    return world.run(ask_base, base(world), None, **options)


@scenario("REFERENCE_NAMES_OTHER", "one", "name the model that is meant", where="MODEL.toml", has_trace=False)
def reference_names_other(world, trip, **options):
    one = world.manifest(_ACME_TYPE, "one", model='match_names = ["acme-one"]')
    two = world.manifest("", "two", model='match_names = ["acme-two"]')
    folders = [file.parent.parent for file in (one, two)]
    return _with_config(world, folders, {}, f"/models/Acme-{'Two' if trip else 'One'}", **options)


@scenario("UNKNOWN_CONFIG_FIELD", "config.json", "known_config_fields", where="config.json", has_trace=False)
def unknown_config_field(world, trip, **options):
    folders = [world.manifest(_ACME_TYPE).parent.parent]
    field = "attention_sharpness" if trip else "attention_dropout"
    return _with_config(world, folders, {"text_config": {field: 0.5}}, **options)


@scenario("WEIGHTS_NOT_QUANTISED", "tiny", "checkpoint in nvfp4", where="config.json", has_trace=False)
def weights_not_quantised(world, trip, **options):
    folders = [world.manifest(_ACME_TYPE).parent.parent]
    quantised = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    return _with_config(world, folders, {"num_hidden_layers": 4} | ({} if trip else quantised), **options)


@scenario("DUPLICATE_MODEL", "tiny", "rename or remove all but one", where="MODEL.toml", has_trace=False)
def duplicate_model(world, trip, **options):
    folders = [world.manifest(name=name).parent.parent for name in ("tiny", "tiny" if trip else "other")]
    return world.run(ask_base, base(world), None, model="tiny", manifest_folders=folders, **options)


# levers


@scenario("UNKNOWN_LEVER", "MUSTER_DISABEL", "correct the name, or unset it", where=r"boot\(levers", has_trace=False)
def unknown_lever(world, trip, **options):
    name = "MUSTER_DISABEL" if trip else "MUSTER_DISABLE"
    return world.run(ask_base, base(world), levers={name: "base::sub" if trip else " "}, **options)


@scenario("BAD_LEVER", "MUSTER_PLUGIN_TIMEOUT_S", "an integer from 1 to 3600", where=r"boot\(levers", has_trace=False)
def bad_lever(world, trip, **options):
    return world.run(ask_base, base(world), levers={"MUSTER_PLUGIN_TIMEOUT_S": "soon" if trip else "5"}, **options)


@scenario("LEVER_CONFLICT", "MUSTER_ACME_HOT", "unset MUSTER_ACME_HOT or", where=r"boot\(levers", has_trace=False)
def lever_conflict(world, trip, **options):
    hot, cold = "MUSTER_ACME_HOT", "MUSTER_ACME_COLD"
    declared = [
        km.Lever(name=hot, kind="bool", default=False, doc="Heat.", conflicts=(cold,)),
        km.Lever(name=cold, kind="bool", default=False, doc="Cool."),
    ]
    plugins = base(world, acme=world.plugin(levers=declared))
    return world.run(ask_base, plugins, levers={hot: "1", cold: "1" if trip else "0"}, **options)


@scenario("REMOVED_LEVER", "MUSTER_OLD_NAME", "use MUSTER_DISABLE instead", where=r"boot\(levers", has_trace=False)
def removed_lever(world, trip, **options):
    world.monkeypatch.setitem(levers.REMOVED_LEVERS, "MUSTER_OLD_NAME", "MUSTER_DISABLE")
    return world.run(ask_base, base(world), levers={"MUSTER_OLD_NAME": "1"} if trip else {}, **options)


# coverage


@scenario("SET_HASH_MISMATCH", "set hash", "muster diff A.json B.json", where=None)
def set_hash_mismatch(world, trip, **options):
    known = world.run(ask_base, base(world)).report.set_hash
    return world.run(ask_base, base(world), expect_set_hash="0" * 64 if trip else known, **options)


@scenario("VACUOUS_AUDIT", "tiny", "km.build_model(boot.manifest, boot.kernels)", where=None)
def vacuous_audit(world, trip, **options):
    return world.run((lambda boot: None) if trip else ask_base, base(world), **options)


@scenario("UNCHECKED", "compiled", "ask for --stage registered", where=None)
def unchecked(world, trip, **options):
    outcome = world.run(ask_base, base(world), **options)
    outcome.late_report = outcome.replay(stage="compiled" if trip else "registered", **options)
    return outcome


@scenario("PLAIN_ARCH", "sm_90", "name the target sm_90a", where=None)
def plain_arch(world, trip, **options):
    plugins = {"acme": world.acme("acme::mul", archs=("sm_80+", "sm_90a"))}
    target = "sm_90" if trip else "sm_90a"
    return world.run(world.ask("acme::mul"), plugins, target=target, stage="registered", **options)


# tuning tables


def with_table(world, build, digest=None, **options):
    """Boot for an architecture with a table of it: its kernel is acme's, its one edge a lever of acme's."""
    edge = km.Lever(name="MUSTER_ACME_EDGE", kind="int", default=32, doc="an edge", tuning="same_bits")
    spec = world.spec("acme::mul", archs=("sm_90a",))
    table = world.tuning_table({"acme::mul": digest or spec.backend.source_sha256}, {"MUSTER_ACME_EDGE": 64})
    (world.folder / "a1.json").write_text(json.dumps(table))
    world.monkeypatch.chdir(world.folder)
    levers = {"MUSTER_TUNING_TABLE": "a1.json"}
    acme = world.plugin("acme_plugin", kernels=[spec], levers=[edge])
    outcome = world.run(build, {"acme": acme}, target="sm_90a", stage="registered", levers=levers, **options)
    (row,) = (row for row in outcome.report.levers if row.name == "MUSTER_ACME_EDGE")
    assert (row.value, row.origin) == (64, "table")
    assert row.evidence == "Acme A1 (sm_90a, 4 SMs), table a1.json of 2026-11-29, t / k64: 16 x 64: 2 / 1"
    return outcome


@scenario("TUNING_STALE", "a1.json", "measure again on this device", where=None)
def tuning_stale(world, trip, **options):
    return with_table(world, world.ask("acme::mul"), "0" * 64 if trip else None, **options)


@scenario("TUNING_UNCOVERED", "a1.json", "measure these shapes too", where=None)
def tuning_uncovered(world, trip, **options):
    def build(boot):
        handle = boot.kernels.try_kernel("acme", "mul")
        shape = (2048, 64) if trip else (1024, 16)
        for layout in ("rows", "columns"):
            boot.kernels.layouts.want("layers.0.w", layout, handle.key)
            boot.kernels.layouts.build("layers.0.w", layout, 1, "decode", shape)

    return with_table(world, build, **options)
