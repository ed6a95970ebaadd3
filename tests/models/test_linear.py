from collections.abc import Callable
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.families import batch_tiers, bf16_kernels, exact_tiers
from kernel_muster.models.layers.linear import Bf16Linear, Nvfp4Linear
from kernel_muster.models.layers.tiles import tile_kernels

Make = Callable[..., LayerContext]
ROWS = [*range(1, 21), 33]
ALL_TIERS = dict(zip(range(1, 17), [1, 2, 3, 4, 5, 6, 7, 8, *[16] * 8], strict=True))


def nvfp4_linear(ctx: LayerContext, n: int = 40, k: int = 64) -> Nvfp4Linear:
    tiers = {**exact_tiers(ctx.kernels), **batch_tiers(ctx.kernels)}
    return Nvfp4Linear(ctx, ctx.spec("w", n, k, "nvfp4"), tiers, tile_kernels(ctx.kernels, [(n, k)]))


def bf16_linear(ctx: LayerContext) -> Bf16Linear:
    return Bf16Linear(ctx, ctx.spec("w", 40, 64, "bf16"), bf16_kernels(ctx.kernels))


def run(linear: Any, x: Any, phase: str = "decode") -> Any:
    out = new_rows(x, linear.weight.spec.shape[0])
    out[...] = np.nan
    linear.forward(x, out, phase)
    return out


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
def test_nvfp4_linear_matches_float64_and_records_its_arm(
    make_context: Make, exact: Any, rows: int, phase: str
) -> None:
    linear = nvfp4_linear(make_context())
    x = exact.rows(rows, 64)
    exact.assert_close(run(linear, x, phase), *exact.project(x, exact.weight(linear)))
    if rows <= 16:
        assert linear.used == {f"gemv{ALL_TIERS[rows]}": 1}
    elif rows <= 32 and phase == "decode":
        assert linear.used == {"gemv256": 1}
    else:
        assert linear.used == {"t": 1}


@pytest.mark.parametrize("rows", ROWS)
def test_bf16_linear_matches_float64_and_records_its_arm(make_context: Make, exact: Any, rows: int) -> None:
    linear = bf16_linear(make_context())
    x = exact.rows(rows, 64)
    exact.assert_close(run(linear, x), *exact.project(x, exact.weight(linear)))
    assert linear.used == {"gemv" if rows == 1 else "batchm" if rows <= 16 else "gemm": 1}


@pytest.mark.parametrize(("rows", "launches"), [
    (16, {"batchm": 1}), (17, {"batchm": 1, "gemv": 1}), (32, {"batchm": 2}), (33, {"gemm": 1}),
])  # fmt: skip
def test_bf16_linear_below_a_later_edge_takes_16_rows_a_launch(
    make_context: Make, exact: Any, rows: int, launches: dict[str, int]
) -> None:
    linear = bf16_linear(make_context(BF16_GEMM_FROM=33))
    x = exact.rows(rows, 64)
    exact.assert_close(run(linear, x), *exact.project(x, exact.weight(linear)))
    assert linear.used == launches


@pytest.mark.parametrize(("levers", "n", "rows", "tile"), [
    ({}, 40, 33, "t"),
    ({"W4A16_K64_MIN_K": 64}, 40, 33, "k64_n64"),
    ({"W4A16_K64_MIN_K": 64, "NO_K64_N64": True}, 40, 33, "k64"),
    ({"W4A16_K64_MIN_K": 64}, 65 * 128, 33, "k64"),
    ({}, 40, 65, "m128"),
    ({"W4A16_VARIANT": "v2"}, 40, 65, "m128_v2"),
])  # fmt: skip
def test_every_tile_variant_is_reached_and_bit_identical_to_t(
    make_context: Make, exact: Any, levers: dict[str, object], n: int, rows: int, tile: str
) -> None:
    linear = nvfp4_linear(make_context(**levers), n)
    x = exact.rows(rows, 64)
    got = run(linear, x, "prefill")
    assert linear.used == {tile: 1}
    plain = tile_kernels(make_context().kernels, [(n, 64)])["t"]
    expected = np.empty_like(got)
    plain(x=x, w=linear.weight.copy_for(plain), out=expected)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [1, 257])
def test_rows_that_no_gemv_takes_name_the_kernel_of_one_row(make_context: Make, exact: Any, rows: int) -> None:
    linear = nvfp4_linear(make_context(without=("w4a16_gemv::w4a16_gemv",)))
    x = exact.rows(rows, 64)
    with pytest.raises(km.NullKernelError, match=r"^w4a16_gemv::w4a16_gemv was called, but its lookup at .* missed"):
        linear.gemv(x, new_rows(x, 40))


def test_linear_without_transposed_tiles_takes_the_base(make_context: Make, exact: Any) -> None:
    missing = ("t", "t_p3", "t_k64", "t_k64_p3", "t_k64_n64_p3", "t_m128")
    linear = nvfp4_linear(make_context(without=tuple(f"w4a16::w4a16_gemm_{name}" for name in missing)))
    x = exact.rows(17, 64)
    exact.assert_close(run(linear, x, "verify"), *exact.project(x, exact.weight(linear)))
    assert linear.used == {"base": 1}


@pytest.mark.parametrize("rows", [2, 5, 16, 20])
def test_gemv_rows_are_bit_identical_to_one_row_at_a_time(make_context: Make, exact: Any, rows: int) -> None:
    linear = nvfp4_linear(make_context())
    x = exact.rows(rows, 64)
    one_by_one = np.concatenate([run(linear, x[row : row + 1]) for row in range(rows)])
    assert run(linear, x).tobytes() == one_by_one.tobytes()


@pytest.mark.parametrize("make", [nvfp4_linear, bf16_linear])
def test_linear_of_no_rows_launches_nothing(make_context: Make, exact: Any, make: Callable[..., Any]) -> None:
    linear = make(make_context())
    assert run(linear, exact.rows(0, 64)).shape == (0, 40)
    assert linear.used == {}


def test_linear_plans_both_copies_with_reasons_and_bytes(make_context: Make) -> None:
    ctx = make_context(None)
    nvfp4_linear(ctx)
    copies = {copy.layout: copy for copy in ctx.kernels.layouts.copies}
    assert set(copies) == {"nvfp4_row_major", "nvfp4_transposed"}
    assert {copy.size_bytes for copy in copies.values()} == {40 * 64 * 9 // 16 + 4}
    assert copies["nvfp4_transposed"].reason == "tile GEMM"
    assert copies["nvfp4_row_major"].reason == "decode GEMV"
    assert ctx.kernels.layouts.missing == ()
