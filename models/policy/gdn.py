"""Which form of the gated delta rule serves a pass. All give the same bits but prefill_chunked."""

from collections.abc import Collection
from typing import Literal

from kernel_muster.models.policy.evidence import H200, Evidence, Threshold

# single: one launch a row; strided: one for all sequences; norm_strided: with the gated norm in it, in the bits of the
# norm alone; prefill: the rows of prompts one after the other; prefill_chunked: 64 of a prompt at once, within a bound;
# chunk: the few rows of one sequence; verify_n: the rows of any number of sequences, with the state after each.
GdnArm = Literal["single", "strided", "norm_strided", "prefill", "prefill_chunked", "chunk", "verify_n"]
FUSED_VERIFY_ROWS = (2, 3)
#: The heads that chunks are compiled for: keys of so many values, and values of a multiple of so many.
CHUNKED_KEY_DIM, CHUNKED_VALUE_DIMS = 128, 32
# One more than a rung of the passes that are recorded (16, 32, 64, ...): padded or not, a pass takes the same arm.
CHUNKED_PREFILL_ROWS = Threshold(
    "least rows of a prefill that the delta rule takes in chunks",
    33,
    Evidence(
        H200,
        "us chunks/rows, 32 heads: 16 rows 16.6/14.3, 24 rows 16.7/20.0, 33 rows 16.7/26.2, 64 rows 17.0/47.6, 512 "
        "rows 37/342, 2048 rows 105/1089; 8 sequences of 8 rows 43/27, of 32 rows 45/73, 16 of 16 rows 69/81; 48 "
        "heads: 64 rows 16.3/45.9, 2048 rows 159/1168",
    ),
)


def is_chunked_size(key_dim: int, value_dim: int) -> bool:
    """Whether chunks are compiled for heads of this size."""
    return key_dim == CHUNKED_KEY_DIM and value_dim % CHUNKED_VALUE_DIMS == 0


def prefill_arm(rows: int, has_chunked: bool) -> GdnArm:
    """Return the arm of a prefill of M rows: in chunks from the edge up."""
    return "prefill_chunked" if has_chunked and rows >= CHUNKED_PREFILL_ROWS.value else "prefill"


def decode_arm(sequences: int, has_strided: bool, has_norm_strided: bool) -> GdnArm:
    """Return the arm of a decode step: with the norm if it can be; several sequences go in one launch if they can."""
    if has_norm_strided:
        return "norm_strided"
    return "strided" if has_strided and sequences > 1 else "single"


def verify_arm(rows: int, sequences: int, chunks: Collection[int], has_verify: bool) -> GdnArm:
    """Return the arm of a verify pass: K = 2 and 3 of one sequence are fused; else verify_n, else row by row."""
    if sequences == 1 and rows in chunks:
        return "chunk"
    return "verify_n" if has_verify else "single"
