from collections.abc import Callable

import pytest
from kernel_muster.models.policy.tile import (
    TILE_NAMES,
    GemmShape,
    choose_tile,
    deep_k_edge,
    is_deep,
    is_narrow,
    m128_variant,
)
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers

Make = Callable[..., Levers]
TILES = tuple(name for name in TILE_NAMES if name not in ("hopper", "fp4"))


def choose(levers: Levers, m: int, n: int, k: int, available: tuple[str, ...] = TILES, phase: str = "decode") -> str:
    return choose_tile(GemmShape(m, n, k), phase, available, levers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("k", "deep"), [(6080, False), (6143, False), (6144, True), (6145, False), (6160, False), (6208, True)]
)
def test_deep_k_begins_at_6144_and_needs_whole_steps(make_levers: Make, k: int, deep: bool) -> None:
    assert is_deep(GemmShape(16, 5120, k), make_levers()) is deep


@pytest.mark.parametrize(("levers", "edge"), [
    ({}, 6144),
    ({"NO_W4A16_K64": "1"}, 8192),
    ({"NO_W4A16_K64": "0"}, 6144),
    ({"W4A16_K64_MIN_K": "4096"}, 4096),
    ({"W4A16_K64_MIN_K": "4096", "NO_W4A16_K64": "1"}, 4096),
])  # fmt: skip
def test_deep_k_edge_pinned_beats_legacy_beats_measured(make_levers: Make, levers: dict[str, str], edge: int) -> None:
    assert deep_k_edge(make_levers(**levers)) == edge


@pytest.mark.parametrize(("k", "name"), [(8128, "t"), (8192, "k64")])
def test_legacy_edge_moves_the_choice(make_levers: Make, k: int, name: str) -> None:
    assert choose(make_levers(NO_W4A16_K64=True), 16, 9216, k) == name


@pytest.mark.parametrize(("m", "n", "narrow"), [
    (16, 5120, True),  # 40 blocks, 1.42x
    (64, 8192, True),  # 64 blocks, 1.15x
    (65, 4096, True),  # 32 x 2 = 64
    (64, 8193, False),  # 65
    (65, 4097, False),  # 66
    (65, 5120, False),  # 80 blocks, 0.80x
    (1, 31232, False),  # 244 blocks, 0.95x
])  # fmt: skip
def test_narrow_twin_up_to_64_blocks_of_the_wide_grid(make_levers: Make, m: int, n: int, narrow: bool) -> None:
    assert is_narrow(GemmShape(m, n, 6144), make_levers()) is narrow
    assert (choose(make_levers(), m, n, 6144) == "k64_n64") is narrow


@pytest.mark.parametrize(("m", "n", "k", "name"), [
    (16, 5120, 6144, "k64_n64"),
    (16, 9216, 6144, "k64"),
    (64, 9216, 6144, "k64"),
    (65, 9216, 6144, "m128"),
    (16, 16384, 5120, "t"),
    (64, 14336, 5120, "t"),
    (65, 14336, 5120, "m128"),
    (2048, 5120, 17408, "m128"),
    (2, 512, 2048, "t"),  # few blocks, but shallow: the narrow twin is a twin of the deep tile
])  # fmt: skip
def test_choose_tile_with_everything_there(make_levers: Make, m: int, n: int, k: int, name: str) -> None:
    assert choose(make_levers(), m, n, k) == name


@pytest.mark.parametrize(("missing", "name"), [
    ((), "k64_n64"),
    (("k64_n64",), "k64"),
    (("k64_n64", "k64"), "t"),
    (("k64_n64", "k64", "t"), "m128"),
    (("k64_n64", "k64", "t", "m128"), "base"),
])  # fmt: skip
def test_choose_tile_falls_through_what_is_missing(make_levers: Make, missing: tuple[str, ...], name: str) -> None:
    available = tuple(tile for tile in TILES if tile not in missing and tile not in ("m128_v2", "m128_v3"))
    assert choose(make_levers(), 16, 5120, 6144, available) == name


@pytest.mark.parametrize(("phase", "levers", "name"), [
    ("prefill", {}, "fp4"), ("decode", {}, "m128"), ("verify", {}, "m128"), ("prefill", {"W4A16_ARM": "tile"}, "fp4"),
    ("prefill", {"W4A16_ARM": "hopper"}, "hopper"), ("prefill", {"W4A16_VARIANT": "v3"}, "fp4"),
])  # fmt: skip
def test_fp4_tile_serves_prompts_where_it_is_there(
    make_levers: Make, phase: str, levers: dict[str, str], name: str
) -> None:
    available = (*TILES, "fp4", *["hopper"] * (name == "hopper"))
    assert choose(make_levers(**levers), 128, 14336, 5120, available, phase) == name


def test_choose_tile_without_transposed_copy_is_the_base(make_levers: Make) -> None:
    assert choose(make_levers(), 512, 5120, 6144, ("base",), "prefill") == "base"


def test_choose_tile_with_nothing_is_refused(make_levers: Make) -> None:
    with pytest.raises(UsageError, match="M=4 N=8 K=16"):
        choose(make_levers(), 4, 8, 16, ())


@pytest.mark.parametrize(("asked", "phase", "name"), [
    ("v1", "prefill", "m128"), ("v1", "decode", "m128"),
    ("v2", "prefill", "m128_v2"), ("v2", "decode", "m128_v2"), ("v2", "verify", "m128_v2"),
    ("v3", "prefill", "m128_v3"), ("v3", "decode", "m128"), ("v3", "verify", "m128"),
])  # fmt: skip
def test_m128_variant_only_when_asked_and_v3_only_in_prefill(
    make_levers: Make, asked: str, phase: str, name: str
) -> None:
    levers = make_levers(W4A16_VARIANT=asked)
    assert m128_variant(phase, levers) == name  # type: ignore[arg-type]
    assert choose(levers, 128, 17408, 5120, phase=phase) == name
