"""The arm of an FFN for its rows."""

from typing import Literal, get_args

from kernel_muster.models.policy.gemv import WIDEST_TIER
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.errors import UsageError

FfnArm = Literal["single", "k2", "k3", "km", "grouped", "prefill", "batched", "token_major", "atomic_c4"]
FFN_ARMS: tuple[FfnArm, ...] = get_args(FfnArm)
#: Arms of each kind. The dense kind maps token_major and atomic_c4 to batched.
DENSE_ARMS: tuple[FfnArm, ...] = ("single", "k2", "k3", "km", "prefill", "batched", "token_major", "atomic_c4")
MOE_ARMS: tuple[FfnArm, ...] = (
    "single", "k2", "k3", "grouped", "prefill", "batched", "token_major", "atomic_c4",
)  # fmt: skip
KM_ROWS = range(4, 9)
#: Rows of one GEMV launch, if each projection's own edge leaves them to it. H200, us at M=16, GEMV /
#: Hopper GEMM: 17408x5120 20.3 / 23.0, 5120x17408 21.3 / 23.3; on GB10 the tile GEMM is six times slower at 8 rows.
BATCHED_ROWS = range(KM_ROWS.start, WIDEST_TIER + 1)


def dense_arm(rows: int, phase: Phase, has_km: bool, has_batched: bool = False) -> FfnArm:
    """Return the dense arm: one launch for each projection up to 8 rows (``km``), and up to 16 if preferred.

    Above that, and in a prefill from 4 rows on, the prefill path reads weights once.

    A single missing row count (n = 4) once cost 1.41x, so every count from 1 to 8 has a case here.
    """
    if rows <= 3:
        return _small(rows)
    if phase != "prefill" and rows in KM_ROWS and has_km:
        return "km"
    if phase != "prefill" and rows in BATCHED_ROWS and has_batched:
        return "batched"
    return "prefill"


def moe_arm(rows: int, phase: Phase, grouped: bool, fused_rows: int = 0) -> FfnArm:
    """Return the MoE arm: ``grouped`` by the decision function, else 3, 2, pairs, or token by token.

    More than 3 rows are one batch if ``fused_rows`` covers them in two launches. Verify uses the same decision as
    decode. A prefill reads each expert once, like grouped decode, at any size.
    """
    if phase == "prefill":
        return "prefill"
    if grouped:
        return "grouped"
    if rows <= 3:
        return _small(rows)
    if rows <= fused_rows:
        return "batched"
    return "k2" if rows % 2 == 0 else "single"


def _small(rows: int) -> FfnArm:
    return "k3" if rows == 3 else "k2" if rows == 2 else "single"


def dense_alias(arm: FfnArm) -> FfnArm:
    """Return the dense FFN's arm for a name. UsageError for an arm of experts only."""
    if arm not in DENSE_ARMS:
        raise UsageError(f"a dense FFN has no arm {arm!r}; it has {', '.join(DENSE_ARMS)}")
    return "batched" if arm in ("token_major", "atomic_c4") else arm
