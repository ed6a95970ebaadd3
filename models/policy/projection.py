"""Which arm serves the rows of one NVFP4 projection: GEMV tiers, or one GEMM over all rows.

The wide-verify ladder is this one too: 1 to 16 rows of a verify are tiers, 17 (16 drafts and the token before) are a
GEMM, and which one depends on the layout plan: ``tiles`` holds only kernels whose copy of the weight is built.
"""

from collections.abc import Collection
from typing import Literal

from kernel_muster.models.policy.evidence import H200, Evidence, Threshold
from kernel_muster.models.policy.gemv import WIDE_TIER, WIDEST_TIER, covers_many, gemv_tier, is_chunked
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.tile import GemmShape, TileName
from kernel_muster.registry.levers import Levers

Arm = Literal["gemv", "gemm"]
#: What MUSTER_W4A16_ARM may say.
ASKED_ARMS = ("auto", "gemv", "tile", "hopper")

# The Hopper GEMM from here up, where it is there: its place between one tier, chunks of 16 and the GEMM. A small weight
# has an edge of its own: its chunks take a few microseconds each, the GEMM takes seven before it is at speed.
# H200, CUDA 13.0, cold L2, medians of 9, us GEMV/Hopper at M=16, 17, 32, 64. Again: muster tune
#   14336x5120 15.8/19.7 29.8/20.0 32.0/20.0 63.3/23.4      5120x6144 8.5/12.5 15.7/12.5 17.0/12.6 33.8/14.3
#   9216x2048 6.7/9.9 11.8/9.9 13.4/9.9 26.6/11.3           2048x4096 4.3/7.8 7.4/7.8 8.3/7.8 16.2/9.2
HOPPER_FROM = Threshold(
    "least rows of the Hopper GEMM",
    WIDEST_TIER + 1,
    Evidence(H200, "time over GEMV, weights from 18 Mi: M=16 1.29x (1.07..1.48), M=17 0.71x (0.59..0.84), M=32 0.65x"),
)
SMALL_FROM = Threshold(
    "least rows of the Hopper GEMM for a small weight",
    48,
    Evidence(
        H200, "time over GEMV, weights of 1 to 8 Mi: M=17 1.15x, M=32 1.05x (0.94..1.17), M=48 0.74x (0.65..0.80)"
    ),
)
SMALL_MI = Threshold(
    "most elements of a small weight, in units of 2^20",
    8,
    Evidence(H200, "the Hopper GEMM wins from M=48 for 1 and 5 Mi, M=32 for 8 Mi, M=17 for 18 Mi and more", "9..17 Mi"),
)
GEMV_MI = Threshold(
    "most elements of a weight that GEMVs serve up to 256 rows, in units of 2^20",
    1,
    Evidence(H200, "time of the Hopper GEMM over GEMV, weights of 1 Mi: M=48 1.3x, M=256 1.2x", "2..4 Mi"),
)


def hopper_from(levers: Levers, n: int, k: int, has_wide: bool = True) -> int:
    """Return the least rows of the Hopper GEMM for a weight ``(N, K)``: of a tiny one, those that no GEMV covers."""
    if has_wide and n * k <= int(levers["MUSTER_W4A16_GEMV_MI"] or 0) << 20:
        return WIDE_TIER + 1
    is_small = n * k <= int(levers["MUSTER_W4A16_HOPPER_SMALL_MI"] or 0) << 20
    return int(levers["MUSTER_W4A16_HOPPER_FROM_SMALL" if is_small else "MUSTER_W4A16_HOPPER_FROM"] or 0)


def projection_arm(
    shape: GemmShape, phase: Phase, tiers: Collection[int], tiles: Collection[TileName], levers: Levers
) -> Arm:
    """Return the arm for a shape. ``tiers`` and ``tiles`` are what is there, with the copies that they read.

    Without tiers it is the GEMM, without a GEMM the tiers. MUSTER_W4A16_ARM forces one where both are there.
    """
    if not tiles:
        return "gemv"
    if not tiers:
        return "gemm"
    asked = levers["MUSTER_W4A16_ARM"]
    if asked != "auto":
        return "gemv" if asked == "gemv" else "gemm"
    return "gemv" if is_gemv(shape, phase, tiers, "hopper" in tiles, levers) else "gemm"


def is_gemv(shape: GemmShape, phase: Phase, tiers: Collection[int], has_hopper: bool, levers: Levers) -> bool:
    """Whether GEMV tiers serve a shape: up to the Hopper GEMM's edge, in any phase; else as far as tiers and chunks go.

    A tile GEMM, for more rows than a tier covers, is what the wide tier or chunks of 16 are weighed against in decode
    alone.
    """
    if has_hopper:
        edge = hopper_from(levers, shape.n, shape.k, WIDE_TIER in tiers)
        return shape.m < edge and covers_rows(shape.m, tiers)
    return gemv_tier(shape.m, tiers) is not None or is_chunked(shape.m, phase, tiers, levers)


def covers_rows(rows: int, tiers: Collection[int]) -> bool:
    """Whether one tier serves M rows, or above 16 rows the wide one does or chunks of 16."""
    return gemv_tier(rows, tiers) is not None or (rows > WIDEST_TIER and covers_many(tiers))
