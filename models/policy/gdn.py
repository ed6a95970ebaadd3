"""The kernel of the gated delta rule for a pass. All give the same bits except prefill_chunked."""

from collections.abc import Collection
from typing import Literal

from kernel_muster.models.policy.evidence import H200, Evidence, Threshold
from kernel_muster.registry.levers import Levers

# single: one launch a row; strided: one for all sequences; norm_strided: with the gated norm in it, in the bits of the
# norm alone; prefill: the rows of prompts one after the other; prefill_chunked: 64 of a prompt at once, within a bound;
# chunk: the few rows of one sequence; verify_n: the rows of any number of sequences, with the state after each.
GdnArm = Literal["single", "strided", "norm_strided", "prefill", "prefill_chunked", "chunk", "verify_n"]
FUSED_VERIFY_ROWS = (2, 3)
#: Head sizes of the compiled chunk kernels: the size of a key, and the divisor of the size of a value.
CHUNKED_KEY_DIM, CHUNKED_VALUE_DIMS = 128, 32
CHUNKED_PREFILL_ROWS = Threshold(
    "rows a sequence of a prefill above which the delta rule takes it in chunks",
    16,
    Evidence(
        H200,
        "us chunks/rows, sequences x rows, states in L2, 32 heads: 1 x 16 14.0/9.8, 1 x 24 13.9/13.3, 1 x 32 "
        "13.9/16.8, 2 x 16 16.1/12.6, 2 x 24 16.2/17.1, 4 x 12 24.6/21.3, 4 x 16 24.5/26.5, 8 x 8 38.3/27.4, 8 x 16 "
        "41.0/42.0, 16 x 8 66.5/50.5, 16 x 16 67.2/80.8, 32 x 8 123/91, 32 x 12 124/120, 32 x 16 125/147; 48 heads: "
        "1 x 24 15.9/16.7, 4 x 16 32.7/32.3, 8 x 16 55.3/59.4, 16 x 12 96.7/91.4, 32 x 16 179/212; states not in "
        "L2, 32 heads: 1 x 16 16.6/14.3, 1 x 24 16.7/20.0, 1 x 64 17.0/47.6, 1 x 512 37/342, 1 x 2048 105/1089",
    ),
)

#: Most rows of the compiled launch of all inputs of a delta net.
FUSED_ROWS = 8
FUSED_LARGE_ROWS = Threshold(
    "most decode rows of one launch for all inputs of a delta net, where the projection is large",
    4,
    Evidence(
        H200,
        "us a step of eight layers, six of them delta nets, inputs apart/in one launch: 16384x5120 2 rows 766/753, "
        "4 806/802, 6 875/885, 8 897/907; 12288x2048 2 rows 345/325, 4 446/430, 6 581/563, 8 616/599",
        "5 and 7 rows",
    ),
)
LARGE_INPUTS_MI = Threshold(
    "most elements of a projection that is not large for that, in units of 2^20",
    24,
    Evidence(H200, "12288x2048 gains at 8 rows, 16384x5120 loses from 6", "25..79 Mi"),
)


def is_one_launch(rows: int, features: int, depth: int, levers: Levers) -> bool:
    """Whether all inputs of a decode step's rows are made in one launch, by a projection ``(features, depth)``."""
    is_large = features * depth > int(levers["MUSTER_GDN_IN_LARGE_MI"] or 0) << 20
    return rows <= (int(levers["MUSTER_GDN_IN_LARGE_ROWS"] or 0) if is_large else FUSED_ROWS)


def is_chunked_size(key_dim: int, value_dim: int) -> bool:
    """Whether chunks are compiled for heads of this size."""
    return key_dim == CHUNKED_KEY_DIM and value_dim % CHUNKED_VALUE_DIMS == 0


def prefill_arm(rows: int, sequences: int, has_chunked: bool) -> GdnArm:
    """Return the arm of a prefill of M rows of S sequences: in chunks above so many rows a sequence.

    S counts as the next power of two, so the edge is a captured row count (16, 32, 64, ...
    rows): padded or not, a pass takes the same arm.
    """
    edge = CHUNKED_PREFILL_ROWS.value << (sequences - 1).bit_length()
    return "prefill_chunked" if has_chunked and rows > edge else "prefill"


def decode_arm(has_strided: bool, has_norm_strided: bool) -> GdnArm:
    """Return the arm of a decode step: with the norm and with all sequences in one launch, if possible."""
    if has_norm_strided:
        return "norm_strided"
    return "strided" if has_strided else "single"


def verify_arm(rows: int, sequences: int, chunks: Collection[int], has_verify: bool) -> GdnArm:
    """Return the arm of a verify pass: K = 2 and 3 of one sequence are fused; else verify_n, else row by row."""
    if sequences == 1 and rows in chunks:
        return "chunk"
    return "verify_n" if has_verify else "single"
