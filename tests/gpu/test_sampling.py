"""Sampling: rows for which a list of the largest is not enough, and limits deep in the order."""

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import device_memory
from kernel_muster.plugins.sampling.cpu import sample_top_k_top_p

pytestmark = pytest.mark.gpu
BF16 = ml_dtypes.bfloat16


def falling(logits):
    """Return the indices by falling value, then by rising index."""
    return np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))


def top_k(launched, logits, k):
    got = launched(
        "sampling::topk_bf16", logits=logits, k=k, out_values=np.full((len(logits), k), 9, np.float32),
        out_ids=np.full((len(logits), k), -9, np.int32),
    )  # fmt: skip
    for row, values in enumerate(logits):
        order = falling(values)[:k]
        assert got["out_ids"][row].tolist() == order.tolist()
        assert np.array_equal(got["out_values"][row], values.astype(np.float32)[order])


@pytest.mark.parametrize("k", [1, 20, 50, 128, 129, 1000])
@pytest.mark.parametrize(("rows", "width"), [(1, 50_256), (18, 50_256), (2, 248_320)])
def test_top_k_of_tokens_side_by_side(launched, rows, width, k):
    logits = np.random.default_rng(k).normal(0, 2, (rows, width)).astype(BF16)
    for row in range(rows):  # as digits are: more of a warp's share, and of a thread's, than it posts
        logits[row, 24_000 + row : 24_030 + row] = np.linspace(9, 12, 30)
    top_k(launched, logits, k)


@pytest.mark.parametrize("k", [1, 20, 128, 300])
@pytest.mark.parametrize("width", [40_000, 40_001])
@pytest.mark.parametrize("above", [0, 5, 19, 20, 400, 3000])
def test_top_k_of_more_equal_logits_than_a_list_holds(launched, above, width, k):
    rng = np.random.default_rng(above)
    logits = np.where(rng.random((2, width)) < 0.7, 1.5, -np.inf).astype(BF16)
    for row in logits:
        row[rng.permutation(width)[:above]] = 2 + rng.integers(0, 3, above)
    logits[1, :30_000] = -3  # the equal ones are late
    top_k(launched, logits, k)


@pytest.mark.parametrize("k", [1, 20, 128, 200])
@pytest.mark.parametrize("width", [20_000, 248_320])
def test_top_k_of_rows_with_few_numbers(launched, width, k):
    logits = np.full((3, width), -np.inf, BF16)
    logits[0, 7], logits[1, width - 1] = 1, -5
    logits[2, : 40 * 500 : 500] = np.arange(40) % 7
    top_k(launched, logits, k)
    top_k(launched, logits[2:], k)  # shared by more blocks


@pytest.mark.parametrize("k", [3, 24, 25, 100])
@pytest.mark.parametrize("width", [1000, 32_760, 262_144, 262_152, 300_001])
def test_top_k_of_short_and_long_rows(launched, width, k):
    top_k(launched, np.random.default_rng(k).normal(0, 2, (2, width)).astype(BF16), k)


def middle(probabilities, place):
    """Return the middle of the interval that a candidate has of the sum."""
    return float(np.sum(probabilities[:place]) + probabilities[place] / 2) / float(np.sum(probabilities))


def deep(powers, rng):
    """Return the place of any candidate whose interval FP32 numbers can point at."""
    return int(rng.integers(np.count_nonzero(powers > 2e-6 * powers.sum())))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("width", [4096, 30_001, 131_072])
@pytest.mark.parametrize(
    ("deviation", "kept"), [(1.0, 0), (4.0, 0), (1.0, 129), (2.0, 5000), (1.0, 20), (3.0, 128), (0.0, 0), (0.0, 1000)]
)
def test_sampling_far_down_the_order(launched, rows, width, deviation, kept):
    rng = np.random.default_rng([rows, width, kept])
    logits = rng.normal(0, deviation, (rows, width)).astype(BF16)
    made = {
        "temperature": rng.uniform(0.5, 1.5, rows).astype(np.float32), "top_k": np.full(rows, kept, np.int32),
        "top_p": np.ones(rows, np.float32), "uniform": np.zeros(rows, np.float32),
    }  # fmt: skip
    kept = min(kept or width, width)
    for row, values in enumerate(logits.astype(np.float64)):
        powers = np.exp(np.sort(values)[::-1][:kept] / made["temperature"][row])
        if row % 3:
            last = deep(powers, rng)
            made["top_p"][row], powers = middle(powers, last), powers[: last + 1]
        made["uniform"][row] = middle(powers, deep(powers, rng))
    expected = np.full(rows, -9, np.int32)
    sample_top_k_top_p(logits, *made.values(), expected)
    out = launched("sampling::sample_top_k_top_p", logits=logits, **made, out=np.full(rows, -9, np.int32))["out"]
    assert out.tolist() == expected.tolist()


def test_sampling_with_limits_of_each_kind_in_one_launch_again_and_again(kernels):
    memory, rng = device_memory(0), np.random.default_rng(3)
    logits = rng.normal(0, 3, (9, 60_000)).astype(BF16)
    logits[8] = 1
    made = {
        "temperature": np.array([1, 1, 0, 1, 1, 0.7, 1, 2, 1], np.float32),
        "top_k": np.array([0, 20, 0, 300, 60_000, 1, 128, 129, 0], np.int32),
        "top_p": np.array([0.9, 0.9, 0.9, 1, 1, 0.5, 0.8, 0.7, 1], np.float32),
        "uniform": np.array([0.3, 0.3, 0.3, 0.6, 0.1, 0.9, 0.5, 0.2, 0.50001], np.float32),
    }
    expected = np.full(9, -9, np.int32)
    sample_top_k_top_p(logits, *made.values(), expected)
    out = memory.to(np.full(9, -9, np.int32))
    prepared = kernels.kernel("sampling", "sample_top_k_top_p").prepare(
        logits=memory.to(logits), **{name: memory.to(value) for name, value in made.items()}, out=out
    )
    for _ in range(20):
        prepared()
        memory.wait()
        assert memory.back(out).tolist() == expected.tolist()
