"""Which launches serve a projection with BF16 weights: the GEMV, at most 16 rows each, or one GEMM over all rows."""

from typing import Literal

from kernel_muster.models.policy.evidence import H200, Evidence, Threshold
from kernel_muster.models.policy.gemv import WIDEST_TIER
from kernel_muster.registry.levers import Levers

Bf16Arm = Literal["gemv", "gemm"]

# A launch reads the weight: 16 rows in tiles of 3 read it six times, one launch once.
TIER_ROWS = Threshold(
    "most rows of BF16 QKV and output projections in one GEMV launch each",
    WIDEST_TIER,
    Evidence(
        H200,
        "us of one launch at 1 / 16 rows: 4096x2048 6.5 / 6.8, 6144x5120 17.6 / 19.8",
        "tiles of 3 rows, 2 to 15 rows",
    ),
)
GEMM_FROM = Threshold(
    "least rows of the GEMM of a BF16 projection",
    WIDEST_TIER + 1,
    Evidence(
        H200,
        "us of one GEMV at 16 rows / GEMM at 64: 64x2048 1.7 / 2.2, 96x5120 2.3 / 3.3, 4096x2048 6.8 / 9.5, "
        "6144x5120 19.8 / 20.6",
        "17 to 63 rows, several GEMV launches",
    ),
)


def bf16_arm(rows: int, has_batch: bool, levers: Levers) -> Bf16Arm:
    """Return the arm of M rows: the GEMV below the GEMM's edge, where there is one of several rows or M is 1."""
    is_few = rows < int(levers["MUSTER_BF16_GEMM_FROM"] or 0)
    return "gemv" if is_few and (has_batch or rows <= 1) else "gemm"
