"""The arm of a projection at every edge, and the copies of its weight that any number of rows can reach."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.models.policy.attention import QkvEdges, qkv_arm, qkv_edges
from kernel_muster.models.policy.gemv import TIERS
from kernel_muster.models.policy.phase import PHASES
from kernel_muster.models.policy.projection import hopper_from, projection_arm
from kernel_muster.models.policy.tile import TILE_NAMES, GemmShape, choose_tile, reachable_tiles
from kernel_muster.registry.levers import Levers

Make = Callable[..., Levers]
TILES = ("t", "k64", "k64_n64", "m128", "base")
HOPPER = ("hopper", *TILES)
FEW = (1, 2, 3)
SHAPE = (14336, 5120)


@pytest.mark.parametrize(("rows", "phase", "tiers", "tiles", "arm"), [
    (16, "decode", TIERS, TILES, "gemv"), (16, "prefill", TIERS, TILES, "gemv"),
    (17, "decode", TIERS, TILES, "gemv"), (32, "decode", TIERS, TILES, "gemv"), (33, "decode", TIERS, TILES, "gemm"),
    (17, "verify", TIERS, TILES, "gemm"), (17, "prefill", TIERS, TILES, "gemm"),
    (16, "decode", TIERS, HOPPER, "gemv"), (17, "decode", TIERS, HOPPER, "gemm"), (17, "verify", TIERS, HOPPER, "gemm"),
    (4, "decode", FEW, TILES, "gemm"), (4, "decode", FEW, HOPPER, "gemm"), (3, "decode", FEW, HOPPER, "gemv"),
    (400, "prefill", TIERS, (), "gemv"), (1, "decode", (), TILES, "gemm"), (1, "decode", (), HOPPER, "gemm"),
])  # fmt: skip
def test_projection_arm_at_every_edge(
    make_levers: Make, rows: int, phase: str, tiers: tuple[int, ...], tiles: tuple[str, ...], arm: str
) -> None:
    assert projection_arm(GemmShape(rows, *SHAPE), phase, tiers, tiles, make_levers()) == arm  # type: ignore[arg-type]


@pytest.mark.parametrize(("levers", "rows", "tiles", "arm"), [
    ({"W4A16_HOPPER_FROM": 33}, 32, HOPPER, "gemv"), ({"W4A16_HOPPER_FROM": 33}, 33, HOPPER, "gemm"),
    ({"W4A16_HOPPER_FROM": 9}, 8, HOPPER, "gemv"), ({"W4A16_HOPPER_FROM": 9}, 9, HOPPER, "gemm"),
    ({"W4A16_HOPPER_FROM": 9}, 16, TILES, "gemv"),
    ({"W4A16_HOPPER_SMALL_MI": 69, "W4A16_HOPPER_FROM_SMALL": 49}, 17, HOPPER, "gemm"),
    ({"W4A16_HOPPER_SMALL_MI": 70, "W4A16_HOPPER_FROM_SMALL": 49}, 48, HOPPER, "gemv"),
    ({"W4A16_HOPPER_SMALL_MI": 70, "W4A16_HOPPER_FROM_SMALL": 49}, 49, HOPPER, "gemm"),
    ({"W4A16_CHUNKED_ROWS": 48}, 48, TILES, "gemv"), ({"W4A16_CHUNKED_ROWS": 0}, 17, TILES, "gemm"),
    ({"W4A16_CHUNKED_ROWS": 48}, 48, HOPPER, "gemm"),
    ({"W4A16_ARM": "gemv"}, 400, HOPPER, "gemv"), ({"W4A16_ARM": "tile"}, 1, TILES, "gemm"),
    ({"W4A16_ARM": "hopper"}, 1, HOPPER, "gemm"),
])  # fmt: skip
def test_projection_arm_follows_its_levers(
    make_levers: Make, levers: dict[str, object], rows: int, tiles: tuple[str, ...], arm: str
) -> None:
    assert projection_arm(GemmShape(rows, *SHAPE), "decode", TIERS, tiles, make_levers(**levers)) == arm  # type: ignore[arg-type]


@pytest.mark.parametrize(("available", "name"), [
    (("hopper", "t", "base"), "hopper"), (("t", "m128", "base"), "t"), (("base",), "base"),
])  # fmt: skip
def test_a_wide_verify_takes_what_the_layout_plan_left(
    make_levers: Make, available: tuple[str, ...], name: str
) -> None:
    assert projection_arm(GemmShape(17, *SHAPE), "verify", TIERS, available, make_levers()) == "gemm"  # type: ignore[arg-type]
    assert choose_tile(GemmShape(17, 14336, 5120), "verify", available, make_levers()) == name  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "k", "available", "levers", "reached"), [
    (14336, 5120, HOPPER, {}, {"hopper"}),
    (14336, 5120, TILES, {}, {"t", "m128"}),
    (14336, 6144, TILES, {}, {"k64", "m128"}),
    (5120, 6144, TILES, {}, {"k64_n64", "m128"}),  # narrow as far as the 64-row tile goes
    (5120, 6144, TILES, {"W4A16_NARROW_BLOCKS": 39}, {"k64", "m128"}),
    (5120, 6144, TILES, {"W4A16_NARROW_BLOCKS": 40, "W4A16_M128_ABOVE": 128}, {"k64_n64", "k64", "m128"}),
    (1024, 6144, TILES, {}, {"k64_n64", "m128"}),
    (14336, 5120, (*TILES, "fp4"), {}, {"t", "m128", "fp4"}),
    (14336, 5120, (*TILES, "fp4"), {"W4A16_ARM": "hopper"}, {"t", "m128"}),
    (14336, 5120, ("base",), {}, {"base"}),
    (14336, 5120, TILES, {"W4A16_M128_ABOVE": 0}, {"m128"}),
    (14336, 5120, (*TILES, "m128_v3"), {"W4A16_VARIANT": "v3"}, {"t", "m128", "m128_v3"}),
    (14336, 5120, (), {}, set()),
    (512, 2048, HOPPER, {"W4A16_HOPPER_TINY_MI": 1}, {"t", "m128"}),
    (513, 2048, HOPPER, {"W4A16_HOPPER_TINY_MI": 1}, {"hopper"}),
    (512, 2048, HOPPER, {"W4A16_HOPPER_TINY_MI": 1, "W4A16_ARM": "hopper"}, {"hopper"}),
    (512, 2048, ("hopper", "base"), {"W4A16_HOPPER_TINY_MI": 1}, {"hopper"}),
])  # fmt: skip
def test_only_copies_that_some_rows_reach_are_read(
    make_levers: Make, n: int, k: int, available: tuple[str, ...], levers: dict[str, object], reached: set[str]
) -> None:
    assert reachable_tiles(n, k, available, make_levers(**levers)) == reached  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(
    m=st.integers(1, 4096), n=st.integers(1, 300).map(lambda n: 64 * n), k=st.integers(1, 500).map(lambda k: 16 * k),
    available=st.sets(st.sampled_from(TILE_NAMES), min_size=1), phase=st.sampled_from(PHASES),
    variant=st.sampled_from(["v1", "v2", "v3"]), tiny=st.sampled_from([0, 1, 64]),
)  # fmt: skip
def test_what_a_shape_chooses_is_among_what_its_weight_reaches(
    make_levers: Make, m: int, n: int, k: int, available: set[str], phase: str, variant: str, tiny: int
) -> None:
    levers = make_levers(W4A16_VARIANT=variant, W4A16_HOPPER_TINY_MI=tiny)
    usable = available | {"base"}
    chosen = choose_tile(GemmShape(m, n, k), phase, usable, levers)  # type: ignore[arg-type]
    assert chosen in reachable_tiles(n, k, usable, levers)  # type: ignore[arg-type]


@pytest.mark.parametrize(("levers", "hopper", "expected"), [
    ({}, False, {"decode": {3: "fused", 4: "tiled", 17: "tiled"}, "verify": {8: "tiers", 9: "tiled", 17: "tiled"}}),
    ({}, True, {"decode": {4: "tiled", 16: "tiled", 17: "own"}, "verify": {8: "tiers", 16: "tiled", 17: "own"}}),
    ({"QKV_TIER_ROWS": 16}, True, {"decode": {4: "tiers", 16: "tiers", 17: "own"}, "verify": {16: "tiers"}}),
    ({"QKV_TIER_ROWS": 16, "W4A16_HOPPER_FROM": 33}, True, {"decode": {32: "tiers", 33: "own"}}),
    ({"QKV_TIER_ROWS": 16, "W4A16_HOPPER_FROM": 9}, True, {"decode": {8: "tiers", 9: "own", 17: "own"}}),
    ({"QKV_TIER_ROWS": 16}, False, {"decode": {16: "tiers", 32: "tiers", 33: "own"}}),
    ({"QKV_TIER_ROWS": 8}, True, {"decode": {8: "tiers", 9: "tiled", 17: "own"}}),
])  # fmt: skip
def test_qkv_arm_follows_the_edges_of_a_device(
    make_levers: Make, levers: dict[str, object], hopper: bool, expected: dict[str, dict[int, str]]
) -> None:
    made = make_levers(**levers)
    edges = qkv_edges(made, hopper_from(made, *SHAPE) if hopper else 0)
    got = {
        phase: {rows: qkv_arm(rows, phase, "auto", True, edges) for rows in arms}  # type: ignore[arg-type]
        for phase, arms in expected.items()
    }
    assert got == expected
    assert qkv_arm(16, "decode", "tiled", True, edges) == "tiled"
    assert qkv_arm(16, "decode", "auto", False, QkvEdges(16, 17)) == "tiled"
