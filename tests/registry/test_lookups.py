"""Lookups outside a boot: results and exceptions of the registry."""

from enum import Enum
from types import ModuleType

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.selection.records import LookupEntry, fold


def triple(x, out):
    out[...] = x * 3


def acme(**options):
    signature = km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out")))
    contract = km.Contract(
        name="acme_triple", summary="out = 3 * x", signature=signature, cases=(km.Case("one", {"M": 1}),),
        reference=lambda arguments, dims: {"out": np.asarray(arguments["x"]) * 3},
        tolerance=km.Tolerance(1e-6, 0, "one rounding of f32"),
    )  # fmt: skip
    options = {"archs": ("cpu",), "backend": km.PythonKernel(triple)} | options
    module = ModuleType("acme")
    module.muster_contracts = km.hookimpl(lambda: [contract])
    module.muster_kernels = km.hookimpl(lambda: [km.KernelSpec(key="acme::triple", contract="acme_triple", **options)])
    return module


@pytest.fixture
def kernels():
    return km.open_registry("cpu", levers={}, local_plugins={"acme": acme()})


def test_required_kernel_that_is_there_computes(kernels):
    handle = kernels.kernel("acme", "triple")
    x, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    assert handle(x, out) is None
    np.testing.assert_array_equal(out, [3, 3, 3])
    assert str(handle.key) == "acme::triple"
    assert handle.contract.name == "acme_triple"


def test_prepared_launch_computes_what_its_buffers_hold_then(kernels):
    x, out = np.ones(2, np.float32), np.zeros(2, np.float32)
    launch = kernels.kernel("acme", "triple").prepare(x=x, out=out)
    x[:] = 5
    launch()
    np.testing.assert_array_equal(out, [15, 15])


def test_empty_output_launches_nothing():
    def explode(x, out):
        raise AssertionError("launched")

    kernels = km.open_registry("cpu", levers={}, local_plugins={"acme": acme(backend=km.PythonKernel(explode))})
    kernels.kernel("acme", "triple")(np.ones(0, np.float32), np.zeros(0, np.float32))


def test_required_kernel_that_is_absent_raises_every_time(kernels):
    for _ in range(2):
        with pytest.raises(km.KernelMissing, match=r"acme::trible: .*did you mean acme::triple.*test_lookups.py:\d+"):
            kernels.kernel("acme", "trible")


def test_optional_kernel_that_is_absent_is_falsy_and_raises_when_called(kernels):
    handle = kernels.try_kernel("acme", "trible")
    assert not handle
    with pytest.raises(km.NullKernelError, match="acme::trible was called"):
        handle()


def test_chain_gives_its_first_member_that_resolves(kernels):
    assert kernels.first_of(("acme", "a"), ("acme", "triple"), ("acme", "b")).key == km.KernelKey("acme", "triple")
    assert not kernels.first_of(("acme", "a"), ("acme", "b"))
    with pytest.raises(km.KernelMissing):
        kernels.first_of(("acme", "a"), ("acme", "b"), required=True)


def test_levers_and_target_are_there_to_read(kernels):
    assert kernels.target.is_cpu
    assert kernels.levers["MUSTER_DISABLE"] is None
    assert kernels.for_layer("layers.3.attn").layer == "layers.3.attn"
    with pytest.raises(KeyError):
        kernels.levers["MUSTER_NOPE"]


def test_two_registries_do_not_share_levers():
    off = km.open_registry("cpu", levers={"MUSTER_DISABLE": "acme::triple"}, local_plugins={"acme": acme()})
    on = km.open_registry("cpu", levers={}, local_plugins={"acme": acme()})
    assert not off.try_kernel("acme", "triple")
    assert on.try_kernel("acme", "triple")


def test_registry_does_not_read_the_environment_again(monkeypatch):
    monkeypatch.setenv("MUSTER_DISABLE", "acme::triple")
    kernels = km.open_registry("cpu", local_plugins={"acme": acme()})
    monkeypatch.delenv("MUSTER_DISABLE")
    assert not kernels.try_kernel("acme", "triple")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"levers": {"MUSTER_NOPE": "1"}}, "UNKNOWN_LEVER"),
        ({"levers": {}, "local_plugins": {"acme": acme(tier="quick")}}, "BAD_SPEC"),
        ({"levers": {}, "no_plugins": ["nobody"]}, "PLUGIN_NOT_FOUND"),
    ],
)
def test_registry_with_anything_wrong_is_refused(options, code):
    with pytest.raises(km.BootRefused) as caught:
        km.open_registry("cpu", **options)
    assert [f.code for f in caught.value.report.findings] == [code]


def test_lookup_records_fold_into_one_row_a_question():
    a, b = km.KernelKey("m", "a"), km.KernelKey("m", "b")
    rows = fold(
        [
            LookupEntry((b,), "optional", None, "boot", "", "f:1", "layers.10", 2),
            LookupEntry((b,), "optional", None, "boot", "gated", "f:2", "layers.9", 1),
            LookupEntry((b,), "required", None, "boot", "", "f:1", "", 1),
            LookupEntry((a, b), "optional", None, "boot", "", "f:3", "", 1),
            LookupEntry((b,), "optional", None, "late", "", "f:1", "", 1),
            LookupEntry((b,), "optional", "MUSTER_X", "boot", "", "f:1", "", 1),
        ]
    )
    assert [(row.members, row.kind, row.requested_by, row.phase, row.count) for row in rows] == [
        ((a, b), "optional", None, "boot", 1),
        ((b,), "optional", None, "boot", 3),
        ((b,), "optional", None, "late", 1),
        ((b,), "optional", "MUSTER_X", "boot", 1),
        ((b,), "required", None, "boot", 1),
    ]
    assert list(rows[1].layers) == ["layers.9", "layers.10"]
    assert rows[1].when == "gated"


def test_conditions_of_one_place_are_all_told(kernels):
    for condition in ("rows>8", "rows<=8", "rows>8"):
        kernels.try_kernel("norm", "rms_norm", when=condition)
    entries = kernels._session.entries("boot")
    assert [(entry.when, entry.times) for entry in entries] == [("rows>8", 2), ("rows<=8", 1)]
    assert [row.when for row in fold(entries)] == ["rows<=8 or rows>8"]


def test_decisions_that_reach_a_kernel_are_all_told_once(kernels):
    for decision in ("decode_arm: strided", "MUSTER_FFN_ARM", "decode_arm: strided", ""):
        kernels.try_kernel("norm", "rms_norm", reached_by=decision)
    kernels.first_of(("norm", "rms_norm"), ("norm", "rms_norm_gated"), reached_by=["no text"])
    row, chain = fold(kernels._session.entries("boot"))
    assert (row.reached_by, row.count) == ("MUSTER_FFN_ARM; decode_arm: strided", 4)
    assert chain.reached_by == "['no text']"


@pytest.mark.parametrize(
    "name", ["layers.x.1", "", "1", "layers..1", "a.1.b", "layers.\u0661", "layers.\u00b2", "layers." + "9" * 5000]
)
def test_layers_of_any_name_can_be_sorted(name):
    key = km.KernelKey("m", "a")
    fold([LookupEntry((key,), "optional", None, "boot", "", "f", layer, 1) for layer in (name, "layers.2", "a", "3")])


@pytest.mark.parametrize("order", [(None, ""), ("", None)])
def test_empty_name_of_a_lever_is_none_in_any_order(order):
    key = km.KernelKey("m", "a")
    (row,) = fold([LookupEntry((key,), "optional", lever, "boot", "", "f:1", "", 1) for lever in order])
    assert row.requested_by is None


class Module(str, Enum):  # noqa: UP042  (its str() is not its value, unlike that of a StrEnum)
    ACME = "acme"


def test_name_that_is_an_enumerations_text_is_that_text_also_when_it_is_asked_first(kernels):
    assert str(kernels.try_kernel(Module.ACME, "triple").key) == "acme::triple"
    assert str(kernels.try_kernel("acme", "triple").key) == "acme::triple"


def test_label_of_a_layer_may_be_a_number_and_a_condition_none(kernels):
    kernels.for_layer(3).kernel("acme", "triple", when=None)
    kernels.for_layer("3").kernel("acme", "triple")
    (row,) = fold(kernels._session.entries("boot"))
    assert (row.layers, row.when) == ({"3": 2}, "")


@pytest.mark.parametrize("name", [["acme"], {}, 5, None])
def test_name_that_is_no_text_is_a_miss_like_any_other(kernels, name):
    handle = kernels.try_kernel(name, "mul")
    assert not handle
    assert str(handle.key) == f"{name}::mul"
    assert kernels.try_kernel(name, "mul", requested_by=["x"]).key == handle.key
    with pytest.raises(km.KernelMissing):
        kernels.kernel(name, "mul")


@pytest.mark.parametrize("members", [(), ("acme::mul",), (5,), (("acme", "mul", "add"),)])
def test_chain_of_what_is_no_pair_is_a_usage_error(kernels, members):
    with pytest.raises(km.UsageError, match="first_of"):
        kernels.first_of(*members)
