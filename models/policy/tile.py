"""The W4A16 GEMM for a shape. The tile variants are bit-identical to one another. The Hopper kernel is not."""

from collections.abc import Collection
from typing import Literal, get_args

from kernel_muster.models.policy.evidence import GB10, H200, Evidence, Threshold
from kernel_muster.models.policy.phase import PHASES, Phase
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.values import frozen

# ``hopper`` reads a layout of its own, ``base`` untransposed weights (the slow arm), the others the transposed copy.
# Each name is one slot, whichever twin serves it. ``fp4`` quantises its activations too: no built-in family has one.
TileName = Literal["hopper", "base", "t", "k64", "k64_n64", "m128", "m128_v2", "m128_v3", "fp4"]
TILE_NAMES: tuple[TileName, ...] = get_args(TileName)

# Deep-K tiles (K step 64) win from here up. M=16, us for t / k64 / m128:
#   16384x5120 281.9 / 341.6 / 272.4   14336x5120 273.9 / 328.5 / 262.8   5120x6144 237.7 / 163.3 / 240.7
# An edge of 4096, generalised from other shapes, once sent 64 launches a step to the worst variant.
DEEP_K = Threshold(
    "least K of the deep-K tile",
    6144,
    Evidence(
        GB10,
        "M=16, us t/k64/m128: 16384x5120 281.9/341.6/272.4, 14336x5120 273.9/328.5/262.8, 5120x6144 237.7/163.3/240.7",
        "5120 < K < 6144",
    ),
)
#: The edge before those measurements; MUSTER_NO_W4A16_K64 restores it.
LEGACY_DEEP_K = 8192
DEEP_K_STEP = 64

# Narrow-N twin (N tile 64) where the wide grid, ceil(N/128) * ceil(M/64) blocks, is at most this. 5120x6144 is 40
# blocks on 48 SMs: 167.8 us = 87.2 memory + 80.6 dequantising behind barriers; 80 narrow blocks move the same bytes.
NARROW_BLOCKS = Threshold(
    "most blocks of the wide grid for the narrow-N twin",
    64,
    Evidence(
        GB10,
        "speed-up by blocks of the wide grid: 20 1.74x, 40 1.42x, 48 1.33x, 64 1.15x, 76 0.77x, 80 0.80x, 96 0.79x, "
        "244 0.95x",
        "65..75 blocks",
    ),
)

# Above this many rows, one block of 128 rows reads each weight once, and two blocks of 64 read it twice.
M128_ABOVE = Threshold(
    "most rows of the 64-row tile",
    64,
    Evidence(GB10, "m128 58-74 TFLOP/s at prefill; M=16: within 4% of t", "the edge itself"),
)

# The Hopper GEMM shares a tile among many blocks and adds their parts up, which delays weights of a few tiles: at
# 2048x512 the narrow twin wins at M=17 and 32 (4.1 us, 5.1), at 512x2048 the Hopper GEMM (6.9 us, 8.6). None is tiny.
TINY_MI = Threshold(
    "most elements of a tiny weight, in units of 2^20",
    0,
    Evidence(H200, "time of the Hopper GEMM over tiles, M=17..256: 1 Mi 0.85x (0.60..1.23), 5 Mi 0.40x", "below 1 Mi"),
)

P3_EVIDENCE = Evidence(
    GB10,
    "one block an SM waits for its only copy group: 40 blocks reach 38% of the rate, lm_head's 1938 reach 83%",
)
V2_EVIDENCE = Evidence(GB10, "v2 is 0.78-0.82x of v1 on the FFN shapes of the 27B (v1: 58-74 TFLOP/s)")


@frozen
class GemmShape:
    """M rows, N output features, K input features."""

    m: int
    n: int
    k: int

    @property
    def wide_blocks(self) -> int:
        """Blocks of a grid of tiles N 128 x M 64."""
        return -(-self.n // 128) * -(-self.m // 64)


def deep_k_edge(levers: Levers) -> int:
    """Return the least K of the deep-K tile.

    MUSTER_W4A16_K64_MIN_K as somebody set it, then MUSTER_NO_W4A16_K64, then the measured edge.
    """
    pinned = levers.setting("MUSTER_W4A16_K64_MIN_K")
    if levers.flag("MUSTER_NO_W4A16_K64") and not pinned.is_asked:
        return LEGACY_DEEP_K
    return int(pinned.value or 0)


def is_deep(shape: GemmShape, levers: Levers) -> bool:
    """Whether a shape's K is deep enough for the K step of 64, and divides by it."""
    return shape.k >= deep_k_edge(levers) and shape.k % DEEP_K_STEP == 0


def is_narrow(shape: GemmShape, levers: Levers) -> bool:
    """Whether the wide grid leaves so many multiprocessors idle that the narrow-N twin wins."""
    return shape.wide_blocks <= int(levers["MUSTER_W4A16_NARROW_BLOCKS"] or 0)


def is_small(shape: GemmShape, levers: Levers) -> bool:
    """Whether the rows fit the 64-row tile, or are few enough to take it several times."""
    return shape.m <= int(levers["MUSTER_W4A16_M128_ABOVE"] or 0)


def m128_variant(phase: Phase, levers: Levers) -> TileName:
    """Return the 128-row variant: v1 by default. v3 serves prefill only, the other phases stay on v1.

    The one decision for attention projections, dense-FFN prefill and batched GDN decode.
    """
    asked = levers["MUSTER_W4A16_VARIANT"]
    if asked == "v2":
        return "m128_v2"
    return "m128_v3" if asked == "v3" and phase == "prefill" else "m128"


def is_tiny(n: int, k: int, levers: Levers) -> bool:
    """Whether a weight is so small that tile GEMMs precede the Hopper GEMM, unless that is forced."""
    return levers["MUSTER_W4A16_ARM"] != "hopper" and n * k <= int(levers["MUSTER_W4A16_HOPPER_TINY_MI"] or 0) << 20


def choose_tile(shape: GemmShape, phase: Phase, available: Collection[TileName], levers: Levers) -> TileName:
    """Return the kernel for a shape among the available ones: the Hopper GEMM, else the fitting tile variant.

    Without a transposed copy that is ``base``. UsageError if there is none at all.
    """
    for name in _order(shape, phase, levers):
        if name in available:
            return name
    raise UsageError(f"no W4A16 tile GEMM is available for M={shape.m} N={shape.n} K={shape.k}")


def reachable_tiles(
    n: int, k: int, available: Collection[TileName], levers: Levers, phases: Collection[Phase] = PHASES
) -> frozenset[TileName]:
    """Return the kernels that some number of rows in some phase reaches: copies for other kernels are not built."""
    most_small = int(levers["MUSTER_W4A16_M128_ABOVE"] or 0)
    # The wide grid grows by its blocks at one row every 64 rows, and is narrow up to a sum of these.
    most_narrow = 64 * (int(levers["MUSTER_W4A16_NARROW_BLOCKS"] or 0) // max(GemmShape(1, n, k).wide_blocks, 1))
    # Only a prefill has tiles of its own: one other phase stands for both.
    prompts, others = ([one for one in phases if (one == "prefill") is is_prompt] for is_prompt in (True, False))
    kinds, edges = [*prompts, *others[:1]], {1, most_small + 1, most_narrow + 1}
    orders = (_order(GemmShape(rows, n, k), phase, levers) for phase in kinds for rows in edges)
    return frozenset(name for order in orders for name in [one for one in order if one in available][:1])


def _order(shape: GemmShape, phase: Phase, levers: Levers) -> list[TileName]:
    """Add the Hopper GEMM and the arm on untransposed weights to the order of tiles. A forced arm excludes FP4."""
    tiles = _tiles(shape, phase, levers)
    order: list[TileName] = ["hopper", *tiles, "base"]
    if is_tiny(shape.n, shape.k, levers):
        order = [*tiles, "hopper", "base"]
    if phase == "prefill" and levers["MUSTER_W4A16_ARM"] != "hopper":
        # Unmeasured so far. Rows of a prompt need not have the bits of decode, those of other phases must.
        return ["fp4", *order]
    return order


def _tiles(shape: GemmShape, phase: Phase, levers: Levers) -> list[TileName]:
    order: list[TileName] = []
    deep = is_deep(shape, levers)
    if deep and is_narrow(shape, levers):
        order.append("k64_n64")
    if is_small(shape, levers):
        order += ["k64", "t"] if deep else ["t"]
    # Replacements of a missing variant: v1 first, then the small tile.
    return [*order, m128_variant(phase, levers), "m128", "t"]
