from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_muster.MODEL_toml import load_manifest, manifest_folder
from kernel_muster.models.build import build_from_dims, build_model
from kernel_muster.models.drafter import drafter_from_dims
from kernel_muster.models.layers.attention_weights import APART
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.source import (
    GivenWeights,
    PlanOnly,
    SyntheticWeights,
    WeightSpec,
    fuse_rows,
    stack_experts,
)
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.layouts import LayoutPlan
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.errors import ContractError, NullKernelError, UsageError
from kernel_muster.registry.hardware.target import CPU_TARGET
from kernel_muster.registry.levers import read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

Make = Callable[..., LayerContext]
SPEC = WeightSpec("layers.0.w", (4, 32), "nvfp4")


def handles(make_context: Make) -> tuple[Any, Any, Any]:
    kernels = make_context().kernels
    row_major, transposed = kernels.kernel("w4a16", "w4a16_gemm"), kernels.kernel("w4a16", "w4a16_gemm_t")
    return row_major, transposed, kernels.try_kernel("w4a4", "w4a4_gemm")


def test_plan_builds_what_chosen_kernels_declare_once_each(make_context: Make) -> None:
    row_major, transposed, absent = handles(make_context)
    layouts, source = LayoutPlan(), SyntheticWeights()
    readers = {"decode": [row_major, absent], "prefill": [transposed, row_major]}
    weight = WeightPlanner(layouts, source).plan(SPEC, readers)
    assert [(copy.layout, copy.reason, copy.size_bytes) for copy in layouts.copies] == [
        ("nvfp4_row_major", "decode, prefill", 4 * 32 * 9 // 16 + 4),
        ("nvfp4_transposed", "prefill", 4 * 32 * 9 // 16 + 4),
    ]
    assert layouts.copies[1].readers == {transposed.key}
    logical = source.find(SPEC)
    assert weight.copy_for(row_major).packed.tobytes() == logical.packed.tobytes()
    assert nvfp4.dequantize(weight.copy_for(transposed)).tobytes() == nvfp4.dequantize(logical).tobytes()
    assert [weight.serves(handle) for handle in (row_major, transposed, absent)] == [True, True, False]
    with pytest.raises(NullKernelError, match="w4a4::w4a4_gemm"):
        weight.copy_for(absent)


class EqualScales(SyntheticWeights):
    """Weights that all have one global scale, as a checkpoint with a fused q|k|v has them."""

    def find(self, spec: WeightSpec) -> Any:
        found = super().find(spec)
        if spec.quant != "nvfp4":
            return found
        return replace(found, global_scale_decode=np.full_like(found.global_scale_decode, 0.01))


@pytest.mark.parametrize("kind", ["dense", "moe", "bf16", "alone", "drafter"])
def test_copies_that_a_plan_and_loaded_weights_do_not_share_are_conditional(
    make_session: Callable[..., LookupSession], tiny_dims: dict[str, Any], kind: str
) -> None:
    build = drafter_from_dims if kind == "drafter" else build_from_dims

    def copies(source: Any) -> dict[tuple[str, str], str]:
        session = make_session()
        build(tiny_dims[kind], Lookups(session), source, max_rows=8)
        return {(copy.weight, copy.layout): copy.condition for copy in session.layouts.copies}

    plan, differ, equal = copies(None), copies(SyntheticWeights(3)), copies(EqualScales(3))
    assert set(plan) == set(differ)
    assert {*differ.values(), *equal.values()} == {""}  # loaded weights have no conditions
    conditional = {place for place, condition in plan.items() if condition}
    assert set(plan) - set(equal) == conditional
    assert {layout for _, layout in conditional} <= {"nvfp4_transposed"}
    assert {weight.rpartition(".")[2] for weight, _ in set(equal) - set(plan)} == (
        {"qkv_proj"} if conditional else set()
    )
    assert bool(conditional) is (kind != "bf16")
    assert all(condition in ("", APART) for condition in plan.values())


def test_copy_with_another_reason_is_not_conditional(make_context: Make) -> None:
    row_major, transposed, _ = handles(make_context)
    layouts = LayoutPlan()
    readers = {"decode": [row_major], "GEMM": [row_major, transposed]}
    WeightPlanner(layouts, PlanOnly()).plan(SPEC, readers, conditions={"GEMM": "if it is there"})
    assert {copy.layout: copy.condition for copy in layouts.copies} == {
        "nvfp4_row_major": "", "nvfp4_transposed": "if it is there",
    }  # fmt: skip


def test_plan_does_not_build_a_copy_that_no_kernel_can_make(make_context: Make) -> None:
    _, transposed, _ = handles(make_context)
    odd = replace(transposed.spec, weight_layout="supertiles", prepare=None)
    handle = Handle(transposed.key, odd, transposed.contract, transposed.provider, transposed._runner)
    layouts = LayoutPlan()
    weight = WeightPlanner(layouts, PlanOnly()).plan(SPEC, {"decode": [handle]})
    assert [(copy.layout, copy.is_built) for copy in layouts.missing] == [("supertiles", False)]
    assert not weight.serves(handle)
    with pytest.raises(UsageError, match="no copy in layout supertiles, which w4a16::w4a16_gemm_t reads"):
        weight.copy_for(handle)


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3.6-35b-a3b"])
def test_plan_knows_every_kernel_that_a_step_of_few_rows_reads_weights_with(catalog: Catalog, name: str) -> None:
    def is_of_few_rows(spec: KernelSpec) -> bool:
        return spec.kernel_key.module in ("w4a16_gemv", "moe_fused_batch2", "moe_fused_batch3", "moe_fused_shared")

    kernels = tuple(
        replace(row, spec=replace(row.spec, weight_layout=f"tiles_of_{row.spec.kernel_key.func}", prepare=None))
        if is_of_few_rows(row.spec) else row for row in catalog.kernels
    )  # fmt: skip
    levers, _ = read_levers(catalog.levers, [])
    session = LookupSession(replace(catalog, kernels=kernels), CPU_TARGET, levers)
    manifest, problems = load_manifest(manifest_folder() / name / "MODEL.toml")
    assert problems == []
    build_model(manifest, Lookups(session))
    tried = (next(filter(session.handle_of, entry.members), None) for entry in session.entries("boot"))
    served = {key for key in tried if (handle := key and session.handle_of(key)) and is_of_few_rows(handle.spec)}
    assert "w4a16_gemv::w4a16_gemv_qgkv_batch3" in map(str, served)
    assert served == {key for copy in session.layouts.missing for key in copy.readers}


def otherwise(layout: str, **changed: Any) -> Callable[[Any], Any]:
    return lambda weight: SimpleNamespace(**{"layout": layout, "quant": weight.quant, "shape": weight.shape} | changed)


def fails(error: BaseException) -> Callable[[Any], Any]:
    def prepare(weight: Any) -> Any:
        raise error

    return prepare


@pytest.mark.parametrize(("prepare", "message"), [
    (fails(KeyError("no tile")), "failed: KeyError: 'no tile'"),
    (fails(SystemExit(7)), "failed: SystemExit: 7"),
    (lambda weight: None, "returned NoneType with layout, quant and shape .*, expected .'supertiles', 'nvfp4', "),
    (lambda weight: weight, "returned Nvfp4Weight .*'nvfp4_row_major'.*, expected .'supertiles'"),
    (otherwise("supertiles", quant="bf16"), "returned SimpleNamespace .*'bf16'.*, expected .*'nvfp4'"),
    (otherwise("supertiles", shape=(4, 64)), r"returned SimpleNamespace .*\(4, 64\).*, expected .*\(4, 32\)"),
])  # fmt: skip
def test_weight_that_a_kernel_prepares_wrongly_is_refused_when_it_is_planned(
    make_context: Make, prepare: Callable[[Any], Any], message: str
) -> None:
    _, transposed, _ = handles(make_context)
    spec = replace(transposed.spec, weight_layout="supertiles", prepare=prepare)
    handle = Handle(transposed.key, spec, transposed.contract, transposed.provider, transposed._runner)
    with pytest.raises(ContractError, match=rf"^w4a16::w4a16_gemm_t: prepare of .* {message}"):
        WeightPlanner(LayoutPlan(), SyntheticWeights()).plan(SPEC, {"decode": [handle]})


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
def test_weight_that_does_not_fit_into_memory_or_an_interrupt_is_no_fault_of_the_kernel(
    make_context: Make, error: BaseException
) -> None:
    _, transposed, _ = handles(make_context)
    spec = replace(transposed.spec, weight_layout="supertiles", prepare=fails(error))
    handle = Handle(transposed.key, spec, transposed.contract, transposed.provider, transposed._runner)
    with pytest.raises(type(error)):
        WeightPlanner(LayoutPlan(), SyntheticWeights()).plan(SPEC, {"decode": [handle]})


@pytest.mark.parametrize(("spec", "size"), [
    (WeightSpec("w", (5120, 6144), "nvfp4"), 17694720 + 4),
    (WeightSpec("w", (256, 512, 2048), "nvfp4"), 256 * (589824 + 4)),
    (WeightSpec("w", (96, 5120), "bf16"), 983040),
    (WeightSpec("w", (64,), "array"), 128),
    (WeightSpec("w", (0, 64), "nvfp4"), 0),
])  # fmt: skip
def test_weight_sizes_in_bytes(spec: WeightSpec, size: int) -> None:
    assert spec.size_bytes == size


@pytest.mark.parametrize(("value", "message"), [
    (SyntheticWeights().find(WeightSpec("w", (4, 32), "bf16")), r"is bf16 \(4, 32\), expected nvfp4 \(4, 32\)"),
    (SyntheticWeights().find(WeightSpec("w", (4, 16), "nvfp4")), r"is nvfp4 \(4, 16\), expected nvfp4 \(4, 32\)"),
    (np.zeros((4, 32)), r"is array \(4, 32\)"),
])  # fmt: skip
def test_given_weight_that_does_not_fit_is_refused(value: Any, message: str) -> None:
    source = GivenWeights({"layers.0.w": value})
    with pytest.raises(UsageError, match=message):
        source.find(SPEC)


def test_synthetic_weights_depend_on_seed_and_name_only() -> None:
    one, again, other = SyntheticWeights(1), SyntheticWeights(1), SyntheticWeights(2)
    assert one.find(SPEC).packed.tobytes() == again.find(SPEC).packed.tobytes()
    assert one.find(SPEC).packed.tobytes() != other.find(SPEC).packed.tobytes()
    assert one.find(SPEC).packed.tobytes() != one.find(replace(SPEC, name="layers.1.w")).packed.tobytes()


def test_stack_experts_keeps_each_matrix() -> None:
    matrices = [nvfp4.quantize(np.random.default_rng(i).standard_normal((3, 32))) for i in range(4)]
    stacked = stack_experts(matrices, (4,))
    assert stacked.shape == (4, 3, 32)
    for index, matrix in enumerate(matrices):
        assert nvfp4.dequantize(stacked[index]).tobytes() == nvfp4.dequantize(matrix).tobytes()


def test_fuse_rows_of_equal_global_scales_is_the_concatenation() -> None:
    one, two = (nvfp4.quantize(np.eye(2, 16) * 3), nvfp4.quantize(np.eye(3, 16) * -3))
    fused = fuse_rows([one, two])
    assert fused is not None
    expected = np.concatenate([nvfp4.dequantize(one), nvfp4.dequantize(two)])
    assert nvfp4.dequantize(fused).tobytes() == expected.tobytes()
    assert fuse_rows([one, nvfp4.quantize(np.eye(3, 16))]) is None
    assert fuse_rows([nvfp4.transpose(one), nvfp4.transpose(two)]) is None
    assert fuse_rows([]) is None
