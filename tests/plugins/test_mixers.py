"""Recurrent mixers: many rows against one row at a time, states taken back, edges, and refusals."""

import numpy as np
import pytest
from host_kernels import BF16, empty, gaussian, ints, kernel, ragged, same
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.plugins._sequences import check_slots, rows_of
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.errors import ContractError

# Rows of several sequences


def test_rows_of_three_sequences_of_which_one_is_empty():
    assert rows_of("x", ints(0, 2, 2, 5), 5) == [range(2), range(2, 2), range(2, 5)]


@pytest.mark.parametrize("cu_rows", [(1, 5), (0, 4), (0, 6), (0, 3, 2, 5), (0, -1, 5)])
def test_rows_of_offsets_that_do_not_share_the_rows_out_are_refused(cu_rows):
    with pytest.raises(ContractError, match=r"x: cu_rows is \[.*\], expected to rise from 0 to the 5 rows"):
        rows_of("x", ints(*cu_rows), 5)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((0, 4), r"x: slots\[1\] is 4, expected 0 <= slot < 4, or -1 for padding"),
        ((-2, 0), r"x: slots\[0\] is -2"),
        ((-1, 2, 0, 2), r"x: slots\[1, 3\] are both 2, expected every slot at most once"),
    ],
)
def test_slots_outside_the_pool_or_named_twice_are_refused(slots, message):
    with pytest.raises(ContractError, match=message):
        check_slots("x", ints(*slots), 4)


def test_slots_of_padding_may_repeat():
    check_slots("x", ints(-1, 3, -1), 4)


# ssm_preprocess


def test_deinterleave_has_the_bits_of_the_fused_projections():
    rng = np.random.default_rng(12)
    x, w_qg = gaussian(rng, 1, 32), nvfp4.quantize(gaussian(rng, 24, 32, dtype=np.float32))
    plain, halves, fused = empty(1, 24), (empty(1, 12), empty(1, 12)), (empty(1, 12), empty(1, 12))
    kernel("w4a16_gemv")(x, w_qg, plain)
    kernel("deinterleave_qg")(plain, 4, *halves)
    kernel("w4a16_gemv_qg")(x, w_qg, 4, *fused)
    assert all(map(same, halves, fused))
    w_qkvz = nvfp4.quantize(gaussian(rng, 72, 32, dtype=np.float32))
    plain, parts, fused = empty(1, 72), (empty(1, 42), empty(1, 30)), (empty(1, 42), empty(1, 30))
    kernel("w4a16_gemv")(x, w_qkvz, plain)
    kernel("deinterleave_qkvz")(plain, 2, 3, 6, 5, *parts)
    kernel("w4a16_gemv_qkvz")(x, w_qkvz, 2, 3, 6, 5, *fused)
    assert all(map(same, parts, fused))


def test_gdn_gates_at_the_edges_neither_overflow_nor_leave_their_range():
    a, b = np.array([[3e38, -3e38, 0, 100]], BF16), np.array([[-3e38, 3e38, 0, -1]], BF16)
    decay, beta = empty(1, 4, dtype=np.float32), empty(1, 4, dtype=np.float32)
    kernel("compute_gdn_gates")(a, b, np.zeros(4, np.float32), np.zeros(4, np.float32), decay, beta)
    assert np.allclose(decay, [[0, 1, 0.5, 3.7835e-44]], rtol=1e-2, atol=0)
    assert np.allclose(beta, [[0, 1, 0.5, 0.26894143]], rtol=1e-6, atol=0)


# The recurrent mixers: one step, many rows, and states taken back


class Conv:
    """The convolution over a pool of states, with rows for several sequences."""

    names = ("out", "state", "out_states")

    def __init__(self, seed, rows, channels=5, width=4):
        rng = np.random.default_rng(seed)
        self.cu_rows = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        self.slots = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
        self.state = gaussian(rng, len(rows) + 2, channels, width - 1)
        self.x, self.weight = gaussian(rng, sum(rows), channels), gaussian(rng, channels, width)
        self.row_states = (channels, width - 1)

    def many(self, func="causal_conv1d_update_prefill"):
        """Launch a form of many rows; return output, states, and the state after each row."""
        out, states = empty(*self.x.shape), empty(len(self.x), *self.row_states, dtype=self.state.dtype)
        more = {"out_states": states} if func.endswith("verify_n") else {}
        state = self.state.copy()
        arguments = dict(self.arguments(slice(None)), state=state, slots=self.slots, out=out)
        kernel(func)(**arguments, cu_rows=self.cu_rows, **more)
        return out, state, states

    def step(self, row, slot, state):
        """Launch the form of one row on a pool, in place."""
        out = empty(1, *self.x.shape[1:])
        one = slice(row, row + 1)
        kernel("causal_conv1d_update")(**self.arguments(one), state=state, slots=ints(slot), out=out)
        return out

    def arguments(self, rows):
        return {"x": self.x[rows], "weight": self.weight}


class Delta(Conv):
    """The gated delta rule over a pool of states, with rows for several sequences."""

    heads = (2, 5, 4, 3)

    def __init__(self, seed, rows):
        rng = np.random.default_rng(seed)
        key_heads, key_dim, value_heads, value_dim = self.heads
        self.cu_rows = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        self.slots = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int32)
        self.row_states = (value_heads, key_dim, value_dim)
        self.state = gaussian(rng, len(rows) + 2, *self.row_states, dtype=np.float32)
        self.qkv = gaussian(rng, sum(rows), 2 * key_heads * key_dim + value_heads * value_dim)
        self.decay, self.beta = (rng.random((sum(rows), value_heads), np.float32) for _ in "db")
        self.x = empty(sum(rows), value_heads * value_dim)

    def many(self, func="gated_delta_rule_prefill"):
        return super().many(func)

    def step(self, row, slot, state):
        out = empty(1, self.x.shape[1])
        one = slice(row, row + 1)
        kernel("gated_delta_rule_decode")(**self.arguments(one), state=state, slots=ints(slot), out=out)
        return out

    def arguments(self, rows):
        names = ("key_heads", "key_dim", "value_heads", "value_dim")
        gates = {"qkv": self.qkv[rows], "decay": self.decay[rows], "beta": self.beta[rows]}
        return {**gates, **dict(zip(names, self.heads, strict=True))}


MIXERS = pytest.mark.parametrize(
    ("mixer", "verify"), [(Conv, "causal_conv1d_verify_n"), (Delta, "gated_delta_rule_verify_n")]
)


@MIXERS
@settings(max_examples=15, deadline=None)
@given(rows=ragged, seed=st.integers(0, 99))
def test_many_rows_have_the_bits_of_one_row_at_a_time(mixer, verify, rows, seed):
    mixed = mixer(seed, rows)
    out, state, _ = mixed.many()
    verified, verified_state, states = mixed.many(verify)
    pool = mixed.state.copy()
    for slot, start, stop in zip(mixed.slots, mixed.cu_rows[:-1], mixed.cu_rows[1:], strict=True):
        for row in range(start, stop):
            alone = mixed.step(row, slot, pool)
            assert same(out[row : row + 1], alone)
            assert same(states[row], pool[slot])
    assert same(state, pool)
    assert same(verified, out)
    assert same(verified_state, state)


@MIXERS
@settings(max_examples=15, deadline=None)
@given(drafts=st.lists(st.integers(0, 4), min_size=1, max_size=3), seed=st.integers(0, 99), data=st.data())
def test_state_taken_back_after_rejected_drafts_is_the_state_of_plain_decode(mixer, verify, drafts, seed, data):
    """A verify launch of 1 + drafts rows, of which some are rejected, then one row more: as if never drafted."""
    mixed = mixer(seed, [1 + count for count in drafts])
    accepted = [data.draw(st.integers(0, count)) for count in drafts]
    out, pool, states = mixed.many(verify)
    plain = mixed.state.copy()
    for sequence, slot in enumerate(mixed.slots):
        start = mixed.cu_rows[sequence]
        pool[slot] = states[start + accepted[sequence]]
        for row in range(start, start + accepted[sequence] + 1):
            assert same(mixed.step(row, slot, plain), out[row : row + 1])
    assert same(pool, plain)
    for slot in mixed.slots:
        assert same(mixed.step(0, slot, pool), mixed.step(0, slot, plain))
    assert same(pool, plain)


@MIXERS
def test_prefill_cut_in_two_launches_has_the_bits_of_one(mixer, verify):
    mixed = mixer(1, [7])
    out, state, _ = mixed.many()
    parts, pool = [], mixed.state
    for rows in (slice(0, 3), slice(3, 7)):
        part = mixer(1, [7])
        part.cu_rows, part.state, part.x = ints(0, rows.stop - rows.start), pool, mixed.x[rows]
        part.arguments = lambda _, rows=rows: mixed.arguments(rows)
        done, pool, _ = part.many()
        parts.append(done)
    assert same(np.concatenate(parts), out)
    assert same(pool, state)


@MIXERS
def test_padding_writes_zeros_and_moves_no_state(mixer, verify):
    mixed = mixer(2, [2, 3])
    mixed.slots[0] = -1
    out, state, states = mixed.many(verify)
    assert not out[:2].astype(float).any()
    assert not states[:2].astype(float).any()
    assert out[2:].astype(float).any()
    moved = [slot for slot in range(len(state)) if not same(state[slot], mixed.state[slot])]
    assert moved == [mixed.slots[1]]


@MIXERS
@pytest.mark.parametrize(
    ("slots", "cu_rows", "message"),
    [
        ((0, 0), (0, 2, 5), r"slots\[0, 1\] are both 0"),
        ((0, 4), (0, 2, 5), r"slots\[1\] is 4, expected 0 <= slot < 4"),
        ((-2, 0), (0, 2, 5), r"slots\[0\] is -2"),
        ((0, 1), (0, 2, 4), "cu_rows is .* expected to rise from 0 to the 5 rows"),
    ],
)
def test_many_rows_with_wrong_slots_or_offsets_are_refused_and_nothing_is_written(
    mixer, verify, slots, cu_rows, message
):
    mixed = mixer(3, [2, 3])
    before = mixed.state.copy()
    mixed.slots, mixed.cu_rows = ints(*slots), ints(*cu_rows)
    for func in (verify, verify.replace("verify_n", "update_prefill" if mixer is Conv else "prefill")):
        with pytest.raises(ContractError, match=f"{func}: {message}"):
            mixed.many(func)
    assert same(mixed.state, before)


def test_one_row_with_a_wrong_slot_is_refused_and_moves_no_state():
    for mixed in (Conv(4, [1]), Delta(4, [1])):
        before = mixed.state.copy()
        with pytest.raises(ContractError, match=r"slots\[0\] is 3, expected 0 <= slot < 3"):
            mixed.step(0, 3, mixed.state)
        assert same(mixed.state, before)


def test_conv_of_a_window_of_ones_counts_its_inputs():
    state, out = np.zeros((1, 1, 3), BF16), empty(1, 1)
    seen = []
    for _ in range(5):
        kernel("causal_conv1d_update")(np.ones((1, 1), BF16), np.ones((1, 4), BF16), state, ints(0), out)
        seen.append(float(out[0, 0]))
    silu = [n / (1 + np.exp(-n)) for n in (1, 2, 3, 4, 4)]
    assert np.allclose(seen, silu, rtol=2.0**-8)


def test_conv_weighs_the_newest_input_with_the_last_weight():
    state = np.array([[[10, 20, 30]]], BF16)
    out = empty(1, 1)
    kernel("causal_conv1d_update")(np.full((1, 1), 40, BF16), np.array([[1, 0, 0, 0.5]], BF16), state, ints(0), out)
    assert out.tolist() == [[30]]  # 10 * 1 + 40 * 0.5, and silu(30) is 30
    assert state.tolist() == [[[20, 30, 40]]]


def delta(qkv, decay, beta, heads, state, func="gated_delta_rule_decode", **more):
    qkv, state = np.array([qkv], BF16), np.array([state], np.float32)
    out = empty(1, heads[2] * heads[3])
    gates = (np.array([value], np.float32) for value in (decay, beta))
    kernel(func)(qkv, *gates, *heads, *more.values(), state, ints(0), out)
    return out[0].astype(float), state[0]


def test_delta_rule_with_beta_one_replaces_what_stood_at_the_key():
    # key (0, 2) is unit (0, 1) up to eps; value (5, -3); query at the same key reads it back over sqrt(2)
    out, state = delta([0, 1, 0, 2, 5, -3], [1], [1], (1, 2, 1, 2), [[[7, 8], [100, 200]]])
    assert np.allclose(state, [[[7, 8], [5, -3]]], rtol=1e-5, atol=1e-4)
    assert np.allclose(out, np.array([5, -3]) / np.sqrt(2), rtol=2.0**-7)


def test_delta_rule_with_beta_zero_only_decays():
    before = np.arange(4, dtype=np.float32).reshape(1, 2, 2)
    _, state = delta([1, 1, 1, 1, 5, 5], [0.25], [0], (1, 2, 1, 2), before)
    assert same(state, before * np.float32(0.25))


def test_delta_rule_with_zero_query_and_key_reads_and_learns_nothing():
    before = np.ones((1, 2, 2), np.float32)
    out, state = delta([0, 0, 0, 0, 9, 9], [1], [1], (1, 2, 1, 2), before)
    assert out.tolist() == [0, 0]
    assert same(state, before)


def test_delta_rule_gives_neighbouring_value_heads_one_key_head():
    # key heads (1, 0) and (0, 1), four value heads of one value each: heads 0 and 1 write row 0, heads 2 and 3 row 1
    qkv = [1, 0, 0, 1, 1, 0, 0, 1, 2, 3, 4, 5]
    _, state = delta(qkv, [1] * 4, [1] * 4, (2, 2, 4, 1), np.zeros((4, 2, 1)))
    assert np.allclose(state[..., 0], [[2, 0], [3, 0], [0, 4], [0, 5]], rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_chunk_has_the_bits_of_verify(rows):
    mixed = Delta(5, [rows])
    out, state, states = mixed.many("gated_delta_rule_verify_n")
    for func in ("gated_delta_rule_chunk2", "gated_delta_rule_chunk3")[rows == 3 :]:
        chunk = empty(*out.shape), mixed.state.copy(), np.full_like(states, np.nan)
        arguments = mixed.arguments(slice(None))
        kernel(func)(**arguments, state=chunk[1], slots=mixed.slots, out=chunk[0], out_states=chunk[2])
        assert all(map(same, chunk, (out, state, states)))


def test_decode_norm_has_the_bits_of_decode_and_the_gated_norm():
    mixed = Delta(6, [1, 1, 1])
    mixed.slots[1] = -1
    rng = np.random.default_rng(6)
    gate, weight = gaussian(rng, 3, 12), gaussian(rng, 3, dtype=np.float32)
    plain, fused = empty(3, 12), empty(3, 12)
    pools = mixed.state.copy(), mixed.state.copy()
    arguments = mixed.arguments(slice(None))
    kernel("gated_delta_rule_decode_strided")(**arguments, state=pools[0], slots=mixed.slots, out=plain)
    normed = empty(12, 3)
    kernel("rms_norm_gated")(plain.reshape(12, 3), gate.reshape(12, 3), weight, 1e-6, normed)
    expected = normed.reshape(3, 12)
    expected[1] = 0
    more = {"gate": gate, "norm_weight": weight, "eps": 1e-6}
    kernel("gated_delta_rule_decode_norm_strided")(**arguments, **more, state=pools[1], slots=mixed.slots, out=fused)
    assert same(fused, expected)
    assert same(*pools)


def test_decode_of_two_sequences_without_strides_is_refused():
    mixed = Delta(7, [1, 1])
    with pytest.raises(ContractError, match="S is 2, expected at most 1"):
        kernel("gated_delta_rule_decode")(
            **mixed.arguments(slice(None)), state=mixed.state, slots=mixed.slots, out=empty(2, 12)
        )


def test_delta_rule_writes_rows_of_a_wider_tensor_in_place():
    mixed = Delta(8, [2])
    out, _, _ = mixed.many()
    wide = np.full((2, 20), 7, BF16)
    kernel("gated_delta_rule_prefill")(
        **mixed.arguments(slice(None)),
        cu_rows=mixed.cu_rows,
        state=mixed.state.copy(),
        slots=mixed.slots,
        out=wide[:, 4:16],
    )
    assert same(np.ascontiguousarray(wide[:, 4:16]), out)
    assert (wide[:, [0, 1, 2, 3, 16, 17, 18, 19]] == 7).all()
