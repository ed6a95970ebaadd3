"""Several sequences in one launch: the rows and the pool slot of each sequence.

A slot of ``PADDING`` marks a row that only fills up a batch: the kernel neither reads nor writes the pool for it.
"""

import numpy as np
from kernel_muster.plugins._reference import Array
from kernel_muster.registry.errors import ContractError

PADDING = -1


def rows_of(owner: str, cu_rows: Array, rows: int) -> list[range]:
    """Return the rows of each sequence: those of s are ``cu_rows[s]`` to ``cu_rows[s + 1]`` of ``cu_rows [S + 1]``.

    Offsets that do not rise from 0 to ``rows`` raise ContractError; a sequence may be empty.
    """
    if cu_rows[0] != 0 or cu_rows[-1] != rows or (np.diff(cu_rows) < 0).any():
        text = np.array2string(cu_rows, threshold=16)
        raise ContractError(f"{owner}: cu_rows is {text}, expected to rise from 0 to the {rows} rows")
    return [range(start, stop) for start, stop in zip(cu_rows[:-1].tolist(), cu_rows[1:].tolist(), strict=True)]


def check_slots(owner: str, slots: Array, count: int) -> None:
    """Refuse a slot that is neither ``PADDING`` nor ``0 <= slot < count``, and one that two rows name."""
    wrong = np.flatnonzero((slots < PADDING) | (slots >= count))
    if wrong.size:
        at = int(wrong[0])
        raise ContractError(
            f"{owner}: slots[{at}] is {slots[at]}, expected 0 <= slot < {count}, or {PADDING} for padding"
        )
    used = slots[slots != PADDING]
    found, times = np.unique(used, return_counts=True)
    if (times > 1).any():
        slot = found[times > 1][0]
        places = np.flatnonzero(slots == slot)[:2].tolist()
        raise ContractError(f"{owner}: slots{places} are both {slot}, expected every slot at most once")
