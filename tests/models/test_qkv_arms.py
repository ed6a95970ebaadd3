"""The arm of the attention projections, for every weight source and captured batch size."""

from collections.abc import Callable
from itertools import groupby
from typing import Any, get_args

import numpy as np
import pytest
from kernel_muster.models.dims import AttentionDims, ModelDims
from kernel_muster.models.layers.attention import Attention
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.policy.attention import ASKED_ARMS, QKV_ARMS
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.rows import CAPTURED_BATCH_SIZES

Make = Callable[..., LayerContext]
ROWS = range(1, CAPTURED_BATCH_SIZES[-1] + 1)
H, HEADS, KV, D = 48, 4, 2, 16
#: Weight source: the stored format of weights, and the levers that make it.
SOURCES: dict[str, tuple[Any, dict[str, object]]] = {
    "native": ("nvfp4", {}),
    "requantised": ("bf16", {"FP4_PROJ_DECODE": True}),
    "bf16": ("bf16", {}),
}


def layer_of(make: Make, source: str, **levers: object) -> Attention:
    quant, own = SOURCES[source]
    dims = AttentionDims(HEADS, KV, D, True, quant)
    model = ModelDims("tiny", H, 32, ("attn",), "none", "nvfp4", 1e-6, 1.0, dims, None, 0, None, 0)
    return Attention(make(max_rows=128, **own, **levers), model, dims)


def arms(layer: Attention, phase: Phase) -> dict[str, tuple[int, int]]:
    """Return the arm of each range of row counts; an arm that came back would overwrite its range and fail a test."""
    found: dict[str, tuple[int, int]] = {}
    for arm, rows in groupby(ROWS, key=lambda count: layer.arm(count, phase)):
        counts = list(rows)
        assert arm not in found
        found[arm] = (counts[0], counts[-1])
    return found


FEW = {"single": (1, 1), "fused": (2, 3)}
#: Recorded: source and phase -> arm by rows, without levers or a device's table.
RECORDED: dict[tuple[str, Phase], dict[str, tuple[int, int]]] = {
    ("native", "decode"): {**FEW, "tiled": (4, 128)},
    ("native", "verify"): {**FEW, "tiers": (4, 8), "tiled": (9, 128)},
    ("native", "prefill"): {**FEW, "wide": (4, 128)},
    ("requantised", "decode"): {**FEW, "tiled": (4, 128)},
    ("requantised", "verify"): {**FEW, "tiers": (4, 8), "tiled": (9, 128)},
    ("requantised", "prefill"): {**FEW, "wide": (4, 128)},
    ("bf16", "decode"): {**FEW, "tiers": (4, 16), "own": (17, 128)},
    ("bf16", "verify"): {**FEW, "tiers": (4, 16), "own": (17, 128)},
    ("bf16", "prefill"): {**FEW, "wide": (4, 128)},
}


@pytest.mark.parametrize(("source", "phase"), RECORDED)
def test_arm_of_every_source_and_row_count_is_the_recorded_one(make_context: Make, source: str, phase: Phase) -> None:
    assert arms(layer_of(make_context, source), phase) == RECORDED[source, phase]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("asked", ASKED_ARMS)
def test_one_row_is_never_tiled_whatever_is_asked(make_context: Make, source: str, asked: str) -> None:
    layer = layer_of(make_context, source, QKV_ARM=asked)
    assert {layer.arm(1, phase) for phase in get_args(Phase)} == {"single"}
    layer.qkv(np.zeros((1, H), layer_dtype()), "decode")
    assert "tiled" not in layer.used


def test_no_arm_is_unreachable(make_context: Make) -> None:
    reached = {
        arm
        for asked in ASKED_ARMS
        for phase in get_args(Phase)
        for arm in arms(layer_of(make_context, "native", QKV_ARM=asked), phase)
    }
    tuned = layer_of(make_context, "native", QKV_TIER_ROWS=16)  # as a device's table sets it
    assert arms(tuned, "decode") == {**FEW, "tiers": (4, 32), "own": (33, 128)}
    assert reached | {"own"} == set(QKV_ARMS)


def test_weights_that_are_kept_in_bf16_have_no_edges_of_nvfp4(make_context: Make) -> None:
    tuned = layer_of(make_context, "bf16", QKV_TIER_ROWS=0, W4A16_CHUNKED_ROWS=64)
    assert arms(tuned, "decode") == RECORDED["bf16", "decode"]


@pytest.mark.parametrize(("levers", "decode"), [
    ({"BF16_TIER_ROWS": 0}, {**FEW, "tiled": (4, 16), "own": (17, 128)}),
    ({"BF16_GEMM_FROM": 33}, {**FEW, "tiers": (4, 32), "own": (33, 128)}),
    ({"without": ("gemv::dense_gemv_bf16_batchm",)}, {**FEW, "own": (4, 128)}),
])  # fmt: skip
def test_weights_that_are_kept_in_bf16_have_edges_of_their_own(
    make_context: Make, levers: dict[str, Any], decode: dict[str, tuple[int, int]]
) -> None:
    layer = layer_of(make_context, "bf16", **levers)
    assert arms(layer, "decode") == decode
    native = {key: value for key, value in levers.items() if key != "without"}
    assert arms(layer_of(make_context, "native", **native), "decode") == RECORDED["native", "decode"]


@pytest.mark.parametrize(("rows", "launches"), [(4, {"batchm": 1}), (16, {"batchm": 1}), (17, {"gemm": 1})])
def test_bf16_weights_are_read_once_by_every_number_of_rows(
    make_context: Make, exact: Any, rows: int, launches: dict[str, int]
) -> None:
    layer = layer_of(make_context, "bf16")
    x = exact.rows(rows, H)
    found = layer.qkv(x, "decode")
    layer.output(exact.rows(rows, HEADS * D), found.gate, "decode")
    assert [linear.used for linear in layer.linears.each] == [launches] * 4


def test_bf16_rows_of_one_launch_have_the_bits_of_one_row_each(make_context: Make, exact: Any) -> None:
    layer = layer_of(make_context, "bf16")
    x = exact.rows(16, H)
    whole = layer.qkv(x, "decode")
    for row in range(16):
        one = layer.qkv(x[row : row + 1], "decode")
        assert all(
            getattr(whole, name)[row].tobytes() == getattr(one, name)[0].tobytes() for name in ("q", "gate", "k", "v")
        )


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("asked", ["tiled", "wide", "per_seq"])
def test_asked_arm_serves_decode_and_verify_from_four_rows(make_context: Make, source: str, asked: str) -> None:
    layer = layer_of(make_context, source, QKV_ARM=asked)
    assert arms(layer, "decode") == arms(layer, "verify") == {**FEW, asked: (4, 128)}
    assert arms(layer, "prefill") == {**FEW, "wide": (4, 128)}


@pytest.mark.parametrize("rows", [4, 7, 10])
def test_tile_of_one_row_calls_the_kernels_of_one_row(make_context: Make, exact: Any, rows: int) -> None:
    layer = layer_of(make_context, "native")
    layer.qkv(exact.rows(rows, H), "decode", "tiled")
    tiled = dict(layer.used)
    layer.used.clear()
    layer.qkv(exact.rows(1, H), "decode")
    alone = {name: count for name, count in layer.used.items() if name != "single"}
    assert alone == {"qgkv1": 1}
    assert {name: tiled[name] for name in alone} == alone


def layer_dtype() -> Any:
    from kernel_muster.registry.contract.dtypes import numpy_dtype

    return numpy_dtype("bf16")
