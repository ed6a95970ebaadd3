"""The two MoE paths against each other and against float64, on routings chosen to hurt."""

import copy

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.plugins import moe
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import random_weight
from kernel_muster.registry.contract.signature import WeightParam
from kernel_muster.registry.contract.specs import Provider
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.runners import HostRunner
from kernel_muster.registry.selection.handles import Handle

BF16 = ml_dtypes.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE = 6, 48, 32

CONTRACTS = {contract.name: contract for contract in moe.muster_contracts()}
SPECS = {spec.key: spec for spec in moe.muster_kernels() if "cpu" in spec.archs}


def kernel(key):
    spec = SPECS[key]
    return Handle(spec.kernel_key, spec, CONTRACTS[spec.contract], Provider("test", "test", "1"), HostRunner())


def empty(*shape, dtype=BF16):
    return np.full(shape, np.nan, dtype) if dtype is not np.int32 else np.full(shape, -1, dtype)


class Layer:
    """One MoE layer of random weights, with both paths and a float64 one."""

    experts = EXPERTS

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        sizes = {"E": EXPERTS, "H": HIDDEN, "I": INTERMEDIATE}
        self.gate, self.up = (random_weight(WeightParam("w", "nvfp4", ("E", "I", "H")), sizes, rng) for _ in "gu")
        self.down = random_weight(WeightParam("w", "nvfp4", ("E", "H", "I")), sizes, rng)
        self.rng = rng

    def slice(self, first, last):
        """The experts from first to last alone."""
        part = copy.copy(self)
        part.gate, part.up, part.down = (
            nvfp4.Nvfp4Weight(*(array[first:last] for array in (w.packed, w.block_scale, w.global_scale_decode)))
            for w in (self.gate, self.up, self.down)
        )
        part.experts = last - first
        return part

    def tokens(self, count):
        return (self.rng.standard_normal((count, HIDDEN)) / np.sqrt(HIDDEN)).astype(BF16)

    def grouped(self, x, ids, weights, twin=""):
        tokens, choices = ids.shape
        slots, offsets, work = sort(ids, self.experts)
        h, y, out = empty(ids.size, INTERMEDIATE), empty(ids.size, HIDDEN), empty(tokens, HIDDEN)
        gate_up = kernel(f"moe_w4a16::moe_w4a16_grouped_gate_up{twin}")
        gate_up(x, self.gate, self.up, slots, offsets, work, choices, h)
        kernel(f"moe_w4a16::moe_w4a16_grouped_down{twin}")(h, self.down, slots, offsets, work, y)
        kernel("moe::moe_unpermute_reduce_indexed")(y, slots, weights, out)
        return out

    def atomic(self, x, ids, weights):
        slots, offsets, work = sort(ids)
        h, out = empty(ids.size, INTERMEDIATE), empty(len(x), HIDDEN)
        gate_up = kernel("moe_w4a16::moe_w4a16_grouped_gate_up")
        gate_up(x, self.gate, self.up, slots, offsets, work, ids.shape[1], h)
        kernel("moe_w4a16::moe_w4a16_grouped_down_atomic_c4")(h, self.down, slots, offsets, work, weights, out)
        return out

    def pairwise(self, x, ids, weights, rows):
        out = empty(len(x), HIDDEN)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            h = empty(*ids[part].shape, INTERMEDIATE)
            family = f"moe_fused_batch{rows}"
            kernel(f"{family}::{family}_gate_up")(x[part], ids[part], self.gate, self.up, h)
            kernel(f"{family}::{family}_down")(h, ids[part], weights[part], self.down, out[part])
        return out

    def exact(self, x, ids, weights):
        """Sum over all experts, each token's weight at those it chose: no slots, no order."""
        gate, up, down = (nvfp4.dequantize(w) for w in (self.gate, self.up, self.down))
        dense = np.zeros((len(x), EXPERTS))
        np.add.at(dense, (np.arange(len(x))[:, None], ids), weights.astype(np.float64))
        wide = x.astype(np.float64)
        g, u = np.einsum("mh,eih->mei", wide, gate), np.einsum("mh,eih->mei", wide, up)
        return np.einsum("me,mei,ehi->mh", dense, g / (1 + np.exp(-g)) * u, down)


def sort(ids, experts=EXPERTS):
    slots, offsets = empty(ids.size, dtype=np.int32), empty(experts + 1, dtype=np.int32)
    work = np.full((experts, 4), 9, np.int32)
    kernel("moe::moe_sort_by_expert")(ids, experts, slots, offsets, work)
    return slots, offsets, work


def all_on_one(tokens):
    return np.full((tokens, 1), 4, np.int32)


def some_without(tokens):
    """Only the first and the last expert are ever chosen."""
    return np.tile(np.array([[EXPERTS - 1, 0]], np.int32), (tokens, 1))


def all_experts(tokens):
    return np.tile(np.arange(EXPERTS, dtype=np.int32)[::-1], (tokens, 1)).copy()


def in_turn(tokens):
    first = np.arange(tokens) % EXPERTS
    return np.stack([first, (first + 1) % EXPERTS, (first + 3) % EXPERTS], axis=1).astype(np.int32)


def falling(tokens):
    """Later tokens choose lower experts, so that sorting turns the order round."""
    first = (EXPERTS - 1) - (np.arange(tokens) * EXPERTS) // max(tokens, 1)
    return np.stack([first, (first + 1) % EXPERTS], axis=1).astype(np.int32)


ROUTINGS = (all_on_one, some_without, all_experts, in_turn, falling)
COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33)


def weights_of(rng, ids):
    weights = rng.random(ids.shape) + 0.05
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def bound(exact, x, layer):
    """Roundings of gate, up, their product, each expert's result and the sum, seen through a row of w_down.

    Each of h's values errs by 3.3 * 2^-8 of itself or 0.005 (contract of gate_up), and a row of w_down sums I of them.
    """
    down = np.abs(nvfp4.dequantize(layer.down)).sum(axis=2).max()
    return 2.0**-7 * np.abs(exact) + down * 0.005 + 2.0**-8 * 20


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_grouped_on_hard_routings_has_the_bits_of_pairwise_and_is_near_float64(routing, tokens):
    layer = Layer()
    x, ids = layer.tokens(tokens), routing(tokens)
    weights = weights_of(layer.rng, ids)
    grouped = layer.grouped(x, ids, weights)
    for rows in (2, 3):
        assert np.array_equal(grouped, layer.pairwise(x, ids, weights, rows))
    assert np.array_equal(grouped, layer.grouped(x, ids, weights, "_k64"))
    exact = layer.exact(x, ids, weights)
    error = np.abs(grouped.astype(np.float64) - exact)
    assert (error <= bound(exact, x, layer)).all()
    assert error.mean() < 2.0**-7 * np.abs(exact).mean()
    assert np.abs(layer.atomic(x, ids, weights).astype(np.float64) - exact).mean() < 2.0**-7 * np.abs(exact).mean()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 33), choices=st.integers(1, EXPERTS))
def test_grouped_on_random_routings_has_the_bits_of_pairwise(seed, tokens, choices):
    layer = Layer(seed)
    ids = layer.rng.random((tokens, EXPERTS)).argsort(axis=1)[:, :choices].astype(np.int32)
    weights = weights_of(layer.rng, ids)
    x = layer.tokens(tokens)
    assert np.array_equal(layer.grouped(x, ids, weights), layer.pairwise(x, ids, weights, 3))


def test_grouped_of_many_tokens_has_the_bits_of_each_token_alone():
    layer = Layer()
    x, ids = layer.tokens(33), in_turn(33)
    weights = weights_of(layer.rng, ids)
    together = layer.grouped(x, ids, weights)
    alone = [layer.grouped(x[m : m + 1], ids[m : m + 1], weights[m : m + 1])[0] for m in range(33)]
    assert np.array_equal(together, alone)


# Routing


def topk(key, logits, count, **more):
    ids, weights = empty(len(logits), count, dtype=np.int32), empty(len(logits), count, dtype=np.float32)
    kernel(key)(logits=logits, top_k=count, out_ids=ids, out_weights=weights, **more)
    return ids, weights


SOFTMAX, SIGMOID = "moe::moe_topk_softmax", "moe::moe_topk_sigmoid"


@pytest.mark.parametrize("key", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_topk_of_ties_takes_the_lowest_index(key, dtype):
    logits = np.array([[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [-1, -1, 5, -1, -1]], dtype)
    ids, weights = topk(key, logits, 2)
    assert ids.tolist() == [[1, 2], [0, 1], [2, 0]]
    assert np.allclose(weights[:2], 0.5)


@pytest.mark.parametrize("key", [SOFTMAX, SIGMOID])
def test_topk_of_logits_that_round_to_one_score_goes_by_the_logits(key):
    logits = np.array([[100, 101, 102, 101]], np.float32)
    assert topk(key, logits, 3)[0].tolist() == [[2, 1, 3]]


@pytest.mark.parametrize("key", [SOFTMAX, SIGMOID])
def test_topk_weights_sum_to_one_even_for_extreme_logits(key):
    logits = np.array([[3e38, -3e38, 0, 1], [-60, -61, -62, -np.inf], [1e-45, 0, -1e-45, 0]], np.float32)
    weights = topk(key, logits, 3)[1]
    assert np.allclose(weights.astype(np.float64).sum(axis=1), 1, rtol=0, atol=2.0**-22)


@pytest.mark.parametrize("key", [SOFTMAX, SIGMOID])
@pytest.mark.parametrize("row", [[0, np.nan, 1], [0, np.inf, 1], [-np.inf] * 3])
def test_topk_of_a_row_without_a_finite_largest_logit_is_refused(key, row):
    with pytest.raises(ContractError, match=r"the largest logit of row 1 is (nan|inf|-inf), expected a finite number"):
        topk(key, np.array([[0, 0, 0], row], np.float32), 2)


@pytest.mark.parametrize("key", [SOFTMAX, SIGMOID])
def test_topk_of_more_than_all_experts_is_refused(key):
    with pytest.raises(ContractError, match=f"{key}: top_k is 4, expected at most E = 3"):
        topk(key, np.zeros((1, 3), np.float32), 4)


def test_topk_sigmoid_bias_decides_the_choice_and_not_the_weight():
    logits = np.array([[2, 1, 0, -1]], np.float32)
    ids, weights = topk(SIGMOID, logits, 2, bias=np.array([0, 0, 0, 2], np.float32))
    scores = 1 / (1 + np.exp([1.0, -2.0]))
    assert ids.tolist() == [[3, 0]]
    assert np.allclose(weights, [scores / scores.sum()], rtol=1e-6)


def test_topk_sigmoid_of_scores_that_all_vanish_is_refused():
    with pytest.raises(ContractError, match="every chosen score of row 0 is zero"):
        topk(SIGMOID, np.full((1, 3), -1000, np.float32), 2)


def test_sort_by_expert_is_stable_and_counts_experts_without_tokens():
    slots, offsets, work = sort(np.array([[5, 0], [0, 3], [5, 0]], np.int32))
    assert slots.tolist() == [1, 2, 5, 3, 0, 4]
    assert offsets.tolist() == [0, 3, 3, 3, 4, 4, 6]
    assert work.tolist() == [[0, 0, 3, 3], [3, 3, 4, 3], [5, 4, 6, 3], *[[-1, 0, 0, 3]] * 3]


def test_sort_by_expert_leaves_absent_choices_out_and_fills_the_end():
    slots, offsets, work = sort(np.array([[5, -1], [-1, -1], [5, 0]], np.int32))
    assert slots.tolist() == [5, 0, 4, -1, -1, -1]
    assert offsets.tolist() == [0, 1, 1, 1, 1, 1, 3]
    assert work.tolist() == [[0, 0, 1, 2], [5, 1, 3, 2], *[[-1, 0, 0, 2]] * 4]


def test_sort_by_expert_without_tokens_writes_all_offsets():
    slots, offsets, work = sort(np.zeros((0, 2), np.int32))
    assert slots.size == 0
    assert work.tolist() == [[-1, 0, 0, 0]] * EXPERTS
    assert offsets.tolist() == [0] * (EXPERTS + 1)


def test_slices_of_the_experts_add_up_to_all_of_them_on_both_paths():
    layer = Layer()
    x, ids = layer.tokens(17), in_turn(17)
    weights = weights_of(layer.rng, ids)
    exact = layer.exact(x, ids, weights)
    sums = {"grouped": np.zeros_like(exact), "pairwise": np.zeros_like(exact)}
    for first, last in ((0, 1), (1, 4), (4, EXPERTS)):
        local = empty(*ids.shape, dtype=np.int32)
        kernel("moe::moe_local_ids")(ids, first, last - first, local)
        assert local.min() == -1
        part = layer.slice(first, last)
        grouped = part.grouped(x, local, weights)
        assert np.array_equal(grouped, part.pairwise(x, local, weights, 3))
        sums["grouped"] += grouped
        sums["pairwise"] += part.pairwise(x, local, weights, 2)
    for total in sums.values():
        assert (np.abs(total - exact) <= 2 * bound(exact, x, layer)).all()
        assert np.abs(total - exact).mean() < 2.0**-7 * np.abs(exact).mean()


@pytest.mark.parametrize("wrong", [-2, EXPERTS])
def test_expert_outside_the_layer_is_refused(wrong):
    layer = Layer()
    ids = np.array([[0, wrong]], np.int32)
    with pytest.raises(ContractError, match=rf"ids\[0, 1\] is {wrong}, expected 0 <= index < {EXPERTS}"):
        sort(ids)
    for rows in (2, 3):
        with pytest.raises(ContractError, match=rf"ids\[0, 1\] is {wrong}"):
            layer.pairwise(layer.tokens(1), ids, np.ones((1, 2), np.float32), rows)


@pytest.mark.parametrize(
    ("slots", "offsets", "message"),
    [
        ([0, 1, 1], [0, 1, 2, 3, 3, 3, 3], "slots names a slot twice, expected each of 0 to 2 at most once"),
        ([0, 1, 3], [0, 1, 2, 3, 3, 3, 3], r"slots\[2\] is 3, expected 0 <= index < 3"),
        ([0, 1, 2], [0, 1, 2, 2, 2, 2, 2], r"offsets is \[0 1 2 2 2 2 2\], expected to rise from 0 to the 3 slots"),
        ([0, -1, 2], [0, 1, 2, 2, 2, 2, 2], "slots has a -1 before place 2, expected those of no expert at the end"),
        ([2, 0, -1], [0, 1, 2, 3, 3, 3, 3], "expected to rise from 0 to the 2 slots"),
        ([0, 1, 2], [1, 1, 2, 3, 3, 3, 3], "expected to rise from 0"),
        ([0, 1, 2], [0, 2, 1, 3, 3, 3, 3], "expected to rise from 0"),
    ],
)
def test_grouped_with_an_order_that_leaves_a_slot_out_is_refused(slots, offsets, message):
    layer = Layer()
    out, work = empty(3, INTERMEDIATE), sort(np.array([[0, 1, 2]], np.int32))[2]
    with pytest.raises(ContractError, match=message):
        kernel("moe_w4a16::moe_w4a16_grouped_gate_up")(
            layer.tokens(3), layer.gate, layer.up, np.array(slots, np.int32), np.array(offsets, np.int32), work, 1, out
        )
    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize(("place", "wrong"), [((0, 0), 1), ((1, 1), 0), ((2, 2), 2), ((3, 0), 3), ((0, 3), 2)])
def test_grouped_with_a_work_list_of_other_offsets_is_refused(place, wrong):
    layer = Layer()
    slots, offsets, work = sort(np.array([[0, 1, 2]], np.int32))
    work[place] = wrong
    with pytest.raises(ContractError, match="work does not list the 3 experts that offsets give slots"):
        kernel("moe_w4a16::moe_w4a16_grouped_down")(
            empty(3, INTERMEDIATE), layer.down, slots, offsets, work, empty(3, HIDDEN)
        )


def test_reduce_adds_in_order_of_choice_whatever_the_order_of_slots():
    # 2^24 + 1 - 2^24 in FP32: the order of the three additions shows.
    y = np.array([[1.0], [2.0**24], [-(2.0**24)]], BF16)
    weights = np.ones((1, 3), np.float32)
    for slots, expected in (([0, 1, 2], 0), ([2, 0, 1], 1), ([1, 0, 2], 0)):
        out = empty(1, 1)
        kernel("moe::moe_unpermute_reduce_indexed")(y, np.array(slots, np.int32), weights, out)
        assert out[0, 0] == expected


def test_atomic_down_promises_no_bits():
    assert not SPECS["moe_w4a16::moe_w4a16_grouped_down_atomic_c4"].deterministic


def test_shared_gate_add_with_a_closed_and_a_half_open_gate():
    x = np.array([[-100, 0], [0, 0]], BF16)
    shared, out = np.array([[8, 8], [8, 4]], BF16), np.ones((2, 2), BF16)
    kernel("moe_shared::moe_shared_gate_add")(x, np.ones(2, BF16), shared, out)
    assert out.tolist() == [[1, 1], [5, 3]]


def test_router_logits_are_kept_only_when_the_lever_asks():
    assert [key for key, spec in SPECS.items() if spec.opt_in] == ["moe::moe_router_logits_f32"]
