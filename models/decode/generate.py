"""Greedy decode of several sequences, plain or with a proposer: the same tokens either way.

The target chooses every token. Drafts only select the positions to compute ahead. A verify pass may round logits
differently from decode (tile GEMMs, above 8 rows). Then two logits that are equal up to that rounding may swap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from kernel_muster.models.decode.proposer import Committed, Proposer, check_proposer, checked_drafts
from kernel_muster.models.memory.state import ModelState, SequenceState, i32, is_int
from kernel_muster.models.model import Model, Pass
from kernel_muster.models.policy.rows import committed_rows
from kernel_muster.models.policy.speculation import speculation_pays
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import CPU, Arch
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.values import frozen


@frozen
class Gate:
    """The decision to stop drafting: the cost of a verify step in plain steps (None: unknown, so draft)."""

    cost_ratio: float | None = None
    is_forced: bool = False
    arch: str = CPU

    @classmethod
    def of(cls, levers: Levers, arch: Arch | str | None, cost_ratio: float | None) -> "Gate":
        """Return the gate of a boot; MUSTER_MTP_GATE_FORCE opens it. ``arch`` is its target's."""
        return cls(cost_ratio, levers.flag("MUSTER_MTP_GATE_FORCE"), str(arch or CPU))

    def passes(self, steps: int, accepted: int) -> bool:
        """Whether to go on drafting after so many verify steps with so many accepted drafts."""
        ratio = self.cost_ratio
        return ratio is None or speculation_pays(steps, accepted, ratio, self.arch, self.is_forced)


@dataclass
class Generated:
    """New tokens of each prompt with their logits ``(V,)`` on the host, and the steps.

    ``verify_steps`` counts sequences times verify passes; a small number gives no information about speculation.
    ``step_s`` are the seconds of each step after the prompts, all sequences together, ``verify_s`` those of verify
    steps with drafting, ``draft_s`` drafting alone.
    """

    tokens: list[list[int]]
    logits: list[list[Any]]
    plain_steps: int = 0
    verify_steps: int = 0
    accepted: int = 0
    drafted: int = 0
    prefill_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)


def check_run(
    state: ModelState, prompts: Sequence[Sequence[int]], new_tokens: int, longest: int | None = None
) -> None:  # fmt: skip
    """UsageError for a run that cannot end, known before the first pass. The last token is not read."""
    if not is_int(new_tokens) or new_tokens < 1:
        raise UsageError(f"{new_tokens} new tokens: expected at least 1")
    if not len(prompts):
        raise UsageError("no prompts: expected at least one")
    for prompt in prompts:
        if not isinstance(prompt, Sequence | np.ndarray):
            raise UsageError(f"a prompt is {type(prompt).__name__}, expected a sequence of tokens")
        if not len(prompt):
            raise UsageError("a prompt is empty, expected at least one token")
        state.check_ids(prompt)
    state.check_room([len(prompt) + new_tokens - 1 for prompt in prompts], longest)


@dataclass
class _Live:
    """A growing sequence: its place, its prompt, and its last token, which is not yet read."""

    sequence: SequenceState
    prompt: int
    last: int = -1
    is_open: bool = True


@dataclass
class GreedyDecoder:
    """Runs prompts to their end. The caller owns the state; a proposer has its own.

    ``decode``, ``verify`` and ``prefill`` replace the model's passes by recorded ones, for up to ``longest`` tokens of
    a sequence. Logits are kept on demand only: on a device each row is a copy to the host. Without room for drafts a
    step is plain.
    """

    model: Model
    state: ModelState
    proposer: Proposer | None = None
    gate: Gate = field(default_factory=Gate)
    keep_logits: bool = True
    decode: Callable[..., Pass] | None = None
    verify: Callable[..., Pass] | None = None
    prefill: Callable[..., Iterator[Pass]] | None = None
    longest: int | None = None

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        """Return ``new_tokens`` tokens behind each prompt."""
        check_run(self.state, prompts, new_tokens, self.longest)
        if self.proposer is not None:
            check_proposer(self.proposer)
        with self.model.memory.active():
            return self._run(prompts, new_tokens)

    def _run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Generated:
        found = Generated([[] for _ in prompts], [[] for _ in prompts])
        live: list[_Live] = []
        try:
            for index in range(len(prompts)):
                live.append(self._open(index))
            start = perf_counter()
            self._prefill(live, prompts, found)
            found.prefill_s = perf_counter() - start
            self._grow(self._growing(live, found, new_tokens), found, new_tokens)
        finally:
            for one in live:
                self._close(one)
        return found

    def _open(self, prompt: int) -> _Live:
        sequence = self.state.open()
        try:
            if self.proposer is not None:
                self.proposer.open(sequence)
        except BaseException:
            self.state.close(sequence)
            raise
        return _Live(sequence, prompt)

    def _close(self, one: _Live) -> None:
        """End a sequence here and in the proposer, once."""
        if not one.is_open:
            return
        one.is_open = False
        try:
            if self.proposer is not None:
                self.proposer.close(one.sequence)
        finally:
            self.state.close(one.sequence)

    def _grow(self, growing: list[_Live], found: Generated, new_tokens: int) -> None:
        while growing:
            start = perf_counter()
            if self._drafts(growing, found, new_tokens):
                self._speculate(growing, found, new_tokens)
                found.verify_s.append(perf_counter() - start)
            else:
                self._step(growing, found)
            found.step_s.append(perf_counter() - start)
            growing = self._growing(growing, found, new_tokens)

    def _drafts(self, growing: Sequence[_Live], found: Generated, new_tokens: int) -> bool:
        """Whether the next step drafts: it pays, and its rows leave every sequence the room for plain decode."""
        if self.proposer is None or not self.gate.passes(found.verify_steps, found.accepted):
            return False
        sequences = [one.sequence for one in growing]
        ahead = [one.sequence.length + 1 + self.proposer.drafts for one in growing]
        if any(most is not None and max(ahead) > most for most in (self.longest, self.state.context)):
            return False
        rest = [new_tokens - len(found.tokens[one.prompt]) for one in growing]
        ends = [one.sequence.length + count for one, count in zip(growing, rest, strict=True)]
        return self.state.has_pages(sequences, list(map(max, ahead, ends)))

    def _kept(self, logits: Any) -> list[Any]:
        """Return rows of logits on the host, or none."""
        return list(self.model.memory.get(logits)) if self.keep_logits else [None] * len(logits)

    @property
    def _reads(self) -> tuple[int, ...]:
        return () if self.proposer is None else self.proposer.reads

    def _growing(self, live: Sequence[_Live], found: Generated, new_tokens: int) -> list[_Live]:
        """Close finished sequences, and return the others."""
        rest = []
        for one in live:
            if len(found.tokens[one.prompt]) < new_tokens:
                rest.append(one)
            else:
                self._close(one)
        return rest

    def _prefill(self, live: Sequence[_Live], prompts: Sequence[Sequence[int]], found: Generated) -> None:
        by_slot = {one.sequence.slot: one for one in live}
        prefill = self.prefill or self.model.prefill
        for done in prefill(self.state, [one.sequence for one in live], prompts, self._reads):
            slots = done.batch.state_slots.tolist()
            part = [by_slot[slot] for slot in slots]
            ends = dict(zip(slots, done.batch.context_lens.tolist(), strict=True))
            complete = [at for at, one in enumerate(part) if ends[one.sequence.slot] == len(prompts[one.prompt])]
            chosen, logits = self.model.greedy(done.logits), self._kept(done.logits)
            for at in complete:
                self._take(part[at], [chosen[at]], [logits[at]], found)
            self._after_plain(part, done, found, prompts)

    def _step(self, growing: Sequence[_Live], found: Generated) -> None:
        """Decode one token of each sequence."""
        sequences = [one.sequence for one in growing]
        decode = self.decode or self.model.decode
        done = decode(self.state, sequences, [one.last for one in growing], self._reads)
        for one, token, logits in zip(growing, self.model.greedy(done.logits), self._kept(done.logits), strict=True):
            self._take(one, [token], [logits], found)
        found.plain_steps += len(growing)
        self._after_plain(growing, done, found)

    def _speculate(self, growing: Sequence[_Live], found: Generated, new_tokens: int) -> None:
        """Draft, verify all drafts in one pass, and keep those that equal the target's choice."""
        assert self.proposer is not None  # noqa: S101  (the caller has just looked)
        sequences = [one.sequence for one in growing]
        start = perf_counter()
        given = self.proposer.propose(sequences, [one.last for one in growing])
        drafts = checked_drafts(self.proposer, given, len(sequences), self.model.dims.vocab)
        found.draft_s.append(perf_counter() - start)
        ids = [[one.last, *row] for one, row in zip(growing, drafts.tolist(), strict=True)]
        verify = self.verify or self.model.verify
        done = verify(self.state, sequences, ids, self._reads)
        size = drafts.shape[1] + 1
        choices = i32(self.model.greedy(done.logits)).reshape(len(growing), size)
        logits = self._kept(done.logits)
        kept = []
        for at, (one, accepted) in enumerate(zip(growing, self.model.sampler.accepted(drafts, choices), strict=True)):
            room = new_tokens - len(found.tokens[one.prompt])
            rows = min(committed_rows(accepted), room)
            first = at * size
            self._take(one, choices[at, :rows].tolist(), logits[first : first + rows], found)
            kept.append(rows)
            found.accepted += rows - 1
        found.verify_steps += len(growing)
        found.drafted += drafts.size
        starts = [sequence.length for sequence in sequences]
        self.state.roll_back(sequences, done.batch, kept)
        self._after_accept(growing, done, kept, starts, choices)

    def _take(self, one: _Live, tokens: list[int], logits: list[Any], found: Generated) -> None:
        found.tokens[one.prompt] += tokens
        found.logits[one.prompt] += [row for row in logits if row is not None]
        one.last = tokens[-1]

    def _after_plain(
        self, part: Sequence[_Live], done: Pass, found: Generated, prompts: Sequence[Sequence[int]] = ()
    ) -> None:
        """Give the proposer every row of a plain pass: a prompt's rows, or one of each sequence."""
        if self.proposer is None:
            return
        counts = done.batch.counts
        starts = [int(end) - count for end, count in zip(done.batch.context_lens, counts, strict=True)]
        next_ids: list[int] = []
        for one, count, start in zip(part, counts, starts, strict=True):
            known = [*prompts[one.prompt], one.last] if prompts else [one.last] * (start + 2)
            next_ids += known[start + 1 : start + 1 + count]
        self._commit(part, counts, starts, done, list(range(done.batch.rows)), next_ids, bool(prompts))

    def _after_accept(
        self, growing: Sequence[_Live], done: Pass, kept: Sequence[int], starts: Sequence[int], choices: Any
    ) -> None:
        """Give the proposer the kept rows of a verify pass: the accepted drafts, and the token before."""
        rows = [int(first) + at for first, count in zip(done.batch.cu_rows, kept, strict=False) for at in range(count)]
        next_ids = [token for row, count in zip(choices.tolist(), kept, strict=True) for token in row[:count]]
        self._commit(growing, kept, starts, done, rows, next_ids, False)

    def _commit(
        self, part: Sequence[_Live], counts: Sequence[int], starts: Sequence[int], done: Pass, rows: list[int],
        next_ids: list[int], is_prompt: bool,
    ) -> None:  # fmt: skip
        assert self.proposer is not None  # noqa: S101  (the callers have just looked)
        hidden, features = done.hidden, done.features
        if rows != list(range(done.batch.rows)):
            pick = self.model.embedding.pick
            hidden, features = pick(hidden, rows), None if features is None else pick(features, rows)
        sequences = [one.sequence for one in part]
        self.proposer.commit(Committed(sequences, counts, starts, hidden, features, next_ids, is_prompt))
