"""Choosing tokens: hand-made distributions, frequencies, edges, refusals, and how rows are shared out."""

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.plugins import argmax, sampling
from kernel_muster.plugins.sampling import launch as sampling_launch
from kernel_muster.registry.contract.specs import Provider
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.runners import HostRunner
from kernel_muster.registry.selection.handles import Handle

BF16 = ml_dtypes.bfloat16


def kernel(func, family=sampling):
    contracts = {contract.name: contract for contract in family.muster_contracts()}
    spec = next(spec for spec in family.muster_kernels() if spec.kernel_key.func == func)
    return Handle(spec.kernel_key, spec, contracts[spec.contract], Provider("test", "test", "1"), HostRunner())


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, uniform=0.0):
    """Draw one token from each of ``uniform``'s numbers, all with the same logits and limits."""
    uniform = np.atleast_1d(np.asarray(uniform, np.float32))
    rows = len(uniform)
    out = np.full(rows, -1, np.int32)
    logits = np.broadcast_to(np.array(logits, BF16), (rows, len(logits))).copy()
    of = [
        np.full(rows, value, dtype)
        for value, dtype in ((temperature, np.float32), (top_k, np.int32), (top_p, np.float32))
    ]
    kernel("sample_top_k_top_p")(logits, *of, uniform, out)
    return out.tolist()


HALVES = [0.0, np.log(4.0), np.log(2.0), 0.0]  # in BF16 close to probabilities 1/8, 1/2, 1/4, 1/8


def test_sample_walks_the_candidates_from_the_likeliest_ties_by_index():
    assert sample(HALVES, uniform=[0.0, 0.49, 0.51, 0.74, 0.76, 0.86, 0.89, 0.999]) == [1, 1, 2, 2, 0, 0, 3, 3]


def test_sample_at_an_edge_needs_a_sum_above_uniform_and_one_that_reaches_top_p():
    assert sample([0.0, 0.0], uniform=[0.5]) == [1]
    assert sample([0.0, 0.0], top_p=0.5, uniform=[0.999]) == [0]


def test_sample_with_top_k_shares_out_what_stays():
    assert sample(HALVES, top_k=2, uniform=[0.0, 0.65, 0.68, 0.999]) == [1, 1, 2, 2]
    assert sample(HALVES, top_k=99, uniform=[0.999]) == [3]


def test_sample_with_top_p_keeps_the_shortest_run_that_reaches_it():
    assert sample(HALVES, top_p=0.4, uniform=[0.999]) == [1]
    assert sample(HALVES, top_p=0.6, uniform=[0.0, 0.65, 0.68, 0.999]) == [1, 1, 2, 2]
    assert sample(HALVES, top_p=0.8, uniform=[0.999]) == [0]
    assert sample(HALVES, top_p=1e-30, uniform=[0.999]) == [1]


def test_sample_applies_top_p_to_what_top_k_left():
    assert sample(HALVES, top_k=2, top_p=0.6, uniform=[0.999]) == [1]  # 2/3 of the two reach 0.6


def test_sample_with_temperature_flattens_or_sharpens():
    assert sample([4.0, 0.0], temperature=1e-3, uniform=[0.999999]) == [0]
    assert sample([4.0, 0.0], temperature=1e6, uniform=[0.49, 0.51]) == [0, 1]


def test_sample_with_temperature_zero_is_argmax_of_the_lowest_index():
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 4, 50).astype(BF16)
    expected = np.zeros(1, np.int32)
    kernel("argmax_bf16", argmax)(logits[None], expected)
    assert sample(logits, temperature=0.0, top_k=5, uniform=[0.0, 0.5, 0.999]) == [expected[0]] * 3


def test_sample_never_draws_what_is_masked_out():
    logits = [-np.inf, 1.0, -np.inf, 0.0]
    assert set(sample(logits, uniform=np.linspace(0, 0.99999, 50))) == {1, 3}


def test_sample_of_many_uniforms_draws_with_the_softmax_frequencies():
    logits = np.array([1.0, -0.5, 0.25, 2.0], BF16)
    grid = (np.arange(2000) + 0.5) / 2000
    counts = np.bincount(sample(logits, uniform=grid), minlength=4) / 2000
    powers = np.exp(logits.astype(float))
    assert np.allclose(counts, powers / powers.sum(), atol=1.0 / 2000)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, r"temperature\[0\] is -0.1.*, expected 0 or more, finite"),
        ({"temperature": np.inf}, r"temperature\[0\] is inf"),
        ({"temperature": np.nan}, r"temperature\[0\] is nan"),
        ({"top_k": -1}, r"top_k\[0\] is -1, expected 0 \(off\) or more"),
        ({"top_p": 0.0}, r"top_p\[0\] is 0.0, expected 0 < top_p <= 1"),
        ({"top_p": 1.5}, r"top_p\[0\] is 1.5"),
        ({"top_p": np.nan}, r"top_p\[0\] is nan"),
        ({"uniform": 1.0}, r"uniform\[0\] is 1.0, expected 0 <= uniform < 1"),
        ({"uniform": -0.5}, r"uniform\[0\] is -0.5"),
    ],
)
def test_sample_with_a_parameter_out_of_range_is_refused(wrong, message):
    with pytest.raises(ContractError, match=f"sampling::sample_top_k_top_p: {message}"):
        sample(HALVES, **wrong)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0.0, np.nan], "NaN in row 0 of logits"),
        ([-np.inf, -np.inf], "the largest logit of row 0 is -inf, expected a finite number"),
        ([0.0, np.inf], "the largest logit of row 0 is inf"),
        ([], "expected at least one logit a row"),
    ],
)
def test_sample_from_no_distribution_is_refused(logits, message):
    with pytest.raises(ContractError, match=message):
        sample(logits)


def topk(logits, k):
    values, ids = np.full((1, k), np.nan, np.float32), np.full((1, k), -1, np.int32)
    kernel("topk_bf16")(np.array([logits], BF16), k, values, ids)
    return values[0].tolist(), ids[0].tolist()


def test_topk_of_ties_gives_the_lowest_indices_first():
    assert topk([1, 3, 2, 3, -np.inf, 3], 4) == ([3, 3, 3, 2], [1, 3, 5, 2])


def test_topk_of_more_than_there_are_or_of_nan_is_refused():
    with pytest.raises(ContractError, match="k is 3, expected at most V = 2"):
        topk([1, 2], 3)
    with pytest.raises(ContractError, match=r"sampling::topk_bf16: NaN in row 0 of logits"):
        topk([1, np.nan], 1)


@pytest.mark.parametrize(
    ("drafts", "accepted"),
    [((5, 6, 7), 3), ((5, 6, 9), 2), ((9, 6, 7), 0), ((5, 9, 7), 1), ((-1, -1, -1), 0), ((5, -1, -1), 1)],
)
def test_verify_counts_the_drafts_before_the_first_wrong_one(drafts, accepted):
    out = np.full(1, -1, np.int32)
    kernel("verify_greedy")(np.array([drafts], np.int32), np.array([[5, 6, 7, 8]], np.int32), out)
    assert out.tolist() == [accepted]


def test_verify_with_a_negative_target_is_refused():
    target = np.array([[5, -1]], np.int32)
    with pytest.raises(ContractError, match=r"target_ids\[0, 1\] is -1, expected a token's id"):
        kernel("verify_greedy")(np.array([[5]], np.int32), target, np.zeros(1, np.int32))


# How rows are shared out among blocks


@pytest.mark.parametrize(
    ("rows", "width", "blocks"),
    [
        (1, 248_320, 64),
        (2, 248_320, 64),
        (3, 248_320, 32),
        (1, 248_321, 32),  # logits are read one by one
        (1, 262_152, 32),  # more than two vectors a thread of 64 blocks
        (16, 248_320, 32),  # all blocks run at once
        (17, 248_320, 16),
        (132, 248_320, 4),
        (529, 248_320, 1),
        (1, 64, 1),  # one block has them all
        (1, 4097, 16),
        (1, 4096, 2),
        (0, 64, 1),
    ],
)
def test_row_has_as_many_blocks_as_run_at_once(rows, width, blocks):
    assert 1 << sampling_launch.row_bits_of(rows, width, 132) == blocks


def test_argmax_of_more_rows_than_multiprocessors_has_blocks_that_wait_for_none():
    for rows, blocks in ((1, 32), (132, 32), (133, 1)):
        logits, out = np.zeros((rows, 248_320), BF16), np.zeros(rows, np.int32)
        contract = argmax.contracts.ARGMAX
        (plan,) = argmax.launch.ARGMAX.plan(contract.signature.bind("test", (), {"logits": logits, "out": out}), {})
        assert plan.grid == (rows * blocks, 1, 1)
