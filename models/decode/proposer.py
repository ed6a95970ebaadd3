"""What a decode loop knows of a proposer."""

from collections.abc import Sequence
from typing import Any, Protocol

from kernel_muster.models.memory.state import SequenceState
from kernel_muster.registry.values import frozen


@frozen
class Committed:
    """Rows that are part of their sequences now, in order, M of them in all.

    ``counts`` divides them among the sequences, ``starts`` is the position of each one's first row. ``hidden (M, H)``
    and ``features (M, F * H)`` BF16 are the target's rows; ``next_ids`` is the token that follows each row.
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
        """The layers of the target whose output it wants."""

    def open(self, sequence: SequenceState) -> None:
        """Begin a state for a sequence of the target."""

    def close(self, sequence: SequenceState) -> None:
        """End it."""

    def commit(self, rows: Committed) -> None:
        """Take committed rows into the sequences' states."""

    def propose(self, sequences: Sequence[SequenceState], last_ids: Sequence[int]) -> Any:
        """Return drafts i32 ``(S, drafts)`` that follow each sequence's last token, which the target has not read."""
