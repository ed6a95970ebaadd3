"""The GEMV tier for M rows, and the division of rows into tiles."""

from collections.abc import Collection

from kernel_muster.models.policy.evidence import GB10, Evidence, Threshold
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers

#: Row counts of the compiled tiers.
TIERS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
WIDEST_TIER = 16
#: Most rows of the wide launch, which takes 32 rows at a time. It covers the row counts above the tiers.
WIDE_TIER = 256

# N = K = 5120, us, on a GB10 (its SIMT kernels paid about 80 instructions for each unused row; 9 to 15 rows not
# measured):
#   M      4: batch4 70.5 (76.6% of peak), batch8 74.8     M 5: batch8 89.0     M 6: batch8 91.5
#   M      8: batch8 106.4, batch16 113.3, M64 tile GEMM 749.6

# Above 16 rows of decode: chunks through the 16-row tier against one tile GEMM. C=32: 130.8 -> 178.1 tok/s.
CHUNKED_ROWS = Threshold(
    "most decode rows in chunks of 16",
    32,
    Evidence(GB10, "32 sequences: 130.8 tok/s with the tile GEMM, 178.1 in chunks of 16", "17..31 rows, above 32"),
)


def gemv_tier(rows: int, available: Collection[int]) -> int | None:
    """Return the tier for M rows, or None above 16 rows or without a tier that covers them.

    1, 2 and 3 rows are exact. 4 to 8 use the narrowest tier that covers them. 9 to 16 use the 16-row one.
    """
    if rows in (1, 2, 3):
        return rows if rows in available else None
    if not 4 <= rows <= WIDEST_TIER:
        return None
    return min((tier for tier in available if rows <= tier <= WIDEST_TIER), default=None)


def row_tiles(rows: int, widest: int = 3) -> tuple[int, ...]:
    """Cut M rows into tiles: 3, 3, ... and a last one of 2 or 1."""
    if rows < 0 or widest < 1:
        raise UsageError(f"row_tiles({rows}, {widest}): expected rows >= 0 and a tile of at least one row")
    full, rest = divmod(rows, widest)
    return (widest,) * full + ((rest,) if rest else ())


def chunk_tier(rows: int, available: Collection[int]) -> int | None:
    """Return the kernel for a chunk of M rows in one launch: a tier, or above 16 rows the wide one."""
    if WIDEST_TIER < rows <= WIDE_TIER and WIDE_TIER in available:
        return WIDE_TIER
    return gemv_tier(rows, available)


def gemv_chunks(rows: int, available: Collection[int]) -> tuple[int, ...]:
    """Divide M rows into chunks of one launch each: as many as the widest takes, and a rest covered by some tier.

    A rest without a tier is divided further, down to single rows. If no kernel takes one, that kernel gives the reason.
    """
    chunks: list[int] = []
    while rows:
        size = rows if chunk_tier(rows, available) else max((tier for tier in available if tier <= rows), default=1)
        chunks.append(size)
        rows -= size
    return tuple(chunks)


def is_chunked(rows: int, phase: Phase, available: Collection[int], levers: Levers) -> bool:
    """Whether more than 16 rows of decode go through the wide tier, or in chunks of 16, and not through a tile GEMM."""
    most = int(levers["MUSTER_W4A16_CHUNKED_ROWS"] or 0)
    return phase == "decode" and covers_many(available) and WIDEST_TIER < rows <= most


def covers_many(available: Collection[int]) -> bool:
    """Whether more than 16 rows have a GEMV: the wide tier, or chunks of 16."""
    return WIDE_TIER in available or WIDEST_TIER in available
