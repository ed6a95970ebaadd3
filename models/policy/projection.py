"""Which arm serves the rows of one NVFP4 projection: GEMV tiers, or one GEMM over all rows.

The wide-verify ladder is this one too: 1 to 16 rows of a verify are tiers, 17 (16 drafts and the token before) are a
GEMM, and which one depends on the layout plan: ``tiles`` holds only kernels whose copy of the weight is built.
"""

from collections.abc import Collection
from typing import Literal

from kernel_muster.models.policy.evidence import H200, Evidence, Threshold
from kernel_muster.models.policy.gemv import WIDEST_TIER, gemv_tier, is_chunked
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.tile import GemmShape, TileName
from kernel_muster.registry.levers import Levers

Arm = Literal["gemv", "gemm"]
#: What MUSTER_W4A16_ARM may say.
ASKED_ARMS = ("auto", "gemv", "tile", "hopper")

# The Hopper GEMM from here up, where it is there: its place between one tier, chunks of 16 and the GEMM. A small weight
# has an edge of its own: its chunks take a few microseconds each, the GEMM takes ten before it is at speed.
# H200, CUDA 13.0, cold L2, medians of 11, us GEMV / Hopper at M=16, 17, 32, 64. Again: muster tune
#   14336x5120 18.5/23.3 33.3/24.3 36.9/22.6 74.2/25.6      5120x6144 9.2/15.1 16.8/15.4 18.3/15.1 36.5/16.2
#   9216x2048 6.7/10.7 11.9/10.9 13.5/10.7 26.7/11.8        2048x4096 4.4/8.9 7.3/9.0 8.3/9.0 16.2/10.7
HOPPER_FROM = Threshold(
    "least rows of the Hopper GEMM",
    WIDEST_TIER + 1,
    Evidence(
        H200, "time over GEMV, weights from 18 Mi: M=16 1.16..1.65, M=17 0.67..0.92, M=32 0.58..0.82, M=64 0.33..0.45"
    ),
)
SMALL_FROM = Threshold(
    "least rows of the Hopper GEMM for a small weight",
    64,
    Evidence(
        H200,
        "time over GEMV, weights of 5 and 8 Mi: M=17 1.23..1.51, M=32 1.08..1.40, M=48 0.87..1.15, M=64 0.66..0.87",
    ),
)
SMALL_MI = Threshold(
    "most elements of a small weight, in units of 2^20",
    8,
    Evidence(H200, "the Hopper GEMM wins from M=64 for 5 Mi, M=48 for 8 Mi, M=17 for 18 Mi and more", "9..17 Mi"),
)


def hopper_from(levers: Levers, n: int, k: int) -> int:
    """Return the least rows of the Hopper GEMM for a weight ``(N, K)``."""
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

    A tile GEMM, for more rows than a tier covers, is what chunks of 16 are weighed against in decode alone.
    """
    if has_hopper:
        return shape.m < hopper_from(levers, shape.n, shape.k) and covers_rows(shape.m, tiers)
    return gemv_tier(shape.m, tiers) is not None or is_chunked(shape.m, phase, tiers, levers)


def covers_rows(rows: int, tiers: Collection[int]) -> bool:
    """Whether one tier serves M rows, or above 16 rows chunks of 16 do."""
    return gemv_tier(rows, tiers) is not None or (rows > WIDEST_TIER and WIDEST_TIER in tiers)
