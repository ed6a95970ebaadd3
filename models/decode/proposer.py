"""The protocol of a proposer, and the checks of a decode loop: any object may be given in its place."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from kernel_muster.models.memory.state import SequenceState, is_int
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen

_METHODS = ("open", "close", "commit", "propose")


@frozen
class Committed:
    """Rows that now belong to their sequences, in order, M in all.

    ``counts`` divides them among the sequences, ``starts`` is the position of each one's first row. ``hidden (M, H)``
    and ``features (M, F * H)`` BF16 are the target's rows. ``next_ids`` is the token that follows each row.
    """

    sequences: Sequence[SequenceState]
    counts: Sequence[int]
    starts: Sequence[int]
    hidden: Any
    features: Any | None
    next_ids: Sequence[int]
    is_prompt: bool = False


class Proposer(Protocol):
    """Drafts ``drafts`` tokens a step, and reads the output of the target's layers ``reads``."""

    @property
    def drafts(self) -> int:
        """How many tokens it proposes a step."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The layers of the target whose output it needs."""

    def open(self, sequence: SequenceState) -> None:
        """Begin a state for a sequence of the target."""

    def close(self, sequence: SequenceState) -> None:
        """End it."""

    def commit(self, rows: Committed) -> None:
        """Take committed rows into the sequences' states."""

    def propose(self, sequences: Sequence[SequenceState], last_ids: Sequence[int]) -> Any:
        """Return drafts i32 ``(S, drafts)`` after each sequence's last token, which the target has not read."""


def check_proposer(proposer: Proposer) -> None:
    """UsageError for an object that is no proposer, before the first pass."""
    name = type(proposer).__name__
    if lacking := [method for method in _METHODS if not callable(getattr(proposer, method, None))]:
        raise UsageError(f"proposer {name} has no method {', '.join(lacking)}")
    drafts: Any = getattr(proposer, "drafts", None)
    reads: Any = getattr(proposer, "reads", None)
    if not is_int(drafts) or drafts < 1:
        raise UsageError(f"proposer {name}: drafts is {drafts!r}, expected an integer of at least 1")
    if not isinstance(reads, tuple) or not all(map(is_int, reads)):
        raise UsageError(f"proposer {name}: reads is {reads!r}, expected a tuple of layers")


def checked_drafts(proposer: Proposer, drafts: object, sequences: int, vocab: int) -> Any:
    """Return drafts i32 ``(S, drafts)`` of a proposal. UsageError for any other result of ``propose``."""
    name, shape = type(proposer).__name__, (sequences, proposer.drafts)
    wanted = f"expected a NumPy array of integers {shape}: a row for each sequence, a token for each draft"
    if not isinstance(drafts, np.ndarray):
        raise UsageError(f"proposer {name}: propose returned {type(drafts).__name__}, {wanted}")
    if drafts.shape != shape or drafts.dtype.kind not in "iu":
        raise UsageError(f"proposer {name}: propose returned {drafts.dtype} {drafts.shape}, {wanted}")
    if strange := [token for token in drafts.ravel().tolist() if not 0 <= token < vocab]:
        raise UsageError(f"proposer {name}: propose returned token {strange[0]}, expected 0 to {vocab - 1}")
    return drafts.astype(np.int32)
