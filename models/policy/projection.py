"""Which arm serves the rows of one NVFP4 projection: GEMV tiers, or one GEMM over all rows.

The wide-verify ladder is this one too: 1 to 16 rows of a verify are tiers, 17 (16 drafts and the token before) are a
GEMM, and which one depends on the layout plan: ``tiles`` holds only kernels whose copy of the weight is built.
"""

from collections.abc import Collection
from typing import Literal

from kernel_muster.models.policy.evidence import GB10, Evidence, Threshold
from kernel_muster.models.policy.gemv import WIDEST_TIER, gemv_tier, is_chunked
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.tile import TileName
from kernel_muster.registry.levers import Levers

Arm = Literal["gemv", "gemm"]
#: What MUSTER_W4A16_ARM may say.
ASKED_ARMS = ("auto", "gemv", "tile", "hopper")

# The Hopper GEMM from here up, where it is there. Built in: the first row count that no tier covers in one launch; its
# place between chunks of 16 and the GEMM is a device's own, and measured tables move it.
HOPPER_FROM = Threshold(
    "least rows of the Hopper GEMM",
    WIDEST_TIER + 1,
    Evidence(GB10, "no Hopper GEMM there: the first row count above the widest tier", "17..64 rows"),
)


def projection_arm(rows: int, phase: Phase, tiers: Collection[int], tiles: Collection[TileName], levers: Levers) -> Arm:
    """Return the arm for M rows. ``tiers`` and ``tiles`` are what is there, with the copies that they read.

    Without tiers it is the GEMM, without a GEMM the tiers. MUSTER_W4A16_ARM forces one where both are there.
    """
    if not tiles:
        return "gemv"
    if not tiers:
        return "gemm"
    asked = levers["MUSTER_W4A16_ARM"]
    if asked != "auto":
        return "gemv" if asked == "gemv" else "gemm"
    return "gemv" if is_gemv(rows, phase, tiers, "hopper" in tiles, levers) else "gemm"


def is_gemv(rows: int, phase: Phase, tiers: Collection[int], has_hopper: bool, levers: Levers) -> bool:
    """Whether GEMV tiers serve M rows: up to the Hopper GEMM's edge, in any phase; else as far as tiers and chunks go.

    A tile GEMM, for more rows than a tier covers, is what chunks of 16 are weighed against in decode alone.
    """
    if has_hopper:
        return rows < int(levers["MUSTER_W4A16_HOPPER_FROM"] or 0) and covers_rows(rows, tiers)
    return gemv_tier(rows, tiers) is not None or is_chunked(rows, phase, tiers, levers)


def covers_rows(rows: int, tiers: Collection[int]) -> bool:
    """Whether one tier serves M rows, or above 16 rows chunks of 16 do."""
    return gemv_tier(rows, tiers) is not None or (rows > WIDEST_TIER and WIDEST_TIER in tiers)
