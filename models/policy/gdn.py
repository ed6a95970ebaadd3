"""Which form of the gated delta rule serves a pass. All give the same bits; they differ in launches."""

from collections.abc import Collection
from typing import Literal

# single: one launch a row; strided: one for all sequences; norm_strided: with the gated norm in it, in the bits of the
# norm alone; chunk: the few rows of one sequence; verify_n: the rows of any number of sequences, with the state after
# each.
GdnArm = Literal["single", "strided", "norm_strided", "prefill", "chunk", "verify_n"]
FUSED_VERIFY_ROWS = (2, 3)


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
