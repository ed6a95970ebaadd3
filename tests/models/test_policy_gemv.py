from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.models.policy.gemv import TIERS, gemv_chunks, gemv_tier, is_chunked, row_tiles
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers

# rows -> tier with all tiers present. None: a tile GEMM serves them.
FULL = {0: None, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, **dict.fromkeys(range(9, 17), 16), 17: None, 33: None}


@pytest.mark.parametrize(("rows", "tier"), FULL.items())
def test_gemv_tier_with_all_tiers_is_the_narrowest(rows: int, tier: int | None) -> None:
    assert gemv_tier(rows, TIERS) == tier


@pytest.mark.parametrize(
    ("rows", "available", "tier"),
    [
        (2, (1, 3, 4), None),  # 1, 2 and 3 rows are exact
        (3, (1, 2, 4), None),
        (4, (1, 2, 3, 8, 16), 8),
        (5, (4, 8), 8),
        (8, (4, 7, 16), 16),
        (8, (4, 7), None),
        (9, (1, 2, 3, 8), None),
        (16, (16,), 16),
    ],
)
def test_gemv_tier_with_gaps_covers_or_gives_up(rows: int, available: tuple[int, ...], tier: int | None) -> None:
    assert gemv_tier(rows, available) == tier


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [(0, ()), (1, (1,)), (2, (2,)), (3, (3,)), (4, (3, 1)), (5, (3, 2)), (6, (3, 3)), (7, (3, 3, 1)), (8, (3, 3, 2))],
)
def test_row_tiles_are_threes_and_a_rest(rows: int, tiles: tuple[int, ...]) -> None:
    assert row_tiles(rows) == tiles


@settings(max_examples=60)
@given(st.integers(0, 300), st.integers(1, 20))
def test_row_tiles_cover_all_rows_in_order(rows: int, widest: int) -> None:
    tiles = row_tiles(rows, widest)
    assert sum(tiles) == rows
    assert all(size == widest for size in tiles[:-1])
    assert all(0 < size <= widest for size in tiles)


@pytest.mark.parametrize(("rows", "widest"), [(-1, 3), (3, 0)])
def test_row_tiles_of_nonsense_are_refused(rows: int, widest: int) -> None:
    with pytest.raises(UsageError, match="expected rows >= 0"):
        row_tiles(rows, widest)


@settings(max_examples=60)
@given(st.integers(0, 100), st.sets(st.sampled_from(TIERS)))
def test_gemv_chunks_are_each_served_by_a_tier(rows: int, further: set[int]) -> None:
    available = {1, *further}
    chunks = gemv_chunks(rows, available)
    assert sum(chunks) == rows
    assert all(gemv_tier(size, available) or size in available for size in chunks)


def test_gemv_chunks_take_the_widest_tier_first() -> None:
    assert gemv_chunks(33, TIERS) == (16, 16, 1)
    assert gemv_chunks(7, (1, 2, 3)) == (3, 3, 1)


def test_gemv_chunks_without_a_tier_are_left_to_the_one_row_kernel_that_is_missing() -> None:
    assert gemv_chunks(2, ()) == (1, 1)
    assert gemv_chunks(5, (2, 4)) == (4, 1)


@pytest.mark.parametrize(("rows", "phase", "expected"), [
    (16, "decode", False), (17, "decode", True), (32, "decode", True), (33, "decode", False),
    (17, "verify", False), (32, "prefill", False),
])  # fmt: skip
def test_is_chunked_only_between_17_and_32_rows_of_decode(
    make_levers: Callable[..., Levers], rows: int, phase: str, expected: bool
) -> None:
    levers = make_levers()
    assert is_chunked(rows, phase, TIERS, levers) is expected  # type: ignore[arg-type]
    assert not is_chunked(rows, phase, (1, 2, 3, 8), levers)  # type: ignore[arg-type]
