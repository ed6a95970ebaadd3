"""The decode engine on the host: a recorded step gives the layers' results, for any sequences, in any order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engines import NEW, PROMPTS, SIZES, Make
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.decode import DecodeEngine, Sampling
from kernel_muster.models.decode.floor import reached_share, step_bytes
from kernel_muster.models.decode.generate import Generated, GreedyDecoder
from kernel_muster.models.decode.prefill import Prefill
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.policy.rows import padded_rows
from kernel_muster.models.proposers.mtp import MtpProposer
from kernel_muster.models.reduced import reduced
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.target import CPU_TARGET
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups


def bits(rows: list[Any]) -> bytes:
    return b"".join(row.tobytes() for row in rows)


def plain(model: Model, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW) -> Generated:
    """What the layers give, called one by one."""
    return GreedyDecoder(model, model.new_state(SIZES)).run(prompts, new_tokens)


@pytest.mark.parametrize("kind", ["dense", "moe", "bf16", "alone"])
def test_replayed_steps_give_the_bits_of_the_layers(tiny: Make, engine_of: Any, kind: str) -> None:
    got, expected = engine_of(kind).generate(PROMPTS, NEW, keep_logits=True), plain(tiny(kind))
    assert got.tokens == expected.tokens
    # Three sequences use the captured step of four rows, where tile GEMMs of BF16 weights may round differently.
    if kind != "bf16":
        assert [bits(rows) for rows in got.logits] == [bits(rows) for rows in expected.logits]
    assert got.plain_steps == (NEW - 1) * len(PROMPTS)
    assert len(got.step_s) == NEW - 1


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_sequence_among_others_has_the_bits_of_a_sequence_alone(engine_of: Any, kind: str) -> None:
    engine = engine_of(kind)
    together = engine.generate(PROMPTS, NEW, keep_logits=True)
    for prompt, tokens, logits in zip(PROMPTS, together.tokens, together.logits, strict=True):
        alone = engine.generate([prompt], NEW, keep_logits=True)
        assert alone.tokens == [tokens]
        assert bits(alone.logits[0]) == bits(logits)


def test_engine_serves_one_run_after_another_as_if_it_were_new(tiny: Make, engine_of: Any) -> None:
    engine = engine_of("dense")
    runs = [engine.generate(prompts, NEW).tokens for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:1], PROMPTS)]
    assert runs[0] == runs[3] == plain(tiny("dense")).tokens
    assert runs[1] == runs[0][::-1]
    assert runs[2] == runs[0][:1]
    assert len(engine.state._free_pages) == SIZES.pages
    assert len(engine.state._free_slots) == SIZES.sequences


def test_prompt_longer_than_a_pass_goes_on_from_its_last_row(tiny: Make) -> None:
    model, prompt = tiny("dense", max_rows=4), list(range(1, 12))
    with DecodeEngine(model, SIZES, 64) as engine:
        assert engine.generate([prompt, [5]], 4).tokens == plain(tiny("dense"), [prompt, [5]], 4).tokens


def test_sampled_tokens_follow_the_seed_and_not_the_neighbours(engine_of: Any) -> None:
    engine = engine_of("dense")
    how = Sampling(0.9, 30, 0.95, seed=4)
    first = engine.generate(PROMPTS, NEW, how).tokens
    assert engine.generate(PROMPTS, NEW, how).tokens == first
    assert engine.generate(PROMPTS[:1], NEW, how).tokens == first[:1]
    assert engine.generate(PROMPTS, NEW, Sampling(0.9, 30, 0.95, seed=5)).tokens != first
    assert engine.generate(PROMPTS, NEW, Sampling(0.9, 1)).tokens == engine.generate(PROMPTS, NEW).tokens


@pytest.mark.parametrize(("kind", "drafts"), [("dense", 2), ("moe", 1)])
def test_recorded_verify_passes_give_the_bits_of_plain_decode(
    tiny: Make, engine_of: Any, make_levers: Callable[..., Levers], kind: str, drafts: int
) -> None:
    model, engine = tiny(kind), engine_of(kind)
    proposer = MtpProposer(model, make_levers(), drafts, SIZES)
    mixer = model.layers[1].mixer
    got, expected = engine.generate(PROMPTS[:2], NEW, proposer=proposer, keep_logits=True), plain(model, PROMPTS[:2])
    assert got.tokens == expected.tokens
    assert [bits(rows) for rows in got.logits] == [bits(rows) for rows in expected.logits]
    assert got.verify_steps > 0
    assert len(got.verify_s) == len(got.step_s) == len(got.draft_s)
    # The first run recorded every shape. Now only prompts and drafts go through the layers.
    taken = sum(mixer.used.values())
    again = engine.generate(PROMPTS[:2], NEW, proposer=proposer)
    assert again.tokens == got.tokens
    assert sum(mixer.used.values()) - taken <= 3


@pytest.mark.parametrize(
    "absent", ["gated_delta_rule::gated_delta_rule_verify_n", "causal_conv1d::causal_conv1d_verify_n"]
)
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_drafts_change_no_text_where_rows_are_verified_one_by_one(
    tiny: Make, make_levers: Callable[..., Levers], absent: str, drafts: int
) -> None:
    model = tiny("dense", without=(absent,))
    with DecodeEngine(model, SIZES, 64) as engine:
        proposer = MtpProposer(model, make_levers(), drafts, SIZES)
        for _ in range(2):
            got = engine.generate(PROMPTS[:2], NEW, proposer=proposer)
            assert got.tokens == plain(model, PROMPTS[:2]).tokens
            assert got.verify_steps > 0


def test_speculation_is_greedy(tiny: Make, engine_of: Any, make_levers: Callable[..., Levers]) -> None:
    model, engine = tiny("dense"), engine_of("dense")
    proposer = MtpProposer(model, make_levers(), 2, SIZES)
    with pytest.raises(UsageError, match="greedy choice only"):
        engine.generate(PROMPTS, NEW, Sampling(1.0), proposer=proposer)


def test_each_rung_is_recorded_once_and_looks_nothing_up(
    catalog: Catalog, make_levers: Callable[..., Levers], tiny_dims: dict[str, ModelDims], tiny_weights: Any
) -> None:
    session = LookupSession(catalog, CPU_TARGET, make_levers())
    model = build_from_dims(tiny_dims["dense"], Lookups(session), tiny_weights, 64)
    session.seal("raise", lambda text: None)
    with DecodeEngine(model, SIZES, 64) as engine:
        engine.prepare([1, 3, 4])
        steps = {count: engine.captured_step(count) for count in (1, 3, 4)}
        mixer = model.layers[1].mixer
        taken = dict(mixer.used)
        engine.generate(PROMPTS, NEW)
        assert {count: engine.captured_step(count) for count in (1, 3, 4)} == steps
        assert steps[3] is steps[4]
        assert steps[1].rows == 1
        assert padded_rows(3) == 4
        # Only the prompts' pass goes through the layers. Steps are replays.
        assert sum(mixer.used.values()) - sum(taken.values()) <= 3
    assert session.entries("late") == ()


def test_recording_touches_no_state(tiny: Make) -> None:
    with DecodeEngine(tiny("dense"), SIZES, 64) as engine:
        engine.prepare([1, 4])
        arrays = [a for cache in engine.state.kv.values() for a in (cache.k, cache.v)]
        arrays += [a for pool in engine.state.recurrent.values() for a in (pool.conv, pool.ssm)]
        assert not any(array.astype(np.float32).any() for array in arrays)


def test_reduced_models_have_every_kind_of_layer_and_compute(
    catalog: Catalog, make_levers: Callable[..., Levers], tiny_dims: dict[str, ModelDims], tiny_weights: Any
) -> None:
    for kind in ("dense", "moe"):
        dims = reduced(tiny_dims[kind])
        assert set(dims.layer_kinds) == {"gdn", "attn"}
        assert dims.problems() == []
        model = build_from_dims(dims, Lookups(LookupSession(catalog, CPU_TARGET, make_levers())), tiny_weights, 64)
        with DecodeEngine(model, SIZES, 64) as engine:
            found = engine.generate(PROMPTS, 3, keep_logits=True)
        assert all(np.isfinite(row.astype(np.float32)).all() for rows in found.logits for row in rows)


def test_byte_floor_counts_every_weight_once(tiny: Make) -> None:
    model = tiny("moe")
    moe = model.dims.moe
    assert moe is not None
    one, two = step_bytes(model, 1, 10), step_bytes(model, 2, 10)
    assert one.weights == two.weights
    experts = sum(w.spec.size_bytes for w in model.weights if len(w.spec.shape) == 3 and "mtp" not in w.spec.name)
    assert one.experts == pytest.approx(experts * moe.top_k / moe.experts, rel=1e-3)
    assert two.experts == pytest.approx(experts * (1 - (1 - moe.top_k / moe.experts) ** 2), rel=1e-3)
    assert reached_share(moe, 10_000) == pytest.approx(1)
    # Two attention layers of 2 heads x 16, keys and values. Two GDN layers of 4 heads x 16 x 16 and 3 taps.
    assert one.cache == 10 * 2 * 2 * 2 * 16 * 2
    assert one.states == 2 * (4 * 4 * 16 * 16 + 2 * 3 * (2 * 2 * 16 + 4 * 16))
    assert one.total == one.weights + one.experts + one.states + one.cache
    names = {w.spec.name for w in model.weights}
    assert {"lm_head.weight", "layers.0.gdn.qkvz_proj", "layers.1.attn.o_proj"} <= names


def test_rung_recorded_between_two_steps_touches_no_sequence(engine_of: Any) -> None:
    def tokens(records: bool) -> list[list[int]]:
        engine = engine_of("dense")
        live = [engine.state.open() for _ in PROMPTS]
        engine.enqueue(live, [1, 2, 3])
        found = [engine.tokens()]
        if records:
            engine.prepare([1, 2])
        for _ in range(4):
            engine.enqueue(live, found[-1])
            found.append(engine.tokens())
        return found

    assert tokens(True) == tokens(False)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("lengths", [(5, 2, 1), (16,), (17, 30), (40, 1, 20)])
def test_recorded_prefill_gives_what_the_layers_give(tiny: Make, kind: str, lengths: tuple[int, ...]) -> None:
    model = tiny(kind)
    prompts = [[(11 * row + at) % 96 for at in range(count)] for row, count in enumerate(lengths)]

    def run(recorded: bool) -> tuple[list[Any], list[Any]]:
        state = model.new_state(SIZES)
        prefill = Prefill(model, state, 16) if recorded else model.prefill
        live = [state.open() for _ in prompts]
        logits: dict[int, Any] = {}
        for done in prefill(state, live, prompts):
            for slot, row in zip(done.batch.state_slots.tolist(), done.logits, strict=True):
                logits[slot] = row.astype(np.float32)
        states = [pool.ssm.copy() for pool in state.recurrent.values()]
        assert [one.length for one in live] == [len(prompt) for prompt in prompts]
        return [logits[one.slot] for one in live], states

    (logits, states), (expected, expected_states) = run(True), run(False)
    for got, other in zip([*logits, *states], [*expected, *expected_states], strict=True):
        # Padded passes may take another arm: sums in another order before each rounding to BF16.
        assert np.linalg.norm(got - other) <= 0.03 * np.linalg.norm(other)


def test_recorded_prefill_knows_the_prompts_it_has_room_for(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny("dense"), []
    run = type(model).run

    def spied(self: Any, batch: Any, *more: Any) -> Any:
        seen.append((batch.prompts, batch.sequences))
        return run(self, batch, *more)

    monkeypatch.setattr(type(model), "run", spied)
    for prefill in (Prefill, lambda model, state, pages: model.prefill):
        state = model.new_state(SIZES)
        list(prefill(model, state, 16)(state, [state.open() for _ in range(3)], [[1, 2], [3], [4]]))
    assert seen == [(4, 5), (3, 3)]


def test_tokens_that_nobody_has_taken_reach_no_later_run(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("dense")
    expected = engine.generate(PROMPTS, NEW).tokens
    one = engine.state.open()
    engine.enqueue([one], [3])
    assert engine.generate(PROMPTS, NEW).tokens == expected
    with pytest.raises(UsageError, match="no step whose tokens"):
        engine.tokens()
    reserve, calls = engine.state.reserve, iter(range(100))

    def fails(*arguments: Any) -> None:
        if next(calls) == 3:
            raise UsageError("no page")
        reserve(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.state, "reserve", fails)
        with pytest.raises(UsageError, match="no page"):
            engine.generate(PROMPTS, NEW)
    with pytest.raises(UsageError, match="no step whose tokens"):
        engine.tokens()
    engine.enqueue([one], [3])
    with pytest.raises(UsageError, match="nobody has taken"):
        engine.decode(engine.state, [one], [4])


def test_step_that_is_refused_leaves_the_next_one_its_token(engine_of: Any) -> None:
    engine = engine_of("dense", StateSizes(2, 4, 4), 4)
    one, full = engine.state.open(), engine.state.open()
    engine.enqueue([one], [1])
    engine.tokens()
    for token in range(4):
        engine.enqueue([full], [token])
        engine.tokens()
    engine.enqueue([one], [1])
    (token,) = engine.tokens()
    with pytest.raises(UsageError, match="a sequence needs 2 pages, a step is recorded for 1"):
        engine.enqueue([full], [50])
    assert len(full.pages) == 1
    engine.enqueue([one])
    got = engine.tokens()
    again = engine.state
    again.close(full)
    other = again.open()
    for known in (1, 1, token):
        engine.enqueue([other], [known])
        last = engine.tokens()
    assert got == last
