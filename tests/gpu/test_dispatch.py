"""The launched kernel of a projection on the device, under each lever, and the measurements of tuning there."""

from collections.abc import Callable
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.bench.tuning.device import DeviceSource
from kernel_muster.bench.tuning.edges import find_edges
from kernel_muster.bench.tuning.source import TILE_ARMS
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.projection import projection
from kernel_muster.models.memory.memory import memory_of
from kernel_muster.models.memory.scratch import Scratch, ScratchPlan
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.random_weights import in_memory
from kernel_muster.models.weights.source import SyntheticWeights, WeightSpec
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.levers import read_levers

pytestmark = pytest.mark.gpu

N, K = 384, 1024
WEIGHTS = SyntheticWeights(3)


@pytest.fixture(scope="module")
def run(cache: str) -> Callable[..., dict[str, int]]:
    """Return what projects so many rows under levers, checks the result, and tells which arms ran."""

    def project(rows: int, phase: str = "decode", **levers: object) -> dict[str, int]:
        # No weight here is large: none shall count as small or tiny unless the test sets it.
        sizes = {"W4A16_HOPPER_SMALL_MI": 0, "W4A16_HOPPER_TINY_MI": 0, "W4A16_GEMV_MI": 0}
        given = {f"MUSTER_{name}": value for name, value in (sizes | levers).items()}
        kernels = km.open_registry("cuda", levers={"MUSTER_CACHE_DIR": cache, "MUSTER_TUNING_TABLE": "none", **given})
        memory = memory_of(kernels.target)
        with memory.active():
            planner = WeightPlanner(kernels.layouts, in_memory(WEIGHTS, memory), memory)
            ctx = LayerContext(kernels, planner, Scratch(ScratchPlan()), 64).for_layer("layers.0.test")
            linear = projection(ctx, "w", (N, K), "nvfp4")
            x = np.random.default_rng(rows).standard_normal((rows, K)).astype(numpy_dtype("bf16"))
            out = memory.empty((rows, N), "bf16")
            linear.forward(memory.put(x), out, phase)
            got = memory.get(out).astype(np.float64)
        weight = nvfp4.dequantize(WEIGHTS.find(WeightSpec("layers.0.test.w", (N, K), "nvfp4")))
        exact = x.astype(np.float64) @ weight.T
        bound = 2.0**-8 * np.abs(exact) + K * 2.0**-23 * (np.abs(x.astype(np.float64)) @ np.abs(weight).T)
        assert np.all(np.abs(got - exact) <= bound)
        return dict(linear.used)

    return project


@pytest.fixture(scope="module")
def is_hopper() -> bool:
    return km.open_registry("cuda", levers={}).target.arch == parse_arch("sm_90a")


@pytest.mark.parametrize(("levers", "rows", "phase", "used"), [
    ({}, 1, "decode", {"gemv1": 1}), ({}, 16, "decode", {"gemv16": 1}),
    ({"W4A16_ARM": "gemv"}, 33, "prefill", {"gemv256": 1}),
    ({"W4A16_ARM": "gemv"}, 257, "prefill", {"gemv256": 1, "gemv1": 1}),
    ({"W4A16_ARM": "tile"}, 17, "decode", {"t": 1}), ({"NO_W4A16_HOPPER": "1"}, 33, "decode", {"t": 1}),
    ({"NO_W4A16_HOPPER": "1"}, 32, "decode", {"gemv256": 1}), ({"NO_W4A16_HOPPER": "1"}, 64, "verify", {"t": 1}),
    ({"NO_W4A16_HOPPER": "1"}, 65, "verify", {"m128": 1}),
    ({"NO_W4A16_HOPPER": "1", "W4A16_K64_MIN_K": 64}, 33, "decode", {"k64_n64": 1}),
    ({"NO_W4A16_HOPPER": "1", "W4A16_K64_MIN_K": 64, "NO_K64_N64": "1"}, 33, "decode", {"k64": 1}),
    ({"NO_W4A16_HOPPER": "1", "W4A16_VARIANT": "v2"}, 65, "prefill", {"m128_v2": 1}),
])  # fmt: skip
def test_levers_choose_the_kernel_that_runs(
    run: Callable[..., Any], levers: dict[str, object], rows: int, phase: str, used: dict[str, int]
) -> None:
    assert run(rows, phase, **levers) == used


@pytest.mark.parametrize(("levers", "rows", "used"), [
    ({}, 17, {"hopper": 1}), ({"W4A16_HOPPER_FROM": 33}, 17, {"gemv256": 1}),
    ({"W4A16_HOPPER_FROM": 4}, 4, {"hopper": 1}), ({"W4A16_ARM": "hopper"}, 1, {"hopper": 1}),
    ({"W4A16_HOPPER_SMALL_MI": 1, "W4A16_HOPPER_FROM_SMALL": 49}, 48, {"gemv256": 1}),
    ({"W4A16_GEMV_MI": 1}, 256, {"gemv256": 1}), ({"W4A16_GEMV_MI": 1}, 257, {"hopper": 1}),
])  # fmt: skip
def test_hopper_gemm_runs_from_its_edge(
    run: Callable[..., Any], is_hopper: bool, levers: dict[str, object], rows: int, used: dict[str, int]
) -> None:
    if not is_hopper:
        pytest.skip("the Hopper GEMM is for sm_90a alone")
    assert run(rows, **levers) == used


def test_tuning_measures_every_arm_and_finds_every_edge_of_a_shape(is_hopper: bool) -> None:
    kernels = km.open_registry("cuda")
    source = DeviceSource(kernels, 5, peers=False)
    few, many = list(source.timings(512, 1024, (4, 17)))
    assert source.problems == []
    hopper = {"hopper"} if is_hopper else set()
    assert set(few.us) == {"gemv", "tiles3", "bf16_gemv", "bf16_tiles3"} | hopper
    assert set(many.us) == {"gemv", *TILE_ARMS, "bf16_gemv", "bf16_gemm"} | hopper
    assert all(us > 0.5 for timing in (few, many) for us in timing.us.values())
    found = {edge.question.lever for edge in find_edges([few, many], read_levers(kernels.catalog.levers, ())[0])}
    assert {"MUSTER_QKV_TIER_ROWS", "MUSTER_W4A16_K64_MIN_K", "MUSTER_W4A16_CHUNKED_ROWS"} <= found
    assert {"MUSTER_BF16_TIER_ROWS", "MUSTER_BF16_GEMM_FROM"} <= found
    measured = {"w4a16_gemv::w4a16_gemv_batch4", "w4a16::w4a16_gemm_t_m128", "gemm::dense_gemm_bf16"}
    assert set(source.kernels) >= measured


def test_tuning_measures_a_weight_that_is_always_bf16_as_that_alone() -> None:
    source = DeviceSource(km.open_registry("cuda"), 5, peers=False, only_bf16=[(64, 1024)])
    few, many = list(source.timings(64, 1024, (16, 17)))
    assert source.problems == []
    assert (set(few.us), set(many.us)) == ({"bf16_gemv", "bf16_tiles3"}, {"bf16_gemv", "bf16_gemm"})
    assert {key.partition("::")[0] for key in source.kernels} == {"gemv", "gemm"}
