"""Lookups and registrations after the seal."""

import kernel_muster as km
import pytest

WAIVER = '[expected_absent.acme]\nmul = "not ported to this chip yet"'


def sealed(world, plugins=None, manifest=WAIVER, **options):
    plugins = plugins or {"acme": world.acme("acme::add")}
    outcome = world.run(world.ask("acme::add", "acme::mul"), plugins, manifest, **options)
    assert outcome.error is None
    return outcome.session


def test_late_miss_raises_by_default_and_names_key_and_site(world):
    boot = sealed(world)
    for _ in range(2):
        with pytest.raises(km.LateKernelMiss, match=r"acme::sub was looked up at .*test_after_the_seal.py:\d+"):
            boot.kernels.kernel("acme", "sub")
    (found,) = boot.late_findings()
    assert (found.code, found.subject, found.why.split(":")[0]) == (
        "LATE_MISS", "acme::sub", "asked for 2 times after the seal",
    )  # fmt: skip


def test_late_miss_of_an_optional_lookup_raises_too(world):
    with pytest.raises(km.LateKernelMiss):
        sealed(world).kernels.try_kernel("acme", "sub")


def test_late_miss_under_abort_calls_abort_with_the_finding(world):
    said = []

    class Aborted(BaseException):
        pass

    def abort(text):
        said.append(text)
        raise Aborted

    boot = sealed(world, on_late_miss="abort", abort=abort)
    with pytest.raises(Aborted):
        boot.kernels.try_kernel("acme", "sub")
    assert "acme::sub" in said[0]


def test_late_miss_raises_where_abort_returns(world):
    boot = sealed(world, on_late_miss="abort", abort=lambda text: None)
    with pytest.raises(km.LateKernelMiss):
        boot.kernels.try_kernel("acme", "sub")


def test_late_miss_under_count_returns_null_and_is_counted(world):
    boot = sealed(world, on_late_miss="count")
    for number in range(3):
        assert not boot.kernels.for_layer(f"layers.{number}").try_kernel("acme", "sub")
    (found,) = boot.late_findings()
    assert found.layers == ("layers.0", "layers.1", "layers.2")
    assert "3 times" in found.why


def test_late_miss_that_is_declared_returns_null(world):
    boot = sealed(world)
    handle = boot.kernels.kernel("acme", "mul")
    assert not handle
    assert handle.waiver == "not ported to this chip yet"
    assert boot.late_findings() == ()


def test_late_chain_is_excused_only_if_every_member_is(world):
    boot = sealed(world)
    assert not boot.kernels.first_of(("acme", "mul"), ("acme", "mul"))
    with pytest.raises(km.LateKernelMiss):
        boot.kernels.first_of(("acme", "mul"), ("acme", "sub"))
    (found,) = boot.late_findings()
    assert (found.code, found.subject) == ("LATE_MISS", "acme::mul")
    declare = 'or declare it, with the true reason, in MODEL.toml: [expected_absent.acme] sub = "..."'
    assert found.remedies == ("look the kernel up while the model is built, and keep the handle", declare)


def test_late_hit_returns_the_handle_and_is_reported(world):
    boot = sealed(world)
    assert boot.kernels.try_kernel("acme", "add")
    assert [(f.code, f.subject) for f in boot.late_findings()] == [("LATE_HIT", "acme::add")]


def test_late_lookup_through_lookups_kept_from_the_boot_is_late(world):
    kept = []

    def build(boot):
        kept.append(boot.kernels)
        for _ in range(2):
            kept[0].try_kernel("acme", "add")

    boot = world.run(build, {"acme": world.acme("acme::add")}).session

    def again():
        return kept[0].try_kernel("acme", "add")

    again()
    again()
    assert "2 times" in boot.late_findings()[0].why
    assert boot.report.counts.lookups == 2


def test_late_rows_do_not_change_the_sealed_report(world):
    boot = sealed(world, on_late_miss="count")
    before = boot.report
    boot.kernels.try_kernel("acme", "sub")
    assert boot.report is before


def test_registration_before_the_first_lookup_counts_and_after_it_is_refused(world):
    def build(boot):
        boot.register("more", world.plugin(kernels=[world.spec("more::add", contract="more")],
                                           contracts=[world.contract("more")]))  # fmt: skip
        assert boot.kernels.try_kernel("more", "add")
        assert boot.kernels.try_kernel("acme", "add")
        with pytest.raises(km.UsageError, match="before the first lookup"):
            boot.register("again", world.plugin())

    assert world.run(build, {"acme": world.acme("acme::add")}).codes == []


def test_registration_that_leaves_no_manifest_is_refused_with_its_report(world):
    def build(boot):
        boot.register("more", world.plugin(manifests=[world.manifest().parent.parent]))

    folder = world.manifest().parent.parent
    outcome = world.run(build, {"acme": world.acme("acme::add")}, None, model="tiny", manifest_folders=[folder])
    assert outcome.codes == ["DUPLICATE_MODEL"]


def test_refused_registration_that_the_block_swallows_refuses_all_the_same(world):
    def build(boot):
        with pytest.raises(km.BootRefused):
            boot.register("more", world.plugin(manifests=[world.manifest().parent.parent]))

    folder = world.manifest().parent.parent
    outcome = world.run(build, {"acme": world.acme("acme::add")}, None, model="tiny", manifest_folders=[folder])
    assert outcome.error is not None
    assert outcome.codes == ["DUPLICATE_MODEL"]


def test_lookups_handed_out_before_a_registration_are_audited_too(world):
    def build(boot):
        before, layer = boot.kernels, boot.kernels.for_layer("layers.0")
        boot.register("more", world.plugin(kernels=[world.spec("more::add", contract="more")],
                                           contracts=[world.contract("more")]))  # fmt: skip
        assert before.layouts is boot.kernels.layouts
        assert layer.kernel("more", "add")
        layer.kernel("acme", "mul")
        before.request_failed("MUSTER_SOMETHING", "the model cannot")
        for _ in range(2):
            boot.kernels.kernel("acme", "add")

    outcome = world.run(build, {"acme": world.acme("acme::add")})
    assert outcome.codes == ["MISSING", "REQUEST_NOT_HONORED"]
    assert outcome.finding("MISSING").layers == ("layers.0",)


@pytest.mark.parametrize(
    "use",
    [
        lambda kernels: kernels.try_kernel("acme", "mul"),
        lambda kernels: kernels.request_failed("MUSTER_SOMETHING", "the model cannot"),
        lambda kernels: kernels.layouts.want("w", "nvfp4_row_major", km.KernelKey("acme", "add")),
    ],
    ids=["lookup", "request", "layout"],
)
def test_registration_after_anything_was_asked_or_wanted_is_a_usage_error(world, use):
    def build(boot):
        use(boot.kernels)
        with pytest.raises(km.UsageError, match="before the first lookup"):
            boot.register("more", world.plugin())

    world.run(build, {"acme": world.acme("acme::add")})


def test_boot_is_entered_once(world):
    boot = sealed(world)
    with pytest.raises(km.UsageError, match="opened before"), boot:
        pass
