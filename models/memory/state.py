"""The state of a model's sequences: paged keys and values, recurrent states. The caller owns it.

Limits raise and never clamp: no slot, no page, a context that is full.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kernel_muster.models.dims import AttentionDims, GdnDims, ModelDims
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.memory import copy_rows, zero
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen

Zeros = Callable[[tuple[int, ...], str], Any]


def host_zeros(shape: tuple[int, ...], dtype: str) -> Any:
    """Return zeros on the host. ``dtype`` is a name of ``registry.dtypes``."""
    return np.zeros(shape, numpy_dtype(dtype))


@frozen
class StateSizes:
    """How many sequences at once, and how many pages of how many tokens they share."""

    sequences: int
    pages: int
    page_size: int = 16

    def __post_init__(self) -> None:
        values = self.sequences, self.pages, self.page_size
        if not all(is_int(value) and value >= 1 for value in values):
            raise UsageError(f"{self}: expected at least 1 of each")


class KvCache:
    """Keys and values of one attention layer, BF16 ``(P, B, Hk, D)``."""

    def __init__(self, dims: AttentionDims, pages: int, page_size: int, zeros: Zeros = host_zeros) -> None:
        shape = (pages, page_size, dims.kv_heads, dims.head_dim)
        self.k, self.v = zeros(shape, "bf16"), zeros(shape, "bf16")


class Recurrent:
    """States of one GDN layer: convolution BF16 ``(R, C, W - 1)``, delta rule FP32 ``(R, Hv, Dk, Dv)``."""

    def __init__(self, dims: GdnDims, slots: int, zeros: Zeros = host_zeros) -> None:
        self._dims, self._zeros = dims, zeros
        self.conv, self.ssm = self._pool(slots)
        self.rows: tuple[Any, Any] | None = None  # after each row of the last verify pass
        self._room: tuple[Any, Any] | None = None  # the same memory for every verify pass

    def _pool(self, count: int) -> tuple[Any, Any]:
        dims = self._dims
        conv = self._zeros((count, dims.qkv_dim, dims.conv_width - 1), "bf16")
        return conv, self._zeros((count, dims.value_heads, dims.key_dim, dims.value_dim), "f32")

    def snapshots(self, rows: int) -> tuple[Any, Any]:
        """Return room for both states after each of M rows, valid until :meth:`restore`."""
        if self._room is None or len(self._room[0]) < rows:
            self._room = self._pool(rows)
        conv, ssm = self._room
        self.rows = conv[:rows], ssm[:rows]
        return self.rows

    def restore(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Restore the state after one row of the last verify pass in each slot; exact."""
        if self.rows is None:
            raise UsageError("no verify pass to roll back")
        conv, ssm = self.rows
        for slot, row in zip(slots, rows, strict=True):
            copy_rows(self.conv[slot], conv[row])
            copy_rows(self.ssm[slot], ssm[row])
        self.rows = None

    def clear(self, slot: int) -> None:
        """Forget a sequence."""
        zero(self.conv[slot])
        zero(self.ssm[slot])


@dataclass
class SequenceState:
    """One sequence: its slot in the recurrent pools, its pages, and how many tokens are in them."""

    slot: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class ModelState:
    """State of a model's layers, in layer order, and its sequences."""

    def __init__(self, dims: ModelDims, sizes: StateSizes, zeros: Zeros = host_zeros) -> None:
        self.sizes, self._vocab, self._name = sizes, dims.vocab, dims.name
        self.context = dims.context
        self.kv: dict[int, KvCache] = {}
        self.recurrent: dict[int, Recurrent] = {}
        for index, kind in enumerate(dims.layer_kinds):
            if kind == "attn" and dims.attention is not None:
                self.kv[index] = KvCache(dims.attention, sizes.pages, sizes.page_size, zeros)
            elif dims.gdn is not None:
                self.recurrent[index] = Recurrent(dims.gdn, sizes.sequences, zeros)
        self._free_slots = list(range(sizes.sequences))[::-1]
        self._free_pages = list(range(sizes.pages))[::-1]
        self._open: dict[int, SequenceState] = {}  # by slot
        self._verified: Batch | None = None  # the last verify pass, until its rows are chosen
        self._undecided: set[int] = set()  # the slots of its sequences

    def open(self) -> SequenceState:
        """Begin a sequence. UsageError if every slot is taken."""
        if not self._free_slots:
            raise UsageError(f"all {self.sizes.sequences} sequence slots are taken")
        slot = self._free_slots.pop()
        for pool in self.recurrent.values():
            pool.clear(slot)
        sequence = self._open[slot] = SequenceState(slot)
        return sequence

    def close(self, sequence: SequenceState) -> None:
        """End a sequence and free its slot and pages. UsageError for one that is not open here."""
        self.check_open([sequence])
        del self._open[sequence.slot]
        self._undecided.discard(sequence.slot)
        self._free_slots.append(sequence.slot)
        self._free_pages += sequence.pages[::-1]
        sequence.pages, sequence.length = [], 0

    def check_open(self, sequences: Sequence[SequenceState]) -> None:
        """UsageError unless all of these are open here, each once."""
        for one in sequences:
            if self._open.get(one.slot) is not one:
                raise UsageError(f"the sequence of slot {one.slot} is closed, or of another state: open one here")
        if len({one.slot for one in sequences}) != len(sequences):
            raise UsageError("a sequence stands twice in one pass")

    def check_ids(self, ids: Sequence[Any]) -> None:
        """UsageError unless all are tokens of the vocabulary: a device kernel would read out of bounds."""
        for at, token in enumerate(ids):
            if not is_int(token) or not 0 <= token < self._vocab:
                raise UsageError(f"token {token!r} at place {at}: expected an integer from 0 to {self._vocab - 1}")

    def batch(
        self, sequences: Sequence[SequenceState], ids: Sequence[Sequence[int]], phase: Phase, positions: Any = None
    ) -> Batch:
        """Place new rows of some sequences, with pages as needed. UsageError if there are too few.

        ``positions`` are ``(3, M)`` for tokens with height and width. Without them a token's place is its position.
        """
        if len(ids) != len(sequences):
            raise UsageError(f"tokens of {len(ids)} sequences for {len(sequences)} of them: expected as many")
        counts = [len(row) for row in ids]
        if not all([*counts, counts]):
            raise UsageError(f"a pass of {counts} rows: expected at least one sequence, and one row of each")
        for row in ids:
            self.check_ids(row)
        self.reserve(sequences, [s.length + count for s, count in zip(sequences, counts, strict=True)])
        spans = [range(s.length, s.length + count) for s, count in zip(sequences, counts, strict=True)]
        slots = [slot for s, span in zip(sequences, spans, strict=True) for slot in self.slots(s, span)]
        return Batch(
            phase,
            ids=i32([token for row in ids for token in row]),
            positions=i32([at for span in spans for at in span]) if positions is None else positions,
            cu_rows=i32([0, *np.cumsum(counts, dtype=np.int64)]),
            kv_slots=i32(slots),
            block_table=self.table(sequences),
            context_lens=i32([s.length + count for s, count in zip(sequences, counts, strict=True)]),
            state_slots=i32([sequence.slot for sequence in sequences]),
        )

    def reserve(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> None:
        """Take pages for these token counts. UsageError without any change if they run out.

        A length beyond the model's context is refused in the same way, and so is any call while rows of a verify pass
        are pending, because that pass has advanced the recurrent states.
        """
        self.check_open(sequences)
        if self._undecided:
            raise UsageError("a verify pass has run: say with roll_back which of its rows stay, before another pass")
        self.check_context(lengths)
        wanted = self._wanted(sequences, lengths)
        self._check_pages(sum(wanted))
        for sequence, count in zip(sequences, wanted, strict=True):
            for _ in range(count):
                sequence.pages.append(self._free_pages.pop())

    def has_pages(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> bool:
        """Whether so many tokens of each sequence would fit."""
        return sum(self._wanted(sequences, lengths)) <= len(self._free_pages)

    def _wanted(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[int]:
        """Return how many more pages each sequence takes to have so many tokens."""
        size = self.sizes.page_size
        return [max(-(-length // size) - len(s.pages), 0) for s, length in zip(sequences, lengths, strict=True)]

    def check_room(self, lengths: Sequence[int], longest: int | None = None) -> None:
        """UsageError unless new sequences of these lengths fit: slots, pages, and ``longest`` tokens in each.

        None may exceed the model's context.
        """
        size = self.sizes.page_size
        if len(lengths) > (free := len(self._free_slots)):
            wanted = _counted(len(lengths), "sequence")
            raise UsageError(f"{wanted}, {_counted(free, 'slot')} free (of {self.sizes.sequences})")
        self.check_context(lengths)
        self._check_pages(sum(-(-length // size) for length in lengths))
        if longest is not None and (most := max(lengths, default=0)) > longest:
            raise UsageError(f"a sequence grows to {most} tokens that are read, steps are recorded for {longest}")

    def check_context(self, lengths: Sequence[int]) -> None:
        """UsageError for a sequence with more tokens than the model's context_length: no position exists beyond it."""
        if self.context is not None and (most := max(lengths, default=0)) > self.context:
            said = f"{self._name} has a context_length of {self.context}"
            raise UsageError(f"a sequence grows to {most} tokens that are read, {said}")

    def _check_pages(self, wanted: int) -> None:
        if wanted > (free := len(self._free_pages)):
            pages = f"{_counted(wanted, 'page')} of {self.sizes.page_size} tokens"
            raise UsageError(f"{pages} wanted, {free} free (of {self.sizes.pages})")

    def slots(self, sequence: SequenceState, places: Iterable[int]) -> list[int]:
        """Return where the places of a sequence lie in the cache."""
        size = self.sizes.page_size
        return [sequence.pages[place // size] * size + place % size for place in places]

    def table(self, sequences: Sequence[SequenceState]) -> Any:
        """Return the pages of each sequence, i32 ``(S, L)``, -1 beyond the last."""
        table = np.full((len(sequences), max((len(s.pages) for s in sequences), default=0)), -1, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.pages)] = sequence.pages
        return table

    def advance(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> None:
        """Commit rows of a pass to their sequences."""
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count

    def await_choice(self, batch: Batch) -> None:
        """Record that a verify pass has run: only :meth:`roll_back`, or closing its sequences, may follow."""
        self._verified, self._undecided = batch, set(batch.state_slots.tolist())

    def roll_back(self, sequences: Sequence[SequenceState], batch: Batch, kept: Sequence[int]) -> None:
        """Keep the first rows of each sequence of a verify pass, at least one. Recurrent states are restored exactly.

        Keys and values of the others lie beyond the context, unread until they are overwritten.
        """
        self.check_open(sequences)
        if batch is not self._verified or [one.slot for one in sequences] != batch.state_slots.tolist():
            raise UsageError("no verify pass to roll back: expected the batch and the sequences of the last one")
        counts = batch.counts
        if len(kept) != len(counts) or not all(map(_may_keep, kept, counts)):
            raise UsageError(f"keep {list(kept)} of {list(counts)} rows: expected 1 to all of them")
        # Where every row is kept the state is right already.
        back = [at for at, (keep, count) in enumerate(zip(kept, counts, strict=True)) if keep < count]
        slots = [sequences[at].slot for at in back]
        rows = [int(batch.cu_rows[at]) + kept[at] - 1 for at in back]
        for pool in self.recurrent.values():
            pool.restore(slots, rows)
        self._verified, self._undecided = None, set()
        self.advance(sequences, kept)


def _may_keep(keep: object, count: int) -> bool:
    return is_int(keep) and keep in range(1, count + 1)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def is_int(value: object) -> bool:
    """Whether a value is an integer, Python's or NumPy's, and no truth value."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def i32(values: Sequence[Any]) -> Any:
    """Return integers as an i32 array."""
    return np.array(values, np.int32)
