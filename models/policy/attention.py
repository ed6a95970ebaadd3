"""Which arm serves the projections of attention (Q, K, V and the output, one decision for both), and its prompts."""

from typing import Literal, get_args

from kernel_muster.models.policy.evidence import GB10, H200, Evidence, Threshold
from kernel_muster.models.policy.gemv import WIDEST_TIER
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.values import frozen

# single and fused: one launch at 1, at 2 or 3 rows; tiled: tiles of 3; wide: one GEMM over all rows; per_seq: row by
# row; tiers: the batch tiers; own: all rows at once, by each projection's own edges.
QkvArm = Literal["single", "fused", "tiled", "wide", "per_seq", "tiers", "own"]
QKV_ARMS: tuple[QkvArm, ...] = get_args(QkvArm)
#: The values of MUSTER_QKV_ARM.
ASKED_ARMS = ("auto", "tiled", "wide", "per_seq")
_NAMED: dict[str, QkvArm] = {"tiled": "tiled", "wide": "wide", "per_seq": "per_seq"}
QKV_TILE = 3
MTP_VERIFY_ROWS = 8

# If one launch of a tier costs no more than one of three rows, tiles of 3 read the weights two to six times in vain.
# That holds for tensor-core GEMVs, not for the SIMT ones of the figures below. A device's table decides.
TIER_ROWS = Threshold(
    "most decode rows of QKV and output projections in one tier",
    QKV_TILE,
    Evidence(
        GB10, "N=K=5120, us: batch4@4 70.5, batch8@8 106.4, batch16@8 113.3, each row of a tier paid for", "9..16"
    ),
)

# Per-sequence (aggregate) tok/s of a 35B hybrid, greedy, 256 new tokens, BF16 KV:
#   BF16 attention requantised at load, wide / tiled: C=1 91.2 / 90.6 (the same path)   C=4 15.8 (59.9) / 26.7 (98.6)
#     C=8 9.9 (78.3) / 15.1 (119.0)   C=16 5.9 (91.2) / 8.8 (134.7)      native NVFP4: tiled 1.01-1.10x
#   MTP verify n=4 (3 drafts, 60% accepted): tiled 1.18x; block-diffusion verify, 16 rows: equal.
# The requantised weights had no transposed copy there: native wide gives 27.6 a sequence at C=4.
TILED_EVIDENCE = Evidence(
    GB10,
    "tok/s a sequence wide/tiled, BF16 attention requantised: C=4 15.8/26.7, C=8 9.9/15.1, C=16 5.9/8.8; native "
    "NVFP4 tiled 1.01-1.10x; MTP verify n=4 tiled 1.18x; 16-row verify equal",
    "above 16 sequences",
)


@frozen
class QkvEdges:
    """Most rows in batch tiers or chunks of 16, and least rows at which a GEMM reads the weights once (0: never)."""

    tier_rows: int = QKV_TILE
    own_from: int = 0


BUILT_IN_EDGES = QkvEdges()


def qkv_edges(levers: Levers, hopper_from: int) -> QkvEdges:
    """Return the edges of a device. ``hopper_from`` is the Hopper GEMM's for Q, K and V together, 0 without it.

    If even the widest tier pays, rows above it follow a single projection: chunks up to the GEMM's edge, then the GEMM.
    Without measurements, only the Hopper GEMM is preferred to tiles of 3.
    """
    tier_rows = int(levers["MUSTER_QKV_TIER_ROWS"] or 0)
    own_from = hopper_from
    if not hopper_from and tier_rows >= WIDEST_TIER:
        own_from = int(levers["MUSTER_W4A16_CHUNKED_ROWS"] or 0) + 1
    return QkvEdges(own_from - 1 if tier_rows >= WIDEST_TIER else tier_rows, own_from)


def tiers_reach_wide(levers: Levers) -> bool:
    """Whether rows above 16 of QKV and output projections go through one tier each, without the Hopper GEMM."""
    return qkv_edges(levers, 0).tier_rows > WIDEST_TIER


def bf16_edges(levers: Levers, has_batch: bool) -> QkvEdges:
    """Return the edges of BF16 projections: the GEMV, in one launch up to 16 rows, below the edge of the GEMM.

    A device on which tiles of 3 rows win has them between both edges. Without a GEMV of several rows all are GEMMs.
    """
    gemm_from = max(int(levers["MUSTER_BF16_GEMM_FROM"] or 0), 1)
    if not has_batch:
        return QkvEdges(0, 1)
    tier_rows = int(levers["MUSTER_BF16_TIER_ROWS"] or 0)
    return QkvEdges(gemm_from - 1 if tier_rows >= WIDEST_TIER else min(tier_rows, gemm_from - 1), gemm_from)


def qkv_arm(rows: int, phase: Phase, asked: str, has_tiers: bool, edges: QkvEdges = BUILT_IN_EDGES) -> QkvArm:
    """Return the arm for M rows of the QKV and output projections.

    Up to 3 rows are one launch. Above that, ``asked`` (MUSTER_QKV_ARM) governs decode and verify. With ``auto``:

    - Batch tiers that cover the rows serve up to their edge, and in an MTP verify (up to 8 rows).
    - From a GEMM's edge on, each projection uses its own arm.
    - All else is tiled, never below parity in any measurement.

    Prefill is wide.
    """
    if asked not in ASKED_ARMS:
        raise UsageError(f"QKV arm {asked!r}: expected {', '.join(ASKED_ARMS)}")
    if rows <= QKV_TILE:
        return "single" if rows <= 1 else "fused"
    if phase == "prefill":
        return "wide"
    if asked != "auto":
        return _NAMED[asked]
    if has_tiers and rows <= max(edges.tier_rows, MTP_VERIFY_ROWS if phase == "verify" else 0):
        return "tiers"
    return "own" if edges.own_from and rows >= edges.own_from else "tiled"


def cuts_tiles(fewest_rows: int, asked: str, edges: QkvEdges) -> bool:
    """Whether some passes of so many rows at least are cut into tiles of 1 to 3 rows."""
    if fewest_rows <= QKV_TILE:
        return True
    if asked != "auto":
        return asked in ("tiled", "per_seq")
    return not edges.own_from or max(fewest_rows, edges.tier_rows + 1) < edges.own_from


# rows: every row of a prompt as the decode step of its prefix, with its bits; mma: tiles of rows, weights in BF16.
PrefillArm = Literal["rows", "mma"]
#: The head sizes of the compiled tile kernels.
MMA_HEAD_DIMS = (128, 256)
#: The head sizes of compiled attention from projections on; the host supports any.
FRESH_HEAD_DIMS = (64, 128, 256)
# One more than a captured row count (16, 32, 64, ...): padded or not, a pass takes the same arm.
PREFILL_MMA_ROWS = Threshold(
    "least rows of a prefill whose attention takes tiles of rows",
    17,
    Evidence(
        H200,
        "us tiles/rows behind 0, 256, 1024, 2048, 8192 tokens, heads 16/2 of 256: 17 rows 4.9/4.2, 11.2/8.7, "
        "12.4/19.4, 14.0/24.2, 23.5/65.2; 32 rows 5.2/4.3, 11.3/12.1, 12.4/19.2, 14.5/27.6, 24.2/69.5; heads 24/4: 17 "
        "rows 5.0/4.1, 11.5/12.0, 12.7/24.0, 15.3/42.9, 26.3/101; 32 rows 5.6/4.4, 11.7/12.0, 13.5/27.8, 17.5/46.3, "
        "30.5/109; heads 32/4 of 128: 17 rows 3.9/3.5, 9.1/8.7, 10.0/16.6, 12.1/28.7, 19.0/66.0; 32 rows 4.0/3.7, "
        "9.2/9.1, 10.5/20.4, 12.8/31.8, 21.7/70.1",
        "9 to 16 rows, which are to have the bits of decode",
    ),
)


def prefill_arm(rows: int, phase: Phase, head_dim: int, has_mma: bool) -> PrefillArm:
    """Return the attention arm for the M rows of a batch with more than one row in a sequence.

    Only a prefill takes tiles: a verify pass needs the bits of decode, and gets them row by row.
    """
    is_wide = rows >= PREFILL_MMA_ROWS.value and head_dim in MMA_HEAD_DIMS
    return "mma" if phase == "prefill" and is_wide and has_mma else "rows"
