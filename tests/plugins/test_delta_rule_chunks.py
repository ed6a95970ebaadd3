"""The arithmetic of the delta rule in chunks, in NumPy with the roundings of chunked.cuh, and their cost.

A device proves the kernels themselves (tests/gpu/test_recurrent.py). These tests show why an operand is a pair of BF16,
and that neither correlated keys nor decays near their end let errors grow.
"""

import ml_dtypes
import numpy as np
import pytest

CHUNK, DEPTH, WIDTH = 64, 128, 16
F32 = np.float32
# As in tests/gpu/test_recurrent.py: three products of pairs in a chain, times four.
NEAR_STATE = 4 * 3 * 3 * 2.0**-18
NEAR_OUT = 2.0**-12  # before it is rounded to BF16


def bf16(values):
    return values.astype(ml_dtypes.bfloat16).astype(F32)


def pair(values):
    high = bf16(values)
    return high, bf16(values - high)


def single(values):
    return bf16(values), np.zeros_like(values)


def by_exact(a, b, split):
    """Return ``a b`` where b is BF16 already."""
    high, low = split(a)
    return high @ b + low @ b


def by_pair(a, b, split):
    (a_high, a_low), (b_high, b_low) = split(a), split(b)
    return a_high @ b_high + a_low @ b_high + a_high @ b_low


def decays_between(decay):
    """Return G ``[t, i]``: the product of ``decay[i + 1]`` to ``decay[t]``, 0 above the diagonal."""
    products = np.zeros((CHUNK, CHUNK), F32)
    for i in range(CHUNK):
        products[i, i] = 1
        products[i + 1 :, i] = np.cumprod(decay[i + 1 :], dtype=F32)
    return products


def chunk(q, k, v, decay, beta, state, split):
    """Return outputs of 64 rows and the state behind them."""
    unit_k = 1 / np.sqrt((k * k).sum(1) + F32(1e-6))
    unit_q = 1 / np.sqrt((q * q).sum(1) + F32(1e-6)) / np.sqrt(F32(DEPTH))
    between, gone = decays_between(decay), np.cumprod(decay, dtype=F32)
    a = np.tril(k @ k.T * between * (beta * unit_k)[:, None] * unit_k, -1)
    p = q @ k.T * between * unit_q[:, None] * unit_k
    solved = np.eye(CHUNK, dtype=F32)
    for t in range(1, CHUNK):
        solved[t, :t] = -(a[t, :t] @ solved[:t, :t])
    read_k, read_q = (by_exact(state.T, rows.T, split).T for rows in (k, q))
    learnt = by_pair((v - (gone * unit_k)[:, None] * read_k).T, (solved * beta).T, split).T
    out = (gone * unit_q)[:, None] * read_q + by_pair(learnt.T, p.T, split).T
    kept = (between[-1] * unit_k)[:, None] * learnt
    return out, gone[-1] * state + by_exact(kept.T, k, split).T


def in_chunks(q, k, v, decay, beta, state, split=pair):
    outs = []
    for start in range(0, len(q), CHUNK):
        rows = slice(start, start + CHUNK)
        given = [np.zeros((CHUNK, *array.shape[1:]), F32) for array in (q, k, v, decay, beta)]
        given[3][:] = 1
        for into, array in zip(given, (q, k, v, decay, beta), strict=True):
            into[: len(array[rows])] = array[rows]
        out, state = chunk(*given, state, split)
        outs.append(out[: len(q[rows])])
    return np.concatenate(outs), state


def in_steps(q, k, v, decay, beta, state):
    q, k, v, decay, beta, state = (array.astype(np.float64) for array in (q, k, v, decay, beta, state))
    q, k = (rows / np.sqrt((rows * rows).sum(1, keepdims=True) + 1e-6) for rows in (q, k))
    outs = np.empty_like(v)
    for t in range(len(q)):
        state = decay[t] * state
        state = state + np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        outs[t] = q[t] @ state / np.sqrt(DEPTH)
    return outs, state


def inputs(keys, gates, rows=200):
    rng = np.random.default_rng(rows)
    own, common = rng.standard_normal((rows, DEPTH)), rng.standard_normal((4, DEPTH))
    signs = np.where(np.arange(rows) % 2, -1.0, 1.0)[:, None]
    k = {
        "gaussian": own, "near": common[0] + 0.1 * own, "same": common[0] + 0 * own,
        "signs": signs * (common[0] + 0.1 * own), "four": common[rng.integers(0, 4, rows)] + 0.02 * own,
    }[keys]  # fmt: skip
    ones, some = np.ones(rows), (rng.random(rows) > 0.2) * 1.0
    decay, beta = {
        "middle": (rng.uniform(0.3, 1, rows), rng.random(rows)), "ones": (ones, ones), "zeros": (some, ones),
        "near one": (rng.uniform(0.99, 1, rows), rng.uniform(0.9, 1, rows)),
        "near zero": (rng.uniform(0, 1e-3, rows), ones), "slow": (ones, rng.uniform(0, 0.05, rows)),
    }[gates]  # fmt: skip
    q, v = rng.standard_normal((rows, DEPTH)), rng.standard_normal((rows, WIDTH))
    state = rng.standard_normal((DEPTH, WIDTH))
    return *(bf16(array) for array in (q, k, v)), *(array.astype(F32) for array in (decay, beta, state))


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("keys", ["gaussian", "near", "same", "signs", "four"])
@pytest.mark.parametrize("gates", ["middle", "ones", "near one", "near zero", "zeros", "slow"])
def test_chunks_are_near_the_steps_whatever_keys_and_gates_are(keys, gates):
    given = inputs(keys, gates)
    (out, state), (exact_out, exact_state) = in_chunks(*given), in_steps(*given)
    assert relative(state, exact_state) <= NEAR_STATE
    assert relative(out, exact_out) <= NEAR_OUT


def test_errors_of_many_chunks_do_not_pile_up():
    given = inputs("near", "ones", rows=2000)
    assert relative(in_chunks(*given)[1], in_steps(*given)[1]) <= NEAR_STATE


def test_operands_of_one_bf16_would_be_too_coarse():
    given = inputs("near", "ones")
    assert relative(in_chunks(*given, split=single)[1], in_steps(*given)[1]) > 5 * NEAR_STATE


def test_chunks_of_part_of_a_prompt_hand_the_state_on():
    given = inputs("gaussian", "middle")
    *rows, state = given
    whole, last = in_chunks(*given)
    first, between = in_chunks(*(array[:128] for array in rows), state)
    rest, end = in_chunks(*(array[128:] for array in rows), between)
    assert np.concatenate([first, rest]).tobytes() == whole.tobytes()
    assert end.tobytes() == last.tobytes()
