"""The recurrent kernels: bits of rule and norm alone, slots written by the previous launch, prompts in chunks."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import device_memory

pytestmark = pytest.mark.gpu

BF16 = ml_dtypes.bfloat16
RULE = "gated_delta_rule::gated_delta_rule_decode"
MODEL_35B, MODEL_27B = (16, 128, 32, 128), (16, 128, 48, 128)


def numbers(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(BF16)


def inputs(sequences, heads, weight_type=np.float32):
    """Return what both launches take, and what the norm takes besides."""
    key_heads, key_dim, value_heads, value_dim = heads
    rng = np.random.default_rng(sequences)
    values = value_heads * value_dim
    slots = rng.permutation(sequences + 3)[:sequences].astype(np.int32)
    slots[2:3] = -1
    gates = {name: rng.random((sequences, value_heads)).astype(np.float32) for name in ("decay", "beta")}
    rule = {
        "qkv": rng.standard_normal((sequences, 2 * key_heads * key_dim + values)).astype(BF16), **gates,
        "key_heads": key_heads, "key_dim": key_dim, "value_heads": value_heads, "value_dim": value_dim,
        "state": rng.standard_normal((sequences + 3, value_heads, key_dim, value_dim)).astype(np.float32),
        "slots": slots, "out": np.full((sequences, values), 9, BF16),
    }  # fmt: skip
    gate = rng.standard_normal((sequences, values)).astype(BF16)
    return rule, {"gate": gate, "norm_weight": rng.standard_normal(value_dim).astype(weight_type), "eps": 1e-6}


@pytest.mark.parametrize("weight_type", [np.float32, BF16])
@pytest.mark.parametrize(("sequences", "heads"), [
    *((sequences, heads) for sequences in (1, 2, 4, 7, 16, 40) for heads in (MODEL_35B, MODEL_27B)),
    (3, (2, 5, 6, 7)), (3, (1, 16, 2, 24)), (2, (1, 128, 2, 64)), (1, (1, 8, 2, 1024)), (2, (1, 8, 2, 1030)),
    (2, (2, 8, 2, 1032)),
])  # fmt: skip
def test_rule_with_norm_has_the_bits_of_rule_then_norm(launched, sequences, heads, weight_type):
    rule, norm = inputs(sequences, heads, weight_type)
    plain = launched(f"{RULE}_strided", **rule)
    by_head = (-1, heads[3])
    normed = launched(
        "norm::rms_norm_gated", x=plain["out"].reshape(by_head), gate=norm["gate"].reshape(by_head),
        weight=norm["norm_weight"], eps=norm["eps"], out=np.full_like(plain["out"], 9).reshape(by_head),
    )["out"].reshape(plain["out"].shape)  # fmt: skip
    normed[rule["slots"] < 0] = 0
    fused = launched(f"{RULE}_norm_strided", **rule, **norm)
    assert fused["out"].tobytes() == normed.tobytes()
    assert fused["state"].tobytes() == plain["state"].tobytes()


CONVOLUTION = "causal_conv1d::causal_conv1d_update"


@pytest.mark.parametrize("key", [RULE, f"{RULE}_norm_strided", CONVOLUTION])
@pytest.mark.parametrize("before", [0, 2, -1, 1000])
def test_slot_that_the_launch_before_writes_is_the_one_that_counts(kernels, launched, key, before):
    rule, norm = inputs(1, MODEL_35B)
    arguments = {**rule, **(norm if key == f"{RULE}_norm_strided" else {})}
    if key == CONVOLUTION:
        arguments = {"x": rule["qkv"], "weight": numbers(8192, 4), "state": numbers(4, 8192, 3)}
        arguments |= {"slots": rule["slots"], "out": np.full_like(rule["qkv"], 9)}
    logits = np.zeros((1, 250_000), BF16)
    logits[0, 1] = 1
    arguments["slots"][0] = 1
    expected = launched(key, **arguments)
    arguments["slots"][0] = before
    memory = device_memory(0)
    arrays = {name: memory.to(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    writes = kernels.kernel("argmax", "argmax_bf16").prepare(logits=memory.to(logits), out=arrays["slots"])
    moves = kernels.kernel(*key.split("::")).prepare(**{**arguments, **arrays}, overlap=True)
    writes()
    moves()
    memory.wait()
    for name in ("out", "state"):
        assert memory.back(arrays[name]).tobytes() == expected[name].tobytes()


# Prompts in chunks of 64 rows. A BF16 pair errs by 2^-18, a product of two by three times that; a row has three such
# products in a chain, and with correlated keys a row's update is a difference of larger numbers: four times as much.
PREFILL, CHUNKED = "gated_delta_rule::gated_delta_rule_prefill", "gated_delta_rule::gated_delta_rule_prefill_chunked"
NEAR_STATE = 4 * 3 * 3 * 2.0**-18
NEAR_OUT = 2.0**-8  # one rounding of the result


def keys_of(kind, rng, rows, heads):
    """Return keys ``[M, heads, 128]``: independent, near each other, near each other with signs in turn, or of four."""
    own = rng.standard_normal((rows, heads, 128))
    common = rng.standard_normal((4, heads, 128))
    signs = np.where(np.arange(rows) % 2, -1.0, 1.0)[:, None, None]
    return {
        "gaussian": own, "near": common[0] + 0.1 * own, "same": common[:1] + 0 * own,
        "signs": signs * (common[0] + 0.1 * own), "four": common[rng.integers(0, 4, rows)] + 0.02 * own,
    }[kind]  # fmt: skip


def gates_of(kind, rng, shape):
    """Return decay and beta ``[M, value_heads]``."""
    ones, zeros_too = np.ones(shape), (rng.random(shape) > 0.2) * 1.0
    return {
        "middle": (rng.uniform(0.3, 1, shape), rng.random(shape)), "ones": (ones, ones),
        "near one": (rng.uniform(0.99, 1, shape), rng.uniform(0.9, 1, shape)),
        "near zero": (rng.uniform(0, 1e-3, shape), ones), "zeros": (zeros_too, ones),
        "slow": (ones, rng.uniform(0, 0.05, shape)), "tiny": (np.full(shape, 1e-30), ones),
    }[kind]  # fmt: skip


def prompt(counts, heads, keys="gaussian", gates="middle", value_dim=128):
    """Return the arguments of a prefill of sequences with so many rows."""
    rng, rows, (key_heads, value_heads) = np.random.default_rng(sum(counts)), sum(counts), heads
    decay, beta = gates_of(gates, rng, (rows, value_heads))
    parts = (rng.standard_normal((rows, key_heads, 128)), keys_of(keys, rng, rows, key_heads))
    values = rng.standard_normal((rows, value_heads * value_dim))
    return {
        "qkv": np.concatenate([*(part.reshape(rows, -1) for part in parts), values], axis=1).astype(BF16),
        "cu_rows": np.cumsum([0, *counts], dtype=np.int32), "decay": decay.astype(np.float32),
        "beta": beta.astype(np.float32), "key_heads": key_heads, "key_dim": 128, "value_heads": value_heads,
        "value_dim": value_dim,
        "state": rng.standard_normal((len(counts) + 1, value_heads, 128, value_dim)).astype(np.float32),
        "slots": rng.permutation(len(counts) + 1)[: len(counts)].astype(np.int32),
        "out": np.full((rows, value_heads * value_dim), np.nan, BF16),
    }  # fmt: skip


def relative(found, expected):
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def stepped(given):
    """Return outputs and states of row after row in float64."""
    q, k, v = np.split(given["qkv"].astype(np.float64), np.cumsum([given["key_heads"] * 128] * 2), axis=1)
    per_key, rows = given["value_heads"] // given["key_heads"], len(q)
    q, k = (np.repeat(x.reshape(rows, -1, 128), per_key, axis=1) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    v = v.reshape(rows, given["value_heads"], -1)
    decay, beta = (given[name].astype(np.float64)[:, :, None] for name in ("decay", "beta"))
    states, out = given["state"].astype(np.float64), np.zeros(v.shape)
    for slot, (start, stop) in zip(given["slots"], pairwise(given["cu_rows"].tolist()), strict=True):
        state = states[slot]
        for row in range(start, stop):
            state *= decay[row][:, :, None]
            delta = beta[row] * (v[row] - np.einsum("hk,hkv->hv", k[row], state))
            state += k[row][:, :, None] * delta[:, None, :]
            out[row] = np.einsum("hk,hkv->hv", q[row], state) * 128**-0.5
    return out.reshape(rows, -1), states


@pytest.mark.parametrize("keys", ["gaussian", "near", "same", "signs", "four"])
@pytest.mark.parametrize("gates", ["middle", "ones", "near one", "near zero", "zeros", "slow", "tiny"])
def test_chunks_are_as_near_the_rows_as_pairs_of_bf16_let_them_be(launched, keys, gates):
    given = prompt([300, 64, 1, 131], (1, 2), keys, gates, value_dim=64)
    found, (out, states) = launched(CHUNKED, **given), stepped(given)
    assert relative(found["state"], states) <= NEAR_STATE
    assert relative(found["out"], out) <= NEAR_OUT


@pytest.mark.parametrize(("heads", "gates"), [((1, 2), "ones"), ((1, 3), "slow"), ((2, 2), "near one")])
def test_errors_of_many_chunks_do_not_pile_up(launched, heads, gates):
    given = prompt([3000], heads, "near", gates, value_dim=32)
    found, (out, states) = launched(CHUNKED, **given), stepped(given)
    assert relative(found["state"], states) <= NEAR_STATE
    assert relative(found["out"], out) <= NEAR_OUT


@pytest.mark.parametrize(("heads", "counts"), [((16, 32), [700, 64, 65]), ((16, 48), [200, 3, 257]), ((4, 4), [5000])])
def test_chunks_of_a_model_are_near_its_rows(launched, heads, counts):
    given = prompt(counts, heads)
    found, rows = launched(CHUNKED, **given), launched(PREFILL, **given)
    assert relative(found["state"], rows["state"]) <= NEAR_STATE
    assert relative(found["out"], rows["out"]) <= NEAR_OUT
    untouched = sorted(set(range(len(counts) + 1)) - set(given["slots"].tolist()))
    assert found["state"][untouched].tobytes() == given["state"][untouched].tobytes()


def cut(given, sequence, start, stop, state):
    """Return the arguments for some rows of one sequence, from the state that it has by then."""
    begin = given["cu_rows"][sequence]
    rows = slice(begin + start, begin + stop)
    pieces = {name: np.ascontiguousarray(given[name][rows]) for name in ("qkv", "decay", "beta", "out")}
    ends, slots = np.array([0, stop - start], np.int32), given["slots"][sequence : sequence + 1]
    return {**given, **pieces, "cu_rows": ends, "slots": slots, "state": state}


def test_sequence_has_its_bits_alone_among_others_and_cut_between_chunks(launched):
    given = prompt([100, 0, 333, 64, 5000], (2, 4), value_dim=64)
    together = launched(CHUNKED, **given)
    for sequence, rows in enumerate(np.diff(given["cu_rows"]).tolist()):
        state, begin = given["state"], given["cu_rows"][sequence]
        for start, stop in pairwise(sorted({0, min(64, rows), rows // 64 * 64, rows})):
            part = launched(CHUNKED, **cut(given, sequence, start, stop, state))
            state = part["state"]
            assert part["out"].tobytes() == together["out"][begin + start : begin + stop].tobytes()
        slot = given["slots"][sequence]
        assert state[slot].tobytes() == together["state"][slot].tobytes()


def test_padding_gives_rows_of_zeros_and_moves_no_state(launched):
    given = prompt([70, 200, 64], (2, 4), value_dim=64)
    whole = launched(CHUNKED, **given)
    for wrong in (-1, 4, 2**31 - 1):
        slots = given["slots"].copy()
        slots[1] = wrong
        found = launched(CHUNKED, **{**given, "slots": slots})
        assert not found["out"][70:270].astype(np.float32).any()
        for rows in (slice(70), slice(270, None)):
            assert found["out"][rows].tobytes() == whole["out"][rows].tobytes()
        assert found["state"][given["slots"][1]].tobytes() == given["state"][given["slots"][1]].tobytes()


def test_chunks_replay_from_a_graph_with_the_bits_of_a_launch(kernels, launched):
    import cupy

    given = prompt([500], (2, 4))
    expected = launched(CHUNKED, **given)
    memory = device_memory(0)
    arrays = {name: memory.to(value) for name, value in given.items() if isinstance(value, np.ndarray)}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch = kernels.kernel(*CHUNKED.split("::")).prepare(**{**given, **arrays}, overlap=True)
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
    memory.wait()
    graph.launch(stream)
    stream.synchronize()
    for name in ("out", "state"):
        assert memory.back(arrays[name]).tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("cu_rows", [[0, 500, 200], [-7, 100, 200], [0, 2**31 - 1, 200], [0, 50, -3], [5, 5, 5]])
def test_offsets_that_do_not_share_the_rows_out_are_clamped(launched, cu_rows):
    given = prompt([100, 100], (1, 2), value_dim=32)
    found = launched(CHUNKED, **{**given, "cu_rows": np.array(cu_rows, np.int32)})
    spare = sorted(set(range(3)) - set(given["slots"].tolist()))
    assert found["state"][spare].tobytes() == given["state"][spare].tobytes()
