"""A boot that did not pass has a report, is sealed, and launches nothing, for any end of its block."""

import asyncio
import contextlib

import kernel_muster as km
import numpy as np
import pytest

LEFT = [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]


def arguments():
    return {"x": np.ones(2, np.float32), "out": np.zeros(2, np.float32)}


def use(boot, kept, error, *funcs):
    """Ask for some keys, keep a handle and a prepared launch, and end the block, with an exception if there is one."""
    with boot:
        kept.append(boot.kernels.try_kernel("acme", "add"))
        kept.append(kept[0].prepare(**arguments()))
        for func in funcs:
            boot.kernels.try_kernel("acme", func)
        if error is not None:
            raise error


def leave(boot, error, *funcs):
    kept = []
    with pytest.raises(type(error)) as caught:
        use(boot, kept, error, *funcs)
    assert caught.value is error
    return kept


@pytest.mark.parametrize("kind", LEFT)
def test_block_that_is_left_is_sealed_and_has_a_report(world, kind):
    boot = world.boot({"acme": world.acme("acme::add")})
    leave(boot, kind())
    assert (boot.report.verdict, boot.report.complete) == ("incomplete", False)
    assert boot.report.failure.startswith(kind.__name__)
    assert [row.key for row in boot.report.kernels] == ["acme::add"]
    with pytest.raises(km.LateKernelMiss):
        boot.kernels.try_kernel("acme", "mul")
    assert [finding.code for finding in boot.late_findings()] == ["LATE_MISS"]


@pytest.mark.parametrize("kind", LEFT)
def test_block_that_is_left_with_findings_is_refused_and_the_exception_goes_on(world, kind):
    boot = world.boot({"acme": world.acme("acme::add")})
    leave(boot, kind(), "mul")
    assert (boot.report.verdict, [row.code for row in boot.report.findings]) == ("refused", ["MISSING"])


def test_generator_that_is_closed_in_its_block_seals_the_audit(world):
    boot = world.boot({"acme": world.acme("acme::add")})

    def serving():
        with boot:
            yield boot.kernels.try_kernel("acme", "add")

    generator = serving()
    handle = next(generator)
    generator.close()
    assert boot.report.verdict == "incomplete"
    with pytest.raises(km.NullKernelError, match="did not come to its end"):
        handle(**arguments())


@pytest.mark.parametrize("error", [*(kind() for kind in LEFT), ValueError("a layer broke"), SystemExit(0)])
def test_handles_of_a_boot_that_was_cut_short_do_not_launch(world, error):
    handle, launch = leave(world.boot({"acme": world.acme("acme::add")}), error)
    for call in (launch, lambda: handle(**arguments()), lambda: handle.prepare(**arguments())):
        with pytest.raises(km.NullKernelError, match="its boot did not come to its end, so that nothing has passed"):
            call()


def test_handles_of_a_refused_boot_do_not_launch(world):
    boot, kept = world.boot({"acme": world.acme("acme::add")}), []
    with pytest.raises(km.BootRefused):
        use(boot, kept, None, "mul")
    late = boot.kernels.kernel("acme", "add")
    calls = (kept[1], lambda: kept[0](**arguments()), lambda: late(**arguments()), boot.handle_of(late.key).prepare)
    for call in calls:
        with pytest.raises(km.NullKernelError, match="its boot was refused: the report has the reasons"):
            call()


def test_handles_of_a_boot_that_passed_launch_before_and_after_the_seal(world):
    given = arguments()
    with world.boot({"acme": world.acme("acme::add")}) as boot:
        handle = boot.kernels.kernel("acme", "add")
        launch = handle.prepare(**given)
        launch()
    for call in (launch, lambda: handle(**given)):
        given["out"][:] = 0
        call()
        np.testing.assert_array_equal(given["out"], [2, 2])


def test_plugin_that_is_registered_and_refused_leaves_no_handle_that_launches(world):
    kept = []
    lever = km.Lever(name="MUSTER_X", kind="text", default=None, doc="Any text.")
    boot = world.boot({"acme": world.acme("acme::add"), "x": world.plugin(levers=[lever])}, levers={"MUSTER_X": "y"})
    clash = km.Lever(name="MUSTER_X", kind="text", default=None, doc="Another.")

    def register():
        with boot:
            kept.append(boot.handle_of(km.KernelKey("acme", "add")))
            with contextlib.suppress(km.BootRefused):
                boot.register("more", world.plugin(levers=[clash]))

    with pytest.raises(km.BootRefused):
        register()
    assert boot.report.is_refused
    with pytest.raises(km.NullKernelError, match="its boot was refused"):
        kept[0](**arguments())


def test_interrupt_while_the_audit_waits_for_builds_is_sealed_too(world, monkeypatch):
    from kernel_muster.registry.launch.runners import HostRunner

    def interrupted(runner, spec):
        raise KeyboardInterrupt

    boot, kept = world.boot({"acme": world.acme("acme::add")}), []
    monkeypatch.setattr(HostRunner, "state", interrupted)
    with pytest.raises(KeyboardInterrupt), boot:
        kept.append(boot.kernels.kernel("acme", "add"))
    assert boot.report.verdict == "incomplete"
    assert boot.report.failure.startswith("KeyboardInterrupt")
    with pytest.raises(km.NullKernelError):
        kept[0](**arguments())


# objects that leave the session


def tampering(report):
    object.__setattr__(report, "verdict", "passed")
    object.__setattr__(report, "findings", ())
    for row in report.kernels:
        row.sites.clear()
        object.__setattr__(row, "outcome", "found")


def test_observer_that_changes_its_report_changes_nothing(world):
    seen = []
    plugins = {
        "a_first": world.plugin(audit_finished=tampering),
        "b_second": world.plugin(audit_finished=lambda report: seen.append((report.verdict, len(report.findings)))),
    }
    outcome = world.run(world.ask("acme::mul"), plugins)
    assert isinstance(outcome.error, km.BootRefused)
    assert (outcome.report.verdict, outcome.codes) == ("refused", ["MISSING"])
    assert list(outcome.report.kernels[0].sites.values()) == [1]
    assert "MISSING" in str(outcome.error)
    assert seen == [("refused", 1)]


def test_observer_that_changes_the_report_of_a_refused_opening_changes_nothing(world):
    outcome = world.run(lambda boot: None, {"watch": world.plugin(audit_finished=tampering)}, levers={"MUSTER_X": "1"})
    assert isinstance(outcome.error, km.BootRefused)
    assert (outcome.report.verdict, outcome.codes) == ("refused", ["UNKNOWN_LEVER"])


def test_caller_who_changes_the_report_does_not_change_what_is_judged_later(world):
    outcome = world.run(world.ask("acme::mul"))
    tampering(outcome.report)
    tampering(outcome.error.report)
    assert (outcome.replay().verdict, [row.code for row in outcome.replay().findings]) == ("refused", ["MISSING"])
    with pytest.raises(km.LateKernelMiss):
        outcome.session.kernels.try_kernel("acme", "mul")


def waive(boot):
    for waiver in boot.manifest.waivers:
        object.__setattr__(waiver, "key", km.KernelKey("acme", "mul"))
    object.__setattr__(boot.manifest, "waivers", (*boot.manifest.waivers,))


def forget_registrations(boot):
    catalog = boot.kernels.catalog
    object.__setattr__(catalog, "kernels", ())
    object.__setattr__(catalog, "findings", ())
    for row in catalog.plugins:
        object.__setattr__(row, "status", "loaded")


def change_levers(boot):
    for levers in (boot.levers, boot.kernels.levers):
        for setting in levers.settings:
            object.__setattr__(setting, "value", None)


def change_target(boot):
    object.__setattr__(boot.target, "name", "elsewhere")
    object.__setattr__(boot.kernels.target, "arch", None)


def change_specs(boot):
    handle = boot.kernels.try_kernel("acme", "old_add")
    for spec in (handle.spec, *(row.spec for row in boot.kernels.catalog.kernels)):
        object.__setattr__(spec, "aliases", ())
        object.__setattr__(spec, "tier", "fast")
    for contract in (handle.contract, *boot.kernels.catalog.contracts.values()):
        object.__setattr__(contract, "cases", ())
    object.__setattr__(handle.provider, "distribution", "somebody")


WAIVED = '[expected_absent.acme]\nsub = "not ported to this chip yet"'


@pytest.mark.parametrize(
    "change", [waive, forget_registrations, change_levers, change_target, change_specs], ids=lambda one: one.__name__
)
def test_model_that_changes_what_it_sees_changes_no_verdict(world, change):
    def build(boot, change):
        change(boot)
        boot.kernels.try_kernel("acme", "old_add")
        boot.kernels.try_kernel("acme", "mul")
        boot.kernels.try_kernel("acme", "sub")
        change(boot)

    kernels = [world.spec("acme::add", aliases=("acme::old_add",)), world.spec("acme::mul")]
    options = {"stage": "proven", "levers": {"MUSTER_DISABLE": "acme::mul"}}
    plain, changed = (
        world.run(lambda boot, one=one: build(boot, one), {"acme": world.plugin(kernels=kernels)}, WAIVED, **options)
        for one in (lambda boot: None, change)
    )
    assert plain.codes == ["DISABLED", "KEY_RENAMED"]
    assert changed.codes == plain.codes
    assert changed.report.set_hash == plain.report.set_hash
    assert changed.report.target == "cpu"


@pytest.mark.parametrize("name", ["contracts", "by_key", "by_alias", "builders_of", "folders_of"])
def test_catalog_that_a_model_sees_cannot_be_emptied(world, name):
    with world.boot({"acme": world.acme("acme::add")}) as boot:
        boot.kernels.kernel("acme", "add")
        with pytest.raises(AttributeError):
            getattr(boot.kernels.catalog, name).clear()


def test_handle_cannot_be_pointed_elsewhere(world):
    with world.boot({"acme": world.acme("acme::add")}) as boot:
        handle = boot.kernels.kernel("acme", "add")
        for name in ("key", "spec", "contract", "provider"):
            with pytest.raises(AttributeError):
                setattr(handle, name, None)


def test_layout_that_is_missing_cannot_be_explained_away_in_a_copy(world):
    def build(boot):
        handle = boot.kernels.kernel("acme", "add")
        boot.kernels.layouts.want("w", "odd", handle.key)
        for copy in (*boot.kernels.layouts.copies, *boot.kernels.layouts.missing):
            copy.reason = "of course it is built"
            copy.readers.clear()

    assert world.run(build, {"acme": world.acme("acme::add")}).codes == ["LAYOUT_MISSING"]


# malformed questions


class Hashless(str):
    def __hash__(self):
        raise ValueError("no hash")


class Everything(str):
    """Text that passes for a key that was asked for before."""

    def __hash__(self):
        return hash("add")

    def __eq__(self, other):
        return True


class Odd:
    def __getattribute__(self, name):
        raise SystemExit(0)

    __str__ = __repr__ = __hash__ = __bool__ = __getattribute__


class Pair(tuple):
    def __iter__(self):
        return iter(("acme", "add"))

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda kernels: kernels.first_of(("acme", "mul", "f32"), ("acme", "add")),
        lambda kernels: kernels.first_of(),
        lambda kernels: kernels.first_of("acme::mul"),
        lambda kernels: kernels.first_of(Odd()),
        lambda kernels: kernels.first_of(("acme", "add"), required=Odd()),
        lambda kernels: kernels.first_of(("acme", "add"), needed=True),
        lambda kernels: kernels.try_kernel("acme::mul"),
        lambda kernels: kernels.kernel("acme", "mul", "f32"),
        lambda kernels: kernels.kernel("acme", "mul", layer="layers.0"),
    ],
)
def test_question_whose_exception_is_swallowed_is_on_record(world, ask):
    def build(boot):
        boot.kernels.kernel("acme", "add")
        with contextlib.suppress(Exception):
            ask(boot.kernels.for_layer("layers.3"))

    outcome = world.run(build, {"acme": world.acme("acme::add")})
    assert outcome.codes == ["REQUEST_NOT_HONORED"]
    finding = outcome.finding("REQUEST_NOT_HONORED")
    assert (finding.subject, finding.layers) == ("(malformed lookup)", ("layers.3",))
    assert finding.where[0].startswith("tests/audit/test_not_passed.py:")
    assert finding.remedies[0].startswith("correct the call: kernel(module, func)")
    assert outcome.replay().findings == outcome.report.findings


@pytest.mark.parametrize("number", range(7))
def test_name_of_any_class_is_a_miss_that_is_on_record(world, number):
    name = [Hashless("mul"), Everything("mul"), Odd(), [Odd()], {1: Odd()}, 5, None][number]

    def build(boot):
        boot.kernels.kernel("acme", "add")
        assert not boot.kernels.try_kernel("acme", name)
        assert not boot.kernels.first_of(("acme", name), required=False)
        assert boot.kernels.kernel("acme", "add", when=name, requested_by=name)

    outcome = world.run(build, {"acme": world.acme("acme::add")})
    assert outcome.codes == ["MISSING"]
    assert outcome.report.counts.lookups == 4


def test_pair_that_passes_for_another_one_is_asked_as_it_is(world):
    def build(boot):
        assert not boot.kernels.first_of(Pair(("acme", "mul")))

    assert world.run(build, {"acme": world.acme("acme::add")}).finding("MISSING").subject == "acme::mul"


@pytest.mark.parametrize("policy", ["raise", "count"])
def test_malformed_question_after_the_seal_is_a_late_miss(world, policy):
    with world.boot({"acme": world.acme("acme::add")}, on_late_miss=policy) as boot:
        boot.kernels.kernel("acme", "add")
    with pytest.raises(km.LateKernelMiss if policy == "raise" else km.UsageError):
        boot.kernels.first_of(("acme", "add", "f32"))
    (finding,) = boot.late_findings()
    assert finding.code == "LATE_MISS"
    assert "first_of takes (module, func) tuples, got ('acme', 'add', 'f32')" in finding.subject


def test_malformed_question_after_the_seal_ends_a_server(world):
    said = []
    session = world.boot({"acme": world.acme("acme::add")}, on_late_miss="abort", abort=said.append)
    with session as boot:
        boot.kernels.kernel("acme", "add")
    with pytest.raises(km.LateKernelMiss):
        boot.kernels.first_of("acme::add")
    assert "first_of takes (module, func) tuples, got acme::add" in said[0]
