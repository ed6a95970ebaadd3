"""The arm for the rows of one NVFP4 projection: GEMV tiers, or one GEMM over all rows.

Wide verify follows the same rule: 1 to 16 rows of a verify use tiers, 17 (16 drafts and the token before) a GEMM. The
layout plan selects the GEMM: ``tiles`` holds only kernels with a built copy of the weight.
"""

from collections.abc import Collection
from typing import Literal

from kernel_muster.models.policy.evidence import H200, Evidence, Threshold
from kernel_muster.models.policy.gemv import WIDE_TIER, WIDEST_TIER, covers_many, gemv_tier, is_chunked
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.tile import GemmShape, TileName
from kernel_muster.registry.levers import Levers

Arm = Literal["gemv", "gemm"]
#: The values of MUSTER_W4A16_ARM.
ASKED_ARMS = ("auto", "gemv", "tile", "hopper")

# The Hopper GEMM from here up, if present: its place between one tier, the wide one and the GEMM. A small weight has a
# separate edge: a GEMV takes a few microseconds, the GEMM six before full speed. A tiny one has none. All blocks of the
# wide tier read x; with many blocks that costs more than a second read of the weights.
# H200, CUDA 13.0, cold L2, medians of 7, us GEMV/Hopper. Again: muster tune
#   M=16, 17, 32    9216x2048 6.2/9.0 9.5/9.0 10.0/9.0       5120x6144 8.8/12.0 -/12.0 18.1/12.2
#   M=32, 48, 64    2048x4096 6.0/7.4 7.9/8.4 8.1/8.4        1024x5120 5.2/7.5 -/7.6 9.3/7.7
#   M=64, 128, 256  512x2048 4.1/6.3 4.5/6.5 5.7/6.6         2048x512 3.7/4.9 4.6/4.8 6.0/5.2
HOPPER_FROM = Threshold(
    "least rows of the Hopper GEMM",
    WIDEST_TIER + 1,
    Evidence(H200, "time over GEMV, weights from 18 Mi: M=16 1.4x (1.36..1.45), M=17 0.95x, M=32 0.83x (0.68..0.92)"),
)
SMALL_FROM = Threshold(
    "least rows of the Hopper GEMM for a small weight",
    33,
    Evidence(H200, "time over GEMV, weights of 5 and 8 Mi: M=32 1.33x (1.22..1.44), M=64 0.93x (0.83..1.03)"),
)
SMALL_MI = Threshold(
    "most elements of a small weight, in units of 2^20",
    8,
    Evidence(H200, "the Hopper GEMM wins from M=33 for 5 Mi, M=65 for 8 Mi, M=17 for 18 Mi and more", "9..17 Mi"),
)
GEMV_MI = Threshold(
    "most elements of a weight that GEMVs serve up to 256 rows, in units of 2^20",
    1,
    Evidence(
        H200,
        "time of the Hopper GEMM over GEMV, weights of 1 Mi: M=64 1.42x (1.32..1.53), M=128 1.22x (1.03..1.45), "
        "M=256 1.00x (0.86..1.15)",
        "2..4 Mi",
    ),
)


def hopper_from(levers: Levers, n: int, k: int, has_wide: bool = True) -> int:
    """Return the least rows of the Hopper GEMM for a weight ``(N, K)``: for a tiny one, those without a GEMV."""
    if has_wide and n * k <= int(levers["MUSTER_W4A16_GEMV_MI"] or 0) << 20:
        return WIDE_TIER + 1
    is_small = n * k <= int(levers["MUSTER_W4A16_HOPPER_SMALL_MI"] or 0) << 20
    return int(levers["MUSTER_W4A16_HOPPER_FROM_SMALL" if is_small else "MUSTER_W4A16_HOPPER_FROM"] or 0)


def reaches_wide(n: int, k: int, phases: Collection[Phase], has_hopper: bool, levers: Levers) -> bool:
    """Whether some rows of a weight ``(N, K)`` go through the wide GEMV tier."""
    asked = levers["MUSTER_W4A16_ARM"]
    if asked != "auto":
        return asked == "gemv"
    if has_hopper:
        return hopper_from(levers, n, k) > WIDEST_TIER + 1
    return "decode" in phases and int(levers["MUSTER_W4A16_CHUNKED_ROWS"] or 0) > WIDEST_TIER


def projection_arm(
    shape: GemmShape, phase: Phase, tiers: Collection[int], tiles: Collection[TileName], levers: Levers
) -> Arm:
    """Return the arm for a shape. ``tiers`` and ``tiles`` are the kernels with built copies.

    Without tiers it is the GEMM, without a GEMM the tiers. If both exist, MUSTER_W4A16_ARM forces one.
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
    """Whether GEMV tiers serve a shape: in any phase up to the Hopper GEMM's edge, else up to the limit of chunks.

    Above the tiers' rows, the wide tier or chunks of 16 compete with a tile GEMM in decode alone.
    """
    if has_hopper:
        edge = hopper_from(levers, shape.n, shape.k, WIDE_TIER in tiers)
        return shape.m < edge and covers_rows(shape.m, tiers)
    return gemv_tier(shape.m, tiers) is not None or is_chunked(shape.m, phase, tiers, levers)


def covers_rows(rows: int, tiers: Collection[int]) -> bool:
    """Whether one tier serves M rows, or above 16 rows the wide one does or chunks of 16."""
    return gemv_tier(rows, tiers) is not None or (rows > WIDEST_TIER and covers_many(tiers))
