"""Drafting changes how many passes it takes and never the tokens.

Margin rule: where the two decodes differ, the plain run's two largest logits at the first difference must lie within
two units in the last place of BF16 of each other (2^-6 of the larger): a verify pass on tile GEMMs may round the last
bit of a logit differently, so only such a near tie can turn. On GEMV kernels (8 rows and fewer) no difference is
allowed.
"""

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.decode.drafts import DraftSteps
from kernel_muster.models.decode.generate import Gate, Generated, GreedyDecoder
from kernel_muster.models.decode.proposer import Committed
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.drafter import Drafter, drafter_from_dims
from kernel_muster.models.memory.state import ModelState, SequenceState, StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.policy.speculation import speculation_pays
from kernel_muster.models.proposers.dflash import DflashProposer
from kernel_muster.models.proposers.mtp import MtpProposer
from kernel_muster.models.weights.source import SyntheticWeights
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.target import resolve_target
from kernel_muster.registry.levers import Levers

Make = Callable[..., Model]
MakeLevers = Callable[..., Levers]
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9]]
SIZES = StateSizes(4, 64, 4)
MARGIN = 2.0**-6
NEW = 12


@pytest.fixture(scope="module")
def plain(tiny: Make) -> Callable[..., Generated]:
    found: dict[str, Generated] = {}

    def run(kind: str) -> Generated:
        if kind not in found:
            found[kind] = GreedyDecoder(tiny(kind), tiny(kind).new_state(SIZES)).run(PROMPTS, NEW)
        return found[kind]

    return run


def assert_same_tokens(got: Generated, plain: Generated, exact: bool) -> None:
    for tokens, expected, logits in zip(got.tokens, plain.tokens, plain.logits, strict=True):
        assert len(tokens) == len(expected)
        if tokens == expected:
            continue
        assert not exact
        first = next(at for at, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1])
        second, largest = np.sort(logits[first].astype(np.float64))[-2:]
        assert largest - second <= MARGIN * abs(largest)


def run(model: Model, proposer: Any, gate: Gate | None = None) -> Generated:
    return GreedyDecoder(model, model.new_state(SIZES), proposer, gate or Gate()).run(PROMPTS, NEW)


class Told:
    """Wraps a proposer: it keeps its state, but drafts what a plain run said, and is wrong in a pattern of its own."""

    def __init__(
        self,
        inner: Any,
        said: Sequence[Sequence[int]],
        pattern: Sequence[int],
        prompts: Sequence[Sequence[int]] = PROMPTS,
    ) -> None:
        self.prompts = prompts
        self.inner, self.drafts, self.reads = inner, inner.drafts, inner.reads
        self.said, self.pattern, self.calls = said, pattern, 0
        self.starts: dict[int, int] = {}
        self.commits: list[Committed] = []

    def open(self, sequence: SequenceState) -> None:
        self.starts[sequence.slot] = len(self.starts)
        self.inner.open(sequence)

    def close(self, sequence: SequenceState) -> None:
        self.inner.close(sequence)

    def commit(self, rows: Committed) -> None:
        self.commits.append(rows)
        self.inner.commit(rows)

    def propose(self, sequences: Sequence[SequenceState], last_ids: Sequence[int]) -> Any:
        drafts = self.inner.propose(sequences, last_ids)
        for row, sequence in enumerate(sequences):
            prompt = self.starts[sequence.slot]
            at = sequence.length - len(self.prompts[prompt]) + 1
            right = self.pattern[self.calls % len(self.pattern)]
            self.calls += 1
            told = self.said[prompt][at : at + right]
            drafts[row, : len(told)] = told
            if right < self.drafts:
                drafts[row, right] = 94 if self.said[prompt][at + right : at + right + 1] == [93] else 93
        return drafts


@pytest.mark.parametrize(("kind", "drafts"), [("dense", 1), ("dense", 7), ("moe", 1), ("moe", 3), ("bf16", 2)])
def test_mtp_and_plain_decode_give_the_same_tokens(
    tiny: Make, make_levers: MakeLevers, plain: Callable[..., Generated], kind: str, drafts: int
) -> None:
    got = run(tiny(kind), MtpProposer(tiny(kind), make_levers(), drafts, SIZES))
    assert_same_tokens(got, plain(kind), exact=3 * (drafts + 1) <= 8)
    assert got.verify_steps >= 3 * NEW // (drafts + 1) - 3
    assert got.drafted == drafts * got.verify_steps
    assert got.plain_steps == 0


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_dflash_and_plain_decode_give_the_same_tokens(
    tiny: Make,
    tiny_drafter: Callable[..., Drafter],
    make_levers: MakeLevers,
    plain: Callable[..., Generated],
    kind: str,
) -> None:
    got = run(tiny(kind), DflashProposer(tiny_drafter(kind), make_levers(), SIZES))
    assert_same_tokens(got, plain(kind), exact=False)
    assert got.verify_steps > 0


PATTERNS = [(3,), (0,), (1, 3, 0, 2), (2, 2, 3)]


@pytest.mark.parametrize(("kind", "pattern"), [*(("dense", pattern) for pattern in PATTERNS), ("moe", PATTERNS[2])])
def test_drafts_that_hold_in_part_give_the_same_tokens_in_fewer_passes(
    tiny: Make, make_levers: MakeLevers, plain: Callable[..., Generated], kind: str, pattern: tuple[int, ...]
) -> None:
    told = Told(MtpProposer(tiny(kind), make_levers(), 3, SIZES), plain(kind).tokens, pattern)
    got = run(tiny(kind), told)
    assert_same_tokens(got, plain(kind), exact=False)
    if pattern == (3,):
        assert got.verify_steps == 3 * -(-(NEW - 1) // 4)
    assert (got.accepted == 0) == (pattern == (0,))


class Never(Gate):
    """A gate that never lets a draft through; the proposer only keeps its state."""

    def passes(self, steps: int, accepted: int) -> bool:
        return False


def decoder_of(model: Model, proposer: Any, speculates: bool = True) -> GreedyDecoder:
    return GreedyDecoder(model, model.new_state(SIZES), proposer, Gate() if speculates else Never())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_mtp_state_after_accepts_is_that_of_plain_steps_bit_for_bit(
    tiny: Make, make_levers: MakeLevers, plain: Callable[..., Generated], pattern: tuple[int, ...]
) -> None:
    caches = []
    for speculates in (True, False):
        inner = MtpProposer(tiny("dense"), make_levers(), 3, SIZES)
        told = Told(inner, plain("dense").tokens, pattern)
        got = decoder_of(tiny("dense"), told, speculates).run(PROMPTS[:1], NEW)
        assert got.tokens == plain("dense").tokens[:1]
        committed = sum(sum(rows.counts) for rows in told.commits)
        assert committed == len(PROMPTS[0]) + NEW - 1
        flat = [array.reshape(-1, 2, 16)[:committed] for array in (inner._state.kv[0].k, inner._state.kv[0].v)]
        assert all(np.any(array, axis=(1, 2)).all() for array in flat)
        caches.append([array.tobytes() for array in flat])
    assert caches[0] == caches[1]


@pytest.mark.parametrize("speculates", [True, False])
def test_every_token_reaches_the_drafters_context_once(
    tiny: Make, tiny_drafter: Callable[..., Drafter], make_levers: MakeLevers, plain: Callable[..., Generated],
    speculates: bool,
) -> None:  # fmt: skip
    told = Told(DflashProposer(tiny_drafter("dense"), make_levers(), SIZES), plain("dense").tokens, (1, 4, 0, 2))
    decoder_of(tiny("dense"), told, speculates).run(PROMPTS, NEW)
    seen: dict[int, list[tuple[int, int]]] = {}
    for rows in told.commits:
        ids = iter(rows.next_ids)
        for sequence, count, start in zip(rows.sequences, rows.counts, rows.starts, strict=True):
            seen.setdefault(told.starts[sequence.slot], []).extend((start + at, next(ids)) for at in range(count))
    for prompt, found in seen.items():
        text = [*PROMPTS[prompt], *plain("dense").tokens[prompt]]
        assert found == [(at, text[at + 1]) for at in range(len(text) - 1)]


@pytest.mark.parametrize(("commits", "known"), [(True, 5), (False, 0)])
def test_commit_lever_closes_the_drafters_context(
    tiny: Make, tiny_drafter: Callable[..., Drafter], make_levers: MakeLevers, commits: bool, known: int
) -> None:
    proposer = DflashProposer(tiny_drafter("dense"), make_levers(DFLASH_COMMIT_CTX=commits), SIZES)
    model, state = tiny("dense"), tiny("dense").new_state(SIZES)
    sequence = state.open()
    proposer.open(sequence)
    (done,) = model.prefill(state, [sequence], PROMPTS[:1], proposer.reads)
    proposer.commit(Committed([sequence], [5], [0], done.hidden, done.features, [2, 3, 4, 5, 6], True))
    assert proposer.committed(sequence) == known


def context_after(
    model: Model, drafter: Drafter, levers: Levers, ids: list[int], cuts: Sequence[int], last: int
) -> tuple[Any, Any]:  # fmt: skip
    """Commit a text in pieces; return the block's hidden rows and its drafts."""
    proposer, state = DflashProposer(drafter, levers, SIZES), model.new_state(SIZES)
    sequence = state.open()
    proposer.open(sequence)
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        (done,) = model.prefill(state, [sequence], [ids[start:stop]], proposer.reads)
        rows = [0] * (stop - start)
        proposer.commit(Committed([sequence], [stop - start], [start], done.hidden, done.features, rows, start == 0))
    batch = proposer._block([proposer._caches[sequence.slot]], [sequence], [last])
    return drafter.forward(batch, proposer._state), proposer.propose([sequence], [last])


@pytest.mark.parametrize("length", [3, 7, 8, 9, 13, 21])
def test_drafter_matches_the_float64_reference_inside_and_beyond_its_window(
    tiny: Make, tiny_drafter: Callable[..., Drafter], make_levers: MakeLevers, reference: ModuleType,
    tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights, drafter_weights: SyntheticWeights, length: int,
) -> None:  # fmt: skip
    ids = [(7 * at + 3) % 95 for at in range(length)]

    def block(jitter: Any = None) -> Any:
        target = reference.Reference(tiny_dims["dense"], tiny_weights, jitter)
        return reference.DrafterReference(tiny_dims["drafter"], drafter_weights, jitter).block_logits(target, ids, 11)

    exact = block()
    errors = np.abs(np.array([block(np.random.default_rng(run)) for run in range(8)]) - exact)
    drafter = tiny_drafter("dense")
    hidden, drafts = context_after(tiny("dense"), drafter, make_levers(), ids, [2], 11)
    logits = drafter.lm_head.forward(hidden[1:]).astype(np.float64)
    assert np.abs(logits - exact).max() <= 1.5 * errors.max()
    assert drafts.tolist() == [np.argmax(logits, axis=1).tolist()]


@pytest.mark.parametrize("cuts", [(1,), (4, 8), (3, 9, 10), (12,)])
def test_drafters_ring_does_not_depend_on_how_a_text_was_committed(
    tiny: Make, tiny_drafter: Callable[..., Drafter], make_levers: MakeLevers, cuts: tuple[int, ...]
) -> None:
    ids = [(5 * at + 1) % 95 for at in range(14)]
    once = context_after(tiny("dense"), tiny_drafter("dense"), make_levers(), ids, [], 3)
    pieces = context_after(tiny("dense"), tiny_drafter("dense"), make_levers(), ids, cuts, 3)
    # Sums over the context run in the ring's order, which differs: FP32 additions before one rounding to BF16.
    assert np.abs(once[0].astype(np.float64) - pieces[0].astype(np.float64)).max() <= 2.0**-4


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_mtp_drafts_match_the_float64_reference(
    tiny: Make, make_levers: MakeLevers, reference: ModuleType, tiny_dims: dict[str, ModelDims],
    tiny_weights: SyntheticWeights, kind: str,
) -> None:  # fmt: skip
    ids, model = [1, 2, 3, 4, 5, 60, 70, 8], tiny(kind)
    state, proposer = model.new_state(SIZES), MtpProposer(model, make_levers(), 4, SIZES)
    sequence = state.open()
    proposer.open(sequence)
    (done,) = model.prefill(state, [sequence], [ids[:-1]])
    proposer.commit(Committed([sequence], [7], [0], done.hidden, None, ids[1:], True))
    drafts = proposer.propose([sequence], [8])[0]
    seen = np.array([logits[0].astype(np.float64) for logits in proposer._steps[1].logits])
    assert drafts.tolist() == np.argmax(seen, axis=1).tolist()

    def drafted(jitter: Any = None) -> Any:
        return reference.Reference(tiny_dims[kind], tiny_weights, jitter).mtp_logits(ids, drafts[:-1])[-4:]

    exact = drafted()
    noisy = np.array([drafted(np.random.default_rng(seed)) for seed in range(8)])
    assert np.abs(seen - exact).max() <= 1.5 * np.abs(noisy - exact).max()


def test_mtp_prefill_lever_decides_what_its_cache_holds(tiny: Make, make_levers: MakeLevers) -> None:
    model, drafts = tiny("dense", 2), []
    for reads in (True, False):
        state, proposer = model.new_state(SIZES), MtpProposer(model, make_levers(MTP_PREFILL=reads), 2, SIZES)
        sequence = state.open()
        proposer.open(sequence)
        for start in range(0, 6, 2):
            (done,) = model.prefill(state, [sequence], [[1, 2]])
            proposer.commit(Committed([sequence], [2], [start], done.hidden, None, [2, 1], True))
        assert proposer._drafts[sequence.slot].cache.length == (6 if reads else 1)
        drafts.append(proposer._drafts[sequence.slot].last.tobytes())
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize(("cost", "forced", "stops"), [(50.0, False, True), (50.0, True, False), (None, False, False)])
def test_gate_ends_drafting_that_does_not_pay_unless_it_is_forced(
    tiny: Make, make_levers: MakeLevers, cost: float | None, forced: bool, stops: bool
) -> None:
    gate = Gate.of(make_levers(MTP_GATE_FORCE=forced), "cpu", cost)
    got = run(tiny("dense"), MtpProposer(tiny("dense"), make_levers(), 1, SIZES), gate)
    assert (got.plain_steps > 0) is stops
    assert got.verify_steps >= 16


@pytest.mark.parametrize("name", ["cpu", "sm_90a"])
def test_gate_takes_the_architecture_of_a_boots_target(make_levers: MakeLevers, name: str) -> None:
    target, _ = resolve_target(name)
    assert target is not None
    assert Gate.of(make_levers(), target.arch, 2.0).arch == name


@pytest.mark.parametrize(("steps", "accepted", "cost", "forced", "pays"), [
    (0, 0, 9.0, False, True), (15, 0, 9.0, False, True), (16, 0, 1.01, False, False), (16, 16, 1.9, False, True),
    (16, 16, 2.0, False, False), (100, 0, 9.0, True, True), (16, 0, 0.9, False, True),
])  # fmt: skip
def test_speculation_pays_where_a_step_gives_more_than_it_costs(
    steps: int, accepted: int, cost: float, forced: bool, pays: bool
) -> None:
    assert speculation_pays(steps, accepted, cost, "cpu", forced) is pays


def test_speculation_without_its_parts_is_refused(
    tiny: Make, tiny_drafter: Callable[..., Drafter], make_levers: MakeLevers, tiny_dims: dict[str, ModelDims]
) -> None:
    model, levers = tiny("dense"), make_levers()
    with pytest.raises(UsageError, match="tiny has no MTP head"):
        MtpProposer(tiny("alone"), levers, 2, SIZES)
    with pytest.raises(UsageError, match="drafts is 0, expected at least 1"):
        MtpProposer(model, levers, 0, SIZES)
    with pytest.raises(UsageError, match="0 new tokens"):
        GreedyDecoder(model, model.new_state(SIZES)).run(PROMPTS, 0)
    with pytest.raises(UsageError, match="expected none below 0"):
        speculation_pays(1, 1, 0.0, "cpu")
    state, proposer = model.new_state(SIZES), MtpProposer(model, levers, 2, SIZES)
    sequence = state.open()
    proposer.open(sequence)
    with pytest.raises(UsageError, match="behind a committed row"):
        proposer.propose([sequence], [1])
    dflash = DflashProposer(tiny_drafter("dense"), levers, SIZES)
    with pytest.raises(UsageError, match="the pass kept none"):
        dflash.commit(Committed([sequence], [1], [0], None, None, [1]))
    with pytest.raises(UsageError, match="tiny is no drafter"):
        drafter_from_dims(tiny_dims["dense"], None, None)  # type: ignore[arg-type]


GOOD = np.ones((3, 2), np.int32)


@pytest.mark.parametrize(("given", "said"), [
    (None, "propose returned NoneType, expected a NumPy array of integers (3, 2): a row for each sequence, a token"),
    (GOOD.tolist(), "propose returned list, expected"), ((), "propose returned tuple, expected"),
    (GOOD[:2], "propose returned int32 (2, 2), expected a NumPy array of integers (3, 2)"),
    (GOOD[:, :1], "propose returned int32 (3, 1), expected"), (GOOD[:0], "propose returned int32 (0, 2), expected"),
    (np.ones((3, 3), np.int32), "propose returned int32 (3, 3), expected"),
    (GOOD[0], "propose returned int32 (2,), expected"), (np.int32(1), "propose returned int32, expected"),
    (GOOD.astype(np.float32), "propose returned float32 (3, 2), expected"),
    (GOOD.astype(bool), "propose returned bool (3, 2), expected"),
    (GOOD * -1, "propose returned token -1, expected 0 to 95"), (GOOD * 96, "propose returned token 96, expected 0"),
    (GOOD.astype(np.int64) << 32, "propose returned token 4294967296, expected 0"),
])  # fmt: skip
def test_proposal_that_is_no_row_of_tokens_for_each_sequence_is_refused(
    tiny: Make, make_levers: MakeLevers, plain: Callable[..., Generated], monkeypatch: pytest.MonkeyPatch, given: Any,
    said: str,
) -> None:  # fmt: skip
    model, proposer = tiny("dense"), MtpProposer(tiny("dense"), make_levers(), 2, SIZES)
    assert model.dims.vocab == 96
    decoder = decoder_of(model, proposer)
    with monkeypatch.context() as patch:
        patch.setattr(proposer, "propose", lambda sequences, last_ids: given)
        with pytest.raises(UsageError) as caught:
            decoder.run(PROMPTS, NEW)
    assert str(caught.value).startswith(f"proposer MtpProposer: {said}")
    assert_same_tokens(decoder.run(PROMPTS, NEW), plain("dense"), exact=False)  # no state of the refused run is left


@pytest.mark.parametrize(("name", "value", "said"), [
    ("drafts", 0, "drafts is 0, expected an integer of at least 1"), ("drafts", None, "drafts is None, expected"),
    ("drafts", True, "drafts is True, expected"), ("drafts", 2.0, "drafts is 2.0, expected"),
    ("reads", None, "reads is None, expected a tuple of layers"), ("reads", ("0",), "reads is ('0',), expected"),
])  # fmt: skip
def test_proposer_that_does_not_keep_the_protocol_is_refused_before_the_first_pass(
    tiny: Make, make_levers: MakeLevers, name: str, value: Any, said: str
) -> None:
    proposer = MtpProposer(tiny("dense"), make_levers(), 2, SIZES)
    setattr(proposer, name, value)
    with pytest.raises(UsageError, match=re.escape(f"proposer MtpProposer: {said}")):
        run(tiny("dense"), proposer)
    assert len(proposer._state._free_slots) == SIZES.sequences


def test_object_that_is_no_proposer_is_refused(tiny: Make) -> None:
    with pytest.raises(UsageError, match="proposer object has no method open, close, commit, propose"):
        run(tiny("dense"), object())


def test_recorded_proposal_wants_a_row_of_each_of_its_sequences(tiny: Make) -> None:
    model = tiny("dense")
    assert model.mtp is not None
    steps = DraftSteps(model, ModelState(model.mtp.dims, SIZES, model.memory.zeros), 2, 2, 4)
    said = "2 caches, 2 positions and 1 rows for a proposal that is recorded for 2 sequences"
    with pytest.raises(UsageError, match=said):
        steps.run([None, None], [0, 0], [None])  # type: ignore[list-item]


@pytest.mark.parametrize("fails", ["open", "commit", "propose"])
def test_failed_run_closes_its_sequences_and_those_of_its_proposer(
    tiny: Make, make_levers: MakeLevers, plain: Callable[..., Generated], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    model, proposer = tiny("dense"), MtpProposer(tiny("dense"), make_levers(), 2, SIZES)
    decoder, calls = decoder_of(model, proposer), iter(range(100))
    right = getattr(proposer, fails)

    def wrong(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise UsageError("in the middle")
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(proposer, fails, wrong)
        with pytest.raises(UsageError, match="in the middle"):
            decoder.run(PROMPTS, NEW)
    for state in (decoder.state, proposer._state):
        assert sorted(state._free_slots) == list(range(SIZES.sequences))
        assert sorted(state._free_pages) == list(range(SIZES.pages))
    assert_same_tokens(decoder.run(PROMPTS, NEW), plain("dense"), exact=False)


@pytest.mark.parametrize(("prompts", "new_tokens", "pages"), [
    ([PROMPTS[0]], 8, 3), ([PROMPTS[0]], 4, 2), (PROMPTS, 12, 11), (PROMPTS[1:], 3, 2),
])  # fmt: skip
@pytest.mark.parametrize("pattern", [(0,), (3,), (3, 0)])
def test_drafting_needs_no_more_room_than_plain_decode(
    tiny: Make, make_levers: MakeLevers, plain: Callable[..., Generated], prompts: list[list[int]], new_tokens: int,
    pages: int, pattern: tuple[int, ...],
) -> None:  # fmt: skip
    model, sizes = tiny("dense"), StateSizes(len(prompts), pages, 4)
    longest = max(-(-(len(prompt) + new_tokens - 1) // 4) * 4 for prompt in prompts)
    with pytest.raises(UsageError, match=rf"{pages} pages? of 4 tokens wanted, {pages - 1} free"):
        GreedyDecoder(model, model.new_state(StateSizes(len(prompts), pages - 1, 4))).run(prompts, new_tokens)
    expected = [tokens[:new_tokens] for tokens, prompt in zip(plain("dense").tokens, PROMPTS, strict=True)
                if prompt in prompts]  # fmt: skip
    said = plain("dense").tokens[-len(prompts) :] if prompts != PROMPTS[:1] else plain("dense").tokens[:1]
    with DecodeEngine(model, sizes, longest) as engine:
        told = Told(MtpProposer(model, make_levers(), 3, sizes), said, pattern, prompts)
        got = engine.generate(prompts, new_tokens, proposer=told)
    assert got.tokens == expected
    assert got.plain_steps > 0
