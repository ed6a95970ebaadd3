"""Whole models at reduced size against the float64 reference, and the identities that passes promise one another."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.models.dims import ModelDims, RopeDims
from kernel_muster.models.layers.rotary import Rotary
from kernel_muster.models.memory.state import ModelState, StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.weights.source import SyntheticWeights
from kernel_muster.registry.errors import NullKernelError, UsageError

Make = Callable[..., Model]
IDS = [1, 2, 3, 4, 5, 60, 70, 8, 9, 10]
SIZES = StateSizes(4, 40, 4)
RUNS = 12
KINDS = ["dense", "moe", "bf16", "alone"]


class Spread:
    """The exact logits, and how far roundings to BF16 may move them.

    The reference runs ``RUNS`` times with every BF16 rounding moved at random by up to its whole bound, 2^-8. One run
    of the layers is one more such run, with roundings of at most half a unit in the last place, so at most 2^-8 each
    and smaller on average: its root mean square error stays below the largest of the runs', its largest error below
    1.5 times theirs (the tail of twelve runs of a thousand values).
    """

    def __init__(self, reference: ModuleType, dims: ModelDims, source: Any, call: Callable[[Any], Any]) -> None:
        self.exact = call(reference.Reference(dims, source))
        noisy = [call(reference.Reference(dims, source, np.random.default_rng(run))) for run in range(RUNS)]
        errors = np.abs(np.array(noisy) - self.exact)
        self.mean = float(np.sqrt((errors**2).mean(axis=tuple(range(1, errors.ndim)))).max())
        self.most = 1.5 * float(errors.max())

    def assert_close(self, got: Any, rows: Any = slice(None)) -> None:
        error = np.asarray(got).astype(np.float64) - self.exact[rows]
        assert np.sqrt((error**2).mean()) <= self.mean
        assert np.abs(error).max() <= self.most

    def is_close(self, got: Any) -> bool:
        error = np.asarray(got).astype(np.float64) - self.exact
        return bool(np.sqrt((error**2).mean()) <= self.mean and np.abs(error).max() <= self.most)


@pytest.fixture(scope="module")
def spread(
    reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights
) -> Callable[[str], Spread]:
    found: dict[str, Spread] = {}

    def make(kind: str) -> Spread:
        if kind not in found:
            found[kind] = Spread(reference, tiny_dims[kind], tiny_weights, lambda model: model.logits(IDS))
        return found[kind]

    return make


def all_logits(model: Model, ids: list[int], phase: Any = "prefill", state: ModelState | None = None) -> Any:
    state = state or model.new_state(SIZES)
    batch = state.batch([state.open()], [ids], phase)
    return model.lm_head.forward(model.run(batch, state).hidden)


def decoded(model: Model, prompts: list[list[int]]) -> Any:
    """Return the logits of every token of equally long prompts, all of them decoded one by one."""
    state = model.new_state(SIZES)
    sequences = [state.open() for _ in prompts]
    steps = [model.decode(state, sequences, list(ids)).logits for ids in zip(*prompts, strict=True)]
    return np.stack(steps, axis=1), state


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_logits_match_the_float64_reference(tiny: Make, spread: Callable[[str], Spread], kind: str) -> None:
    spread(kind).assert_close(all_logits(tiny(kind), IDS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("others", [0, 2])
def test_decode_logits_match_the_float64_reference_in_any_company(
    tiny: Make, spread: Callable[[str], Spread], kind: str, others: int
) -> None:
    logits, _ = decoded(tiny(kind), [IDS, *[IDS[::-1]] * others])
    spread(kind).assert_close(logits[0])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_prefill_of_several_sequences_matches_the_reference(
    tiny: Make, spread: Callable[[str], Spread], kind: str
) -> None:
    model, state = tiny(kind), tiny(kind).new_state(SIZES)
    prompts = [IDS[:7], IDS, IDS[:1]]
    (done,) = model.prefill(state, [state.open() for _ in prompts], prompts)
    spread(kind).assert_close(done.logits, [6, 9, 0])


CHANGES: dict[str, Callable[[ModelDims], ModelDims]] = {
    "plain_norms": lambda d: replace(d, norm_weight_offset=0.9),
    "other_eps": lambda d: replace(d, rms_eps=0.2),
    "other_theta": lambda d: with_rope(d, theta=1e4),
    "all_rotated": lambda d: with_rope(d, rotary_dim=16),
    "no_qk_norm": lambda d: replace(d, attention=replace(d.attention, qk_norm=False)),  # type: ignore[type-var]
}


def with_rope(dims: ModelDims, **changes: Any) -> ModelDims:
    assert dims.attention is not None
    assert dims.attention.rope is not None
    return replace(dims, attention=replace(dims.attention, rope=replace(dims.attention.rope, **changes)))


@pytest.mark.parametrize("change", CHANGES)
def test_bound_is_narrow_enough_to_see_another_architecture(
    tiny: Make, reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights, change: str
) -> None:
    other = Spread(reference, CHANGES[change](tiny_dims["dense"]), tiny_weights, lambda model: model.logits(IDS))
    assert not other.is_close(all_logits(tiny("dense"), IDS))


def memory(state: ModelState, slot: int, tokens: int) -> list[bytes]:
    """Return everything that a state knows of the sequence in a slot, which was opened alone."""
    found = [pool.conv[slot].tobytes() + pool.ssm[slot].tobytes() for pool in state.recurrent.values()]
    flat = [
        (cache.k.reshape(-1, *cache.k.shape[2:]), cache.v.reshape(-1, *cache.v.shape[2:]))
        for cache in state.kv.values()
    ]
    return found + [k[:tokens].tobytes() + v[:tokens].tobytes() for k, v in flat]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_verify_of_few_rows_is_decode_bit_for_bit(tiny: Make, kind: str, rows: int) -> None:
    model, ids = tiny(kind), IDS[:rows]
    expected, plain = decoded(model, [ids])
    state = model.new_state(SIZES)
    sequence = state.open()
    done = model.verify(state, [sequence], [ids])
    assert done.logits.tobytes() == expected[0].tobytes()
    state.roll_back([sequence], done.batch, [rows])
    assert memory(state, sequence.slot, rows) == memory(plain, sequence.slot, rows)


@pytest.mark.parametrize("kind", ["dense", "moe", "bf16"])
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_roll_back_gives_the_state_of_plain_decode_bit_for_bit(tiny: Make, kind: str, kept: int) -> None:
    model = tiny(kind)
    _, plain = decoded(model, [[*IDS[:3], *IDS[3 : 3 + kept]]])
    state = model.new_state(SIZES)
    sequence = state.open()
    for token in IDS[:3]:
        model.decode(state, [sequence], [token])
    done = model.verify(state, [sequence], [IDS[3 : 3 + kept] + [90] * (4 - kept)])
    state.roll_back([sequence], done.batch, [kept])
    assert sequence.length == 3 + kept
    assert memory(state, sequence.slot, 3 + kept) == memory(plain, sequence.slot, 3 + kept)
    after = model.decode(state, [sequence], [7]).logits
    assert after.tobytes() == decoded(model, [[*IDS[: 3 + kept], 7]])[0][0, -1:].tobytes()


def test_verify_of_several_sequences_rolls_each_back_by_itself(tiny: Make) -> None:
    model = tiny("dense")
    state = model.new_state(SIZES)
    sequences = [state.open(), state.open()]
    done = model.verify(state, sequences, [[1, 2, 3], [9, 8, 7]])
    state.roll_back(sequences, done.batch, [1, 3])
    got = model.decode(state, sequences, [5, 6]).logits
    expected = [decoded(model, [ids])[0][0, -1] for ids in ([1, 5], [9, 8, 7, 6])]
    assert got.tobytes() == np.stack(expected).tobytes()


@pytest.mark.parametrize("missing", [
    ("gated_delta_rule::gated_delta_rule_verify_n",), ("causal_conv1d::causal_conv1d_verify_n",),
    ("gated_delta_rule::gated_delta_rule_decode_norm_strided",),
    ("gated_delta_rule::gated_delta_rule_decode_norm_strided", "gated_delta_rule::gated_delta_rule_decode_strided"),
    ("rope::rope_mrope_interleaved",), ("rope::qk_norm_rope_append",), ("paged_decode::paged_decode_attn_fresh",),
    ("paged_decode::paged_decode_attn_gated", "paged_decode::paged_decode_attn_fresh"),
    ("rope::qk_norm_rope_append", "paged_decode::paged_decode_attn_gated", "paged_decode::paged_decode_attn_fresh"),
])  # fmt: skip
def test_optional_kernels_change_launches_and_no_bit(tiny: Make, missing: tuple[str, ...]) -> None:
    results = []
    for model in (tiny("dense"), tiny("dense", without=missing)):
        state = model.new_state(SIZES)
        sequences = [state.open(), state.open()]
        model.decode(state, sequences, [1, 2])
        done = model.verify(state, sequences, [[3, 4, 5, 6], [7, 8, 9, 10]])
        state.roll_back(sequences, done.batch, [2, 3])
        results.append(done.logits.tobytes() + model.decode(state, sequences, [11, 12]).logits.tobytes())
    assert results[0] == results[1]


def test_every_form_of_the_delta_rule_is_reached(tiny: Make) -> None:
    model = tiny("dense", 32)
    state = model.new_state(SIZES)
    one, two = state.open(), state.open()
    list(model.prefill(state, [one, two], [[1, 2], [3]]))
    model.decode(state, [one], [4])
    model.decode(state, [one, two], [4, 5])
    for ids in ([[1, 2]], [[1, 2, 3]], [[1, 2, 3, 4]]):
        state.roll_back([one], model.verify(state, [one], ids).batch, [1])
    rule = model.layers[0].mixer.rule  # type: ignore[union-attr]
    assert rule.used == {"prefill": 1, "norm_strided": 2, "chunk": 2, "verify_n": 1}


def test_delta_rule_without_the_fused_norm_takes_all_sequences_in_one_launch(tiny: Make) -> None:
    model = tiny("dense", 31, without=("gated_delta_rule::gated_delta_rule_decode_norm_strided",))
    state = model.new_state(SIZES)
    one, two = state.open(), state.open()
    model.decode(state, [one], [4])
    model.decode(state, [one, two], [4, 5])
    assert model.layers[0].mixer.rule.used == {"strided": 2}  # type: ignore[union-attr]


@pytest.mark.parametrize("max_rows", [3, 4, 7])
def test_prompts_longer_than_a_pass_go_through_several(
    tiny: Make, spread: Callable[[str], Spread], max_rows: int
) -> None:
    model = tiny("dense", max_rows)
    state = model.new_state(SIZES)
    prompts = [IDS[:5], IDS]
    passes = list(model.prefill(state, [state.open(), state.open()], prompts))
    assert [done.batch.rows for done in passes][:-1] == [max_rows] * (len(passes) - 1)
    spread("dense").assert_close(passes[-1].logits[-1], 9)


def test_image_positions_match_the_reference(
    tiny: Make, reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights
) -> None:
    grid = np.array([[0, 1, 2, 2, 2, 2, 4, 5, 6, 7], [0, 1, 2, 2, 3, 3, 4, 5, 6, 7], [0, 1, 2, 3, 2, 3, 4, 5, 6, 7]])
    bound = Spread(reference, tiny_dims["dense"], tiny_weights, lambda model: model.logits(IDS, grid))
    model = tiny("dense")
    state = model.new_state(SIZES)
    batch = state.batch([state.open()], [IDS], "prefill", grid.astype(np.int32))
    bound.assert_close(model.lm_head.forward(model.run(batch, state).hidden))
    assert not bound.is_close(all_logits(model, IDS))


def test_image_positions_share_the_frequencies_as_the_sections_say(
    make_context: Callable[..., Any], reference: ModuleType, tiny_dims: dict[str, ModelDims]
) -> None:
    rope = RopeDims(1e7, 16, (3, 3, 2), True)
    q, k = (np.random.default_rng(heads).standard_normal((5, heads, 24)).astype(ml_dtypes.bfloat16) for heads in (3, 2))
    grid = np.array([[0, 1, 2, 3, 4], [9, 7, 5, 3, 1], [2, 2, 40, 41, 42]], np.int32)
    model = reference.Reference(tiny_dims["dense"], None)
    expected = [model.rotate(heads.astype(np.float64), rope, grid) for heads in (q, k)]
    Rotary(make_context(None), rope).turn(q, k, grid)
    for got, exact in zip((q, k), expected, strict=True):
        assert np.abs(got.astype(np.float64) - exact).max() <= 2.0**-8 * np.abs(exact).max() + 1e-5


@pytest.mark.parametrize(("kind", "missing", "error", "match"), [
    ("alone", (), UsageError, "height and width, but rope is no interleaved mrope"),
    ("dense", ("rope::rope_mrope_interleaved",), NullKernelError, "rope::rope_mrope_interleaved was called"),
])  # fmt: skip
def test_image_positions_without_interleaved_mrope_are_refused(
    tiny: Make, kind: str, missing: tuple[str, ...], error: type[Exception], match: str
) -> None:
    model = tiny(kind, without=missing)
    state = model.new_state(SIZES)
    grid = np.array([[0, 1], [0, 2], [0, 1]], np.int32)
    batch = state.batch([state.open()], [[1, 2]], "prefill", grid)
    with pytest.raises(error, match=match):
        model.run(batch, state)


def test_sequences_that_end_leave_room_and_nothing_else(tiny: Make) -> None:
    model = tiny("moe")
    state = model.new_state(StateSizes(1, 3, 4))
    results = []
    for _ in range(3):
        sequence = state.open()
        (done,) = model.prefill(state, [sequence], [IDS])
        results.append(done.logits.tobytes())
        state.close(sequence)
    assert len(set(results)) == 1


def test_state_limits_raise_and_never_clamp(tiny: Make) -> None:
    model = tiny("dense")
    state = model.new_state(StateSizes(1, 2, 4))
    sequence = state.open()
    with pytest.raises(UsageError, match="all 1 sequence slots are taken"):
        state.open()
    with pytest.raises(UsageError, match=r"3 pages of 4 tokens wanted, 2 free \(of 2\)"):
        list(model.prefill(state, [sequence], [IDS[:9]]))
    assert sequence.pages == []
    with pytest.raises(UsageError, match="stands twice"):
        model.decode(state, [sequence, sequence], [1, 2])
    with pytest.raises(UsageError, match="a prompt is empty"):
        list(model.prefill(state, [sequence], [[]]))
    with pytest.raises(UsageError, match="expected at least 1"):
        StateSizes(0, 1)
    done = model.verify(state, [sequence], [[1, 2]])
    for kept in (0, 3):
        with pytest.raises(UsageError, match=r"of \[2\] rows: expected 1 to all"):
            state.roll_back([sequence], done.batch, [kept])
    state.roll_back([sequence], done.batch, [2])
    with pytest.raises(UsageError, match="no verify pass to roll back"):
        state.roll_back([sequence], done.batch, [2])


@pytest.mark.parametrize("kept", [[], [1, 1, 1], [2, True], [2, 1.0], [0, 1], [3, 1]])
def test_rows_of_a_verify_pass_are_kept_from_one_to_all_of_each(tiny: Make, kept: list[Any]) -> None:
    model = tiny("dense")
    state = model.new_state(SIZES)
    one, two = state.open(), state.open()
    done = model.verify(state, [one, two], [[1, 2], [3]])
    with pytest.raises(UsageError, match=r"of \[2, 1\] rows: expected 1 to all of them"):
        state.roll_back([one, two], done.batch, kept)
    for sequences in ([two, one], [one]):
        with pytest.raises(UsageError, match="the batch and the sequences of the last one"):
            state.roll_back(sequences, done.batch, [1] * len(sequences))
    state.roll_back([one, two], done.batch, [1, 1])
    assert (one.length, two.length) == (1, 1)


def test_nothing_runs_before_the_rows_of_a_verify_pass_are_chosen(tiny: Make) -> None:
    model = tiny("dense")
    state = model.new_state(SIZES)
    one, two = state.open(), state.open()
    first = model.decode(state, [one], [1])
    with pytest.raises(UsageError, match="no verify pass to roll back"):
        state.roll_back([one], first.batch, [1])
    done = model.verify(state, [one], [[2, 3]])
    for run in (
        lambda: model.decode(state, [one], [4]),
        lambda: model.decode(state, [two], [4]),
        lambda: model.verify(state, [one], [[4, 5]]),
        lambda: list(model.prefill(state, [two], [[4]])),
    ):
        with pytest.raises(UsageError, match="say with roll_back which of its rows stay, before another pass"):
            run()
    state.roll_back([one], done.batch, [1])
    after = model.decode(state, [one], [4]).logits
    again = model.new_state(SIZES)
    other = again.open()
    for token in (1, 2):
        model.decode(again, [other], [token])
    assert model.decode(again, [other], [4]).logits.tobytes() == after.tobytes()


def test_sequence_that_is_closed_takes_its_verify_pass_along(tiny: Make) -> None:
    model = tiny("dense")
    state = model.new_state(SIZES)
    one, two = state.open(), state.open()
    done = model.verify(state, [one], [[2, 3]])
    state.close(one)
    model.decode(state, [two], [4])
    with pytest.raises(UsageError, match="closed, or of another state"):
        state.roll_back([one], done.batch, [1])


@pytest.mark.parametrize("prompts", [[[1]], [[1], [2], [3]]])
def test_prompts_are_as_many_as_their_sequences(tiny: Make, prompts: list[list[int]]) -> None:
    model = tiny("dense")
    state = model.new_state(SIZES)
    live = [state.open(), state.open()]
    with pytest.raises(UsageError, match=f"{len(prompts)} prompts for 2 sequences: expected one each"):
        list(model.prefill(state, live, prompts))
    assert [one.length for one in live] == [0, 0]


def test_sequence_that_is_not_open_here_is_refused(tiny: Make) -> None:
    model = tiny("dense")
    state, other = model.new_state(StateSizes(2, 4, 4)), model.new_state(StateSizes(2, 4, 4))
    closed, foreign, one = state.open(), other.open(), state.open()
    state.close(closed)
    with pytest.raises(UsageError, match="closed, or of another state"):
        state.close(closed)
    reused = state.open()
    assert reused.slot == closed.slot == foreign.slot
    for wrong in (closed, foreign):
        with pytest.raises(UsageError, match="closed, or of another state"):
            model.decode(state, [one, wrong], [1, 2])
        with pytest.raises(UsageError, match="closed, or of another state"):
            state.reserve([wrong], [1])
        with pytest.raises(UsageError, match="closed, or of another state"):
            state.close(wrong)
    assert len(state._free_slots) == 0
    assert len(state._free_pages) == 4


def test_layer_outputs_are_those_of_the_reference(
    tiny: Make, reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights
) -> None:
    def features(model: Any) -> Any:
        model.logits(IDS)
        return np.concatenate([model.outputs[layer] for layer in (0, 2, 3)], axis=1)

    bound = Spread(reference, tiny_dims["dense"], tiny_weights, features)
    model = tiny("dense")
    state = model.new_state(SIZES)
    batch = state.batch([state.open()], [IDS], "prefill")
    bound.assert_close(model.run(batch, state, (0, 2, 3)).features)
    with pytest.raises(UsageError, match=r"has 4 layers, a drafter reads \[0, 4\]"):
        model.run(batch, state, (0, 4))


def test_sampling_follows_its_random_numbers_and_needs_its_kernel(tiny: Make) -> None:
    model = tiny("dense")
    logits = all_logits(model, IDS[:2])
    settings = [np.array(values) for values in ([0.0, 1.0], [0, 1], [1.0, 1.0], [0.5, 0.5])]
    types = (np.float32, np.int32, np.float32, np.float32)
    arrays = [value.astype(dtype) for value, dtype in zip(settings, types, strict=True)]
    assert model.sampler.sample(logits, *arrays).tolist() == model.greedy(logits)
    without = tiny("dense", without=("sampling::sample_top_k_top_p", "sampling::verify_greedy"))
    with pytest.raises(UsageError, match="decode greedily"):
        without.sampler.sample(logits, *arrays)
    drafts, target = np.array([[1, 2], [1, 2]], np.int32), np.array([[1, 3, 2], [1, 2, 9]], np.int32)
    assert model.sampler.accepted(drafts, target) == without.sampler.accepted(drafts, target) == [1, 2]
