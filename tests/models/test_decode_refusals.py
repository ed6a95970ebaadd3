"""The decode engine on the host: invalid arguments, and those without room, are refused before a pass."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from engines import PROMPTS, SIZES, Make
from kernel_muster.models.decode import DecodeEngine, Sampling
from kernel_muster.models.decode.generate import GreedyDecoder
from kernel_muster.models.decode.prefill import Prefill
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.proposers.mtp import MtpProposer
from kernel_muster.registry.errors import ScratchError, UsageError


def with_context(model: Model, context: int) -> Model:
    """Return a model whose sequences end there."""
    parts = {one.name: getattr(model, one.name) for one in fields(model)}
    return Model(**parts | {"dims": replace(model.dims, context=context)})


@pytest.mark.parametrize("wrong", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 1e39},
    {"temperature": 1e-50}, {"temperature": "1"}, {"top_k": -1}, {"top_k": 2**31}, {"top_k": 1.5}, {"top_k": True},
    {"top_p": 0.0}, {"top_p": 1e-50}, {"top_p": 1.1}, {"top_p": None}, {"seed": -1}, {"seed": 0.5},
])  # fmt: skip
def test_sampling_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected a temperature from 0 on"):
        Sampling(**wrong)


def test_step_after_a_change_of_sequences_needs_their_tokens(engine_of: Any) -> None:
    engine = engine_of("dense")
    one, two = engine.state.open(), engine.state.open()
    engine.enqueue([one, two], [1, 2])
    engine.enqueue([one, two])
    with pytest.raises(UsageError, match="other sequences than in the last step"):
        engine.enqueue([two, one])
    with pytest.raises(UsageError, match="other sequences than in the last step"):
        engine.enqueue([one])
    assert (one.length, two.length) == (2, 2)
    assert [len(engine.tokens()) for _ in range(2)] == [2, 2]


def test_limits_raise_and_never_clamp(engine_of: Any) -> None:
    engine = engine_of("dense", StateSizes(2, 4, 4), 8)
    with pytest.raises(UsageError, match="3 sequences: this engine has room for 2"):
        engine.captured_step(3)
    with pytest.raises(UsageError, match="grows to 12 tokens that are read, steps are recorded for 8"):
        engine.generate([[1, 2, 3, 4, 5]], 8)
    assert len(engine.state._free_pages) == 4
    with pytest.raises(UsageError, match=r"6 pages of 4 tokens wanted, 4 free \(of 4\)"):
        engine.generate([[1] * 8, [2] * 8], 4)
    with pytest.raises(UsageError, match="expected at least 1"):
        engine.generate(PROMPTS[:1], 0)
    engine.close()
    with pytest.raises(UsageError, match="closed"):
        engine.generate(PROMPTS[:1], 1)


def test_scratch_that_is_too_small_is_refused_while_recording(tiny: Make) -> None:
    with pytest.raises(ScratchError), DecodeEngine(tiny("dense", max_rows=2), StateSizes(4, 64, 4), 64) as engine:
        engine.captured_step(4)


def test_recorded_prefill_refuses_what_it_has_no_pages_for(tiny: Make) -> None:
    state = tiny("dense").new_state(SIZES)
    prefill = Prefill(tiny("dense"), state, 2)
    with pytest.raises(UsageError, match="a prompt needs 3 pages, passes have 2"):
        list(prefill(state, [state.open()], [[1] * 9]))
    with pytest.raises(UsageError, match="a prompt is empty"):
        list(prefill(state, [state.open()], [[]]))
    with pytest.raises(UsageError, match="recorded for"):
        list(prefill(tiny("dense").new_state(SIZES), [state.open()], [[1]]))


def test_run_that_cannot_end_is_refused_before_its_first_pass(engine_of: Any) -> None:
    engine = engine_of("dense", StateSizes(2, 4, 4), 12)
    mixer = engine.model.layers[1].mixer
    taken = dict(mixer.used)
    for prompts, new_tokens, why in (
        ([[1, 2, 3], [4]], 8, r"5 pages of 4 tokens wanted, 4 free \(of 4\)"),
        ([[1, 2, 3, 4]], 10, "grows to 13 tokens that are read, steps are recorded for 12"),
        ([[1], [2], [3]], 1, r"3 sequences, 2 slots free \(of 2\)"),
    ):
        with pytest.raises(UsageError, match=why):
            engine.generate(prompts, new_tokens)
    assert mixer.used == taken
    assert len(engine.generate([[1, 2, 3, 4]], 9).tokens[0]) == 9


def test_steps_ahead_of_their_tokens_are_bounded(engine_of: Any) -> None:
    engine = engine_of("dense")
    one = engine.state.open()
    engine.enqueue([one], [1])
    engine.enqueue([one])
    engine.enqueue([one])
    with pytest.raises(UsageError, match="3 steps were enqueued whose tokens nobody has taken"):
        engine.enqueue([one])
    assert one.length == 3


@pytest.mark.parametrize("ids", [[1], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_step_has_one_id_and_one_random_number_for_each_sequence(engine_of: Any, ids: list[int]) -> None:
    engine = engine_of("dense")
    live, how = [engine.state.open(), engine.state.open()], Sampling(1.0)
    with pytest.raises(UsageError, match=f"{len(ids)} ids for 2 sequences"):
        engine.enqueue(live, ids)
    with pytest.raises(UsageError, match=f"{len(ids)} ids for 2 sequences"):
        engine.decode(engine.state, live, ids)
    with pytest.raises(UsageError, match=f"rows of {len(ids)} sequences for 2"):
        engine.verify(engine.state, live, [[token] for token in ids])
    with pytest.raises(UsageError, match=f"{len(ids)} random numbers for 2 sequences"):
        engine.enqueue(live, [1, 2], how, [0.5] * len(ids))
    assert [one.length for one in live] == [0, 0]
    assert engine.buffers.pending == 0


def test_engine_takes_sequences_of_its_own_state_alone(tiny: Make, engine_of: Any) -> None:
    engine, other = engine_of("dense"), tiny("dense").new_state(SIZES)
    closed, foreign = engine.state.open(), other.open()
    engine.state.close(closed)
    for wrong in (closed, foreign):
        with pytest.raises(UsageError, match="closed, or of another state"):
            engine.enqueue([wrong], [1])
    one = engine.state.open()
    with pytest.raises(UsageError, match="a sequence stands twice"):
        engine.enqueue([one, one], [1, 2])
    with pytest.raises(UsageError, match="this engine's own"):
        engine.decode(other, [foreign], [1])
    with pytest.raises(UsageError, match="this engine's own"):
        engine.verify(other, [foreign], [[1, 2]])


BAD_TOKENS = [-1, 96, 2**31, 2**63, 1.0, "1", True, None]


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_token_that_is_not_in_the_vocabulary_reaches_no_pass(engine_of: Any, token: Any) -> None:
    engine = engine_of("dense")
    one, taken = engine.state.open(), dict(engine.model.layers[1].mixer.used)
    model, state = engine.model, engine.state
    for wrong in (
        lambda: engine.generate([[1], [2, token]], 1),
        lambda: engine.enqueue([one], [token]),
        lambda: engine.decode(state, [one], [token]),
        lambda: engine.verify(state, [one], [[1, token]]),
        lambda: list(model.prefill(state, [one], [[1, token]])),
        lambda: model.decode(state, [one], [token]),
        lambda: model.verify(state, [one], [[1, token]]),
    ):
        with pytest.raises(UsageError, match="expected an integer from 0 to 95"):
            wrong()
    assert (one.length, one.pages, engine.buffers.pending) == (0, [], 0)
    assert model.layers[1].mixer.used == taken


def test_nothing_to_do_is_refused(tiny: Make, engine_of: Any) -> None:
    engine = engine_of("dense")
    model, state, one = engine.model, engine.state, engine.state.open()
    with pytest.raises(UsageError, match="no prompts"):
        engine.generate([], 3)
    with pytest.raises(UsageError, match="a prompt is empty"):
        engine.generate([[1], []], 3)
    with pytest.raises(UsageError, match=r"1\.5 new tokens"):
        engine.generate([[1]], 1.5)
    with pytest.raises(UsageError, match="no prompts"):
        GreedyDecoder(model, state).run([], 3)
    for rows in ([[]], []):
        live = [one][: len(rows)]
        for verify in (engine.verify, model.verify):
            with pytest.raises(UsageError, match="expected at least one sequence, and one row of each"):
                verify(state, live, rows)
    with pytest.raises(UsageError, match="expected at least one sequence"):
        model.decode(state, [], [])
    with pytest.raises(UsageError, match="0 rows"):
        engine.enqueue([], [])
    assert engine.generate([np.array([1, 2, 3])], 3).tokens == engine.generate([[1, 2, 3]], 3).tokens


@pytest.mark.parametrize("max_context", [0, -5, 1.5])
def test_context_of_no_token_is_refused(tiny: Make, max_context: Any) -> None:
    with pytest.raises(UsageError, match=f"max_context is {max_context}, expected at least 1"):
        DecodeEngine(tiny("dense"), SIZES, max_context)


def test_engine_waits_for_the_choice_of_rows_of_a_verify_pass(engine_of: Any) -> None:
    engine = engine_of("dense")
    one = engine.state.open()
    done = engine.verify(engine.state, [one], [[2, 3]])
    for run in (
        lambda: engine.decode(engine.state, [one], [4]),
        lambda: engine.enqueue([one], [4]),
        lambda: engine.verify(engine.state, [one], [[4, 5]]),
    ):
        with pytest.raises(UsageError, match="say with roll_back which of its rows stay"):
            run()
    engine.state.roll_back([one], done.batch, [1])
    engine.decode(engine.state, [one], [4])
    assert one.length == 2


@pytest.mark.parametrize("prompt", [5, None, {1: 2}, {1, 2}, iter([1])])
def test_prompt_that_is_no_sequence_is_refused(engine_of: Any, prompt: Any) -> None:
    with pytest.raises(UsageError, match=r"a prompt is .*, expected a sequence of tokens"):
        engine_of("dense").generate([[1], prompt], 1)


@pytest.mark.parametrize("number", [1.0, -0.1, 2, 10**400, math.nan, 1 - 1e-12, "0.5", None, True])
def test_random_number_that_is_none_reaches_no_kernel(engine_of: Any, number: Any) -> None:
    engine = engine_of("dense")
    one = engine.state.open()
    with pytest.raises(UsageError, match=r"at place 0: expected FP32 from 0 on and below 1"):
        engine.enqueue([one], [1], Sampling(1.0), [number])
    assert (one.length, one.pages, engine.buffers.pending) == (0, [], 0)
    engine.enqueue([one], [1], Sampling(1.0), [0.999999])
    assert engine.tokens()


def test_pass_that_does_not_fit_into_memory_says_so(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("dense")

    def full(*arguments: Any) -> Any:
        raise MemoryError("no room for scratch")

    monkeypatch.setattr(engine, "_prefill", full)
    with pytest.raises(UsageError, match=r"a pass does not fit into memory .*no room for scratch"):
        engine.generate([[1, 2]], 1)


def test_step_after_a_verify_pass_needs_its_tokens(engine_of: Any) -> None:
    engine = engine_of("dense")
    one = engine.state.open()
    engine.enqueue([one], [1])
    engine.tokens()
    done = engine.verify(engine.state, [one], [[2, 3]])
    engine.state.roll_back([one], done.batch, [2])
    with pytest.raises(UsageError, match="say which tokens they read"):
        engine.enqueue([one])
    assert one.length == 3


def test_sequence_that_leaves_the_context_is_refused_before_its_first_pass(tiny: Make) -> None:
    model = with_context(tiny("dense"), 12)
    with DecodeEngine(model, SIZES, 64) as engine:
        said = "a sequence grows to 13 tokens that are read, tiny has a context_length of 12"
        with pytest.raises(UsageError, match=said):
            engine.generate([[1, 2, 3, 4]], 10)
        with pytest.raises(UsageError, match=said):
            GreedyDecoder(model, engine.state).run([[1, 2, 3, 4]], 10)
        assert len(engine.state._free_pages) == SIZES.pages
        assert [len(row) for row in engine.generate([[1, 2, 3, 4]], 9).tokens] == [9]
        one = engine.state.open()
        engine.enqueue([one], [1])
        one.length = 12
        with pytest.raises(UsageError, match=said):
            engine.enqueue([one], [1])
        with pytest.raises(UsageError, match=said):
            model.verify(engine.state, [one], [[1]])


def test_prompt_that_leaves_the_context_is_refused_before_its_first_pass(tiny: Make) -> None:
    model = with_context(tiny("dense", max_rows=4), 12)
    state = model.new_state(SIZES)
    for prefill in (model.prefill, Prefill(model, state, 64)):
        one = state.open()
        with pytest.raises(UsageError, match="a sequence grows to 13 tokens"):
            next(prefill(state, [one], [[1] * 13]))
        assert one.length == 0
        list(prefill(state, [one], [[1] * 8]))
        with pytest.raises(UsageError, match="a sequence grows to 13 tokens"):
            next(prefill(state, [one], [[1] * 5]))
        list(prefill(state, [one], [[1] * 4]))
        assert one.length == 12


@pytest.mark.parametrize("context", [12, 13, 14, 15, 64])
def test_drafts_that_leave_the_context_are_not_made(tiny: Make, make_levers: Any, context: int) -> None:
    plain = GreedyDecoder(tiny("dense"), tiny("dense").new_state(SIZES)).run([[1, 2, 3, 4]], 9)
    model = with_context(tiny("dense"), context)
    proposer = MtpProposer(model, make_levers(), 2, SIZES)
    found = GreedyDecoder(model, model.new_state(SIZES), proposer).run([[1, 2, 3, 4]], 9)
    assert found.tokens == plain.tokens
    assert found.verify_steps > 0
    assert found.plain_steps > 0 or context > 12
