"""Attention and recurrent mixers: many rows against one row at a time, states taken back, edges, and refusals."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.plugins import (
    causal_conv1d,
    gated_delta_rule,
    kv_cache,
    norm,
    paged_decode,
    prefill_paged,
    rope,
    ssm_preprocess,
    w4a16_gemv,
)
from kernel_muster.plugins._sequences import check_slots, rows_of
from kernel_muster.registry import nvfp4
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.handles import Handle
from kernel_muster.registry.running import HostRunner
from kernel_muster.registry.specs import Provider

BF16 = ml_dtypes.bfloat16
FAMILIES = (
    causal_conv1d,
    gated_delta_rule,
    kv_cache,
    norm,
    paged_decode,
    prefill_paged,
    rope,
    ssm_preprocess,
    w4a16_gemv,
)
CONTRACTS = {contract.name: contract for family in FAMILIES for contract in family.muster_contracts()}
SPECS = {spec.key: spec for family in FAMILIES for spec in family.muster_kernels() if "cpu" in spec.archs}


def kernel(func, module=None):
    spec = next(s for s in SPECS.values() if s.kernel_key.func == func and module in (None, s.kernel_key.module))
    return Handle(spec.kernel_key, spec, CONTRACTS[spec.contract], Provider("test", "test", "1"), HostRunner())


def empty(*shape, dtype=BF16):
    return np.full(shape, np.nan, dtype)


def gaussian(rng, *shape, dtype=BF16):
    return rng.standard_normal(shape).astype(dtype)


def ints(*values):
    return np.array(values, np.int32)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


ragged = st.lists(st.integers(0, 5), min_size=1, max_size=4)


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


# rope


def test_rope_at_position_zero_changes_nothing_and_a_quarter_turn_swaps_the_halves():
    theta = 1.0  # every frequency is 1
    q = np.array([[[3, 5, 7, 9, 11]]] * 2, BF16)
    k = q.copy()
    kernel("rope_forward")(q, k, ints(0, 11), 4, theta)  # 11 radians are 3.5 * pi and 0.0044 more
    assert q[0].tolist() == k[0].tolist() == [[3, 5, 7, 9, 11]]
    turned = (np.array([3, 5]) + 1j * np.array([7, 9])) * np.exp(11j)
    assert np.allclose(q[1, 0, :4].astype(float), [*turned.real, *turned.imag], rtol=2.0**-8)
    assert q[1, 0, 4] == 11


def test_rope_keeps_the_product_of_query_and_key_under_a_common_shift():
    rng = np.random.default_rng(0)
    q, k = gaussian(rng, 1, 1, 64), gaussian(rng, 1, 1, 64)
    products = []
    for shift in (0, 1000, 200_000):
        turned_q, turned_k = q.copy(), k.copy()
        kernel("rope_forward")(turned_q, np.zeros((1, 0, 64), BF16), ints(shift + 7), 64, 1e7)
        kernel("rope_forward")(np.zeros((1, 0, 64), BF16), turned_k, ints(shift), 64, 1e7)
        products.append(float(turned_q.astype(float).ravel() @ turned_k.astype(float).ravel()))
    bound = 2 * 2.0**-8 * np.abs(q.astype(float)).ravel() @ np.abs(k.astype(float)).ravel() * 2
    assert np.ptp(products) < bound


@pytest.mark.parametrize("sections", [(11, 11, 10), (32, 0, 0), (12, 10, 10)])
def test_mrope_with_equal_positions_has_the_bits_of_rope(sections):
    rng = np.random.default_rng(1)
    q, k, positions = gaussian(rng, 5, 3, 80), gaussian(rng, 5, 1, 80), ints(0, 1, 77, 5000, 262143)
    plain_q, plain_k = q.copy(), k.copy()
    kernel("rope_forward")(plain_q, plain_k, positions, 64, 1e7)
    kernel("rope_mrope_interleaved")(q, k, np.stack([positions] * 3), *sections, 64, 1e7)
    assert same(q, plain_q)
    assert same(k, plain_k)


def test_mrope_turns_each_frequency_by_its_axis():
    """With all-one halves only the frequencies of one axis move when that axis alone does."""
    expected = {0: [0, 3, 6, 7], 1: [1, 4], 2: [2, 5]}  # 8 frequencies as t h w t h w t t
    for axis, moved in expected.items():
        q, positions = np.ones((1, 1, 16), BF16), np.zeros((3, 1), np.int32)
        positions[axis] = 1
        kernel("rope_mrope_interleaved")(q, np.ones((1, 1, 16), BF16), positions, 4, 2, 2, 16, 1.5)
        assert np.flatnonzero(q[0, 0, :8] != 1).tolist() == moved


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ((4, 2, 1), r"rotary_dim/2 is 8, expected at most section_t \+ section_h \+ section_w = 7"),
        ((4, 2, 3), r"section_t \+ section_h \+ section_w is 9, expected at most rotary_dim/2 = 8"),
        ((2, 4, 2), r"3\*section_h - 1 is 11, expected at most rotary_dim/2 = 8"),
        ((3, 2, 3), r"3\*section_w is 9, expected at most rotary_dim/2 = 8"),
    ],
)
def test_mrope_with_sections_that_do_not_fit_is_refused(sections, message):
    q = np.ones((1, 1, 16), BF16)
    with pytest.raises(ContractError, match=message):
        kernel("rope_mrope_interleaved")(q, q.copy(), np.zeros((3, 1), np.int32), *sections, 16, 1e4)


def test_rope_at_a_negative_position_is_refused_and_changes_nothing():
    q = np.ones((2, 1, 4), BF16)
    with pytest.raises(ContractError, match=r"rope_forward: positions\[1\] is -1, expected 0 or more"):
        kernel("rope_forward")(q, q.copy(), ints(5, -1), 4, 1e4)
    with pytest.raises(ContractError, match=r"positions\[2, 1\] is -3, expected 0 or more"):
        kernel("rope_mrope_interleaved")(q, q.copy(), ints(0, 0, 0, 0, 0, -3).reshape(3, 2), 2, 0, 0, 4, 1e4)
    assert (q == 1).all()


def test_rope_over_more_than_the_head_is_refused():
    q = np.ones((1, 1, 4), BF16)
    with pytest.raises(ContractError, match="rotary_dim is 6, expected at most D = 4"):
        kernel("rope_forward")(q, q.copy(), ints(0), 6, 1e4)


def test_rope_on_a_slice_of_a_fused_projection_changes_that_slice_only():
    rng = np.random.default_rng(2)
    fused = gaussian(rng, 3, 4, 8)
    before = fused.copy()
    kernel("rope_forward")(fused[:, :2], fused[:, 2:3], ints(1, 2, 3), 8, 1e4)
    q, k = before[:, :2].copy(), before[:, 2:3].copy()
    kernel("rope_forward")(q, k, ints(1, 2, 3), 8, 1e4)
    assert same(fused, np.concatenate([q, k, before[:, 3:]], axis=1))


def fused_arguments(positions, slots):
    """Return what qk_norm_rope_append takes: two rows of two and one heads, and pages of four tokens."""
    rng = np.random.default_rng(2)
    q, k, v = gaussian(rng, 2, 2, 8), gaussian(rng, 2, 1, 8), gaussian(rng, 2, 1, 8)
    weights, caches = (gaussian(rng, 8), gaussian(rng, 8)), [np.full((3, 4, 1, 8), 7, BF16) for _ in "kv"]
    return q, k, v, *weights, ints(*positions), ints(*slots), 1e-6, 1.0, 4, 1e4, *caches


def gapped(x):
    """Return the values as rows of an array that has others between them."""
    wide = np.full((2 * x.shape[0], *x.shape[1:]), 3, BF16)
    wide[::2] = x
    return wide[::2]


@pytest.mark.parametrize("laid", [lambda x: x, gapped, lambda x: x[::-1].copy()[::-1]])
def test_norm_turn_append_is_the_three_after_each_other(laid):
    q, k, v, q_weight, k_weight, positions, slots, eps, offset, rotary, theta, *caches = fused_arguments(
        (3, 9), (5, -1)
    )
    q, k, v = map(laid, (q, k, v))
    normed = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        out = empty(*x.shape)
        kernel("rms_norm")(x.reshape(-1, 8), weight, eps, offset, out.reshape(-1, 8))
        normed.append(out)
    kernel("rope_forward")(*normed, positions, rotary, theta)
    expected = [cache.copy() for cache in caches]
    kernel("kv_cache_append")(normed[1], v, slots, *expected)
    kernel("qk_norm_rope_append")(q, k, v, q_weight, k_weight, positions, slots, eps, offset, rotary, theta, *caches)
    assert same(q, normed[0])
    assert all(same(*pair) for pair in zip(caches, expected, strict=True))


@pytest.mark.parametrize(("positions", "slots", "what"), [
    ((1, -2), (0, 1), r"positions\[1\] is -2"), ((1, 2), (0, 12), r"slots\[1\] is 12"),
    ((1, 2), (5, 5), r"slots\[0, 1\] are both 5"),
])  # fmt: skip
def test_norm_turn_append_of_what_its_parts_refuse_changes_nothing(positions, slots, what):
    arguments = fused_arguments(positions, slots)
    before = arguments[0].copy()
    with pytest.raises(ContractError, match=rf"rope::qk_norm_rope_append: {what}"):
        kernel("qk_norm_rope_append")(*arguments)
    assert same(arguments[0], before)
    assert all((cache == 7).all() for cache in arguments[-2:])


# Paged cache and attention


class Paged:
    """Sequences with random keys and values, of which a page table knows the places."""

    def __init__(self, rng, lengths, heads=(4, 2, 16), page_size=4):
        self.rng, (self.query_heads, key_heads, dim) = rng, heads
        longest = max([*lengths, 1])
        pages_each = -(-longest // page_size)
        self.lengths = np.array(lengths, np.int32)
        pages = len(lengths) * pages_each
        self.table = rng.permutation(pages).reshape(len(lengths), pages_each).astype(np.int32)
        self.k, self.v = (empty(pages, page_size, key_heads, dim) for _ in "kv")
        self.scale = dim**-0.5
        self.tokens = [tuple(gaussian(rng, length, key_heads, dim) for _ in "kv") for length in lengths]
        for sequence, (k, v) in enumerate(self.tokens):
            places = np.arange(len(k))
            slots = self.table[sequence, places // page_size] * page_size + places % page_size
            kernel("kv_cache_append")(k, v, slots.astype(np.int32), self.k, self.v)

    def queries(self, rows):
        return gaussian(self.rng, rows, self.query_heads, self.k.shape[3])

    def decode(self, q, lengths=None, table=None):
        out = empty(*q.shape)
        lengths = self.lengths if lengths is None else lengths
        table = self.table if table is None else table
        kernel("paged_decode_attn")(q, self.k, self.v, table, lengths, self.scale, out)
        return out

    def prefill(self, q, cu_rows, lengths=None):
        out = empty(*q.shape)
        lengths = self.lengths if lengths is None else lengths
        kernel("prefill_paged_attn")(q, self.k, self.v, self.table, cu_rows, lengths, self.scale, out)
        return out


def test_append_puts_each_token_at_its_page_and_offset_and_leaves_the_rest():
    k_cache, v_cache = np.zeros((3, 4, 1, 2), BF16), np.full((3, 4, 1, 2), 7, BF16)
    k, v = np.arange(6).reshape(3, 1, 2).astype(BF16), -np.arange(6).reshape(3, 1, 2).astype(BF16)
    kernel("kv_cache_append")(k, v, ints(9, -1, 0), k_cache, v_cache)
    assert k_cache[2, 1].tolist() == [[0, 1]]
    assert k_cache[0, 0].tolist() == [[4, 5]]
    assert v_cache[0, 0].tolist() == [[-4, -5]]
    assert np.count_nonzero(v_cache == 7) == 24 - 4


@pytest.mark.parametrize("slots", [(0, 12), (0, -2), (5, 5)])
def test_append_to_a_slot_outside_the_cache_or_twice_is_refused_and_writes_nothing(slots):
    caches = [np.zeros((3, 4, 1, 2), BF16) for _ in "kv"]
    with pytest.raises(ContractError, match=r"kv_cache::kv_cache_append: slots\["):
        kernel("kv_cache_append")(np.ones((2, 1, 2), BF16), np.ones((2, 1, 2), BF16), ints(*slots), *caches)
    assert not any(cache.astype(float).any() for cache in caches)


def test_decode_of_one_token_is_its_value_for_every_query_head_of_its_group():
    paged = Paged(np.random.default_rng(3), [1], heads=(6, 2, 8))
    out = paged.decode(paged.queries(1))
    value = paged.tokens[0][1][0]
    assert same(out[0], np.repeat(value, 3, axis=0))


def test_decode_of_equal_keys_is_the_mean_of_the_values():
    paged = Paged(np.random.default_rng(4), [9])
    paged.k[...] = 1
    out = paged.decode(paged.queries(1))
    mean = paged.tokens[0][1].astype(float).mean(axis=0)
    assert np.allclose(out[0].astype(float), np.repeat(mean, 2, axis=0), rtol=2.0**-8, atol=1e-6)


def test_decode_with_scores_beyond_the_range_of_an_exponential_picks_the_largest():
    paged = Paged(np.random.default_rng(5), [5])
    paged.k[...] = 0
    paged.k[paged.table[0, 0], 2] = 1
    out = paged.decode(np.full((1, 4, 16), 300, BF16))  # scores of 0 and 1200
    assert same(out[0], np.repeat(paged.tokens[0][1][2], 2, axis=0))


def test_decode_weighs_a_token_far_below_the_largest_by_its_exponential():
    """Scores of 0 and -20 show what the scale errs by twentyfold, where a mean of alike tokens would hide it."""
    paged = Paged(np.random.default_rng(5), [2], heads=(1, 1, 16))
    page = paged.table[0, 0]
    paged.k[page, :2] = np.array([0, -5], BF16)[:, None, None]
    paged.v[page, :2] = np.array([0, 1], BF16)[:, None, None]
    out = paged.decode(np.ones((1, 1, 16), BF16))  # 16 * -5 * 16^-0.5
    assert np.allclose(out.astype(float), np.exp(-20) / (1 + np.exp(-20)), rtol=2.0**-8, atol=0)


def test_decode_without_context_gives_zeros():
    paged = Paged(np.random.default_rng(6), [0, 3])
    out = paged.decode(paged.queries(2))
    assert not out[0].astype(float).any()
    assert np.isfinite(out[1].astype(float)).all()


@pytest.mark.parametrize("length", [-1, 9])
def test_decode_of_a_context_that_its_pages_do_not_hold_is_refused(length):
    paged = Paged(np.random.default_rng(7), [8, 8])
    with pytest.raises(ContractError, match=rf"context_lens\[1\] is {length}, expected 0 to the 8 of its pages"):
        paged.decode(paged.queries(2), ints(8, length))


@pytest.mark.parametrize("page", [-1, 4])
def test_attention_through_a_page_outside_the_cache_is_refused_and_writes_nothing(page):
    paged = Paged(np.random.default_rng(8), [8, 8])
    paged.table[1, 1] = page
    q, out = paged.queries(2), empty(2, 4, 16)
    arguments = (paged.k, paged.v, paged.table)
    with pytest.raises(ContractError, match=rf"block_table\[1, 1\] is {page}, expected 0 <= page < 4"):
        kernel("paged_decode_attn")(q, *arguments, ints(8, 5), 1.0, out)
    with pytest.raises(ContractError, match=rf"prefill_paged_attn: block_table\[1, 1\] is {page}"):
        kernel("prefill_paged_attn")(q, *arguments, ints(0, 1, 2), ints(8, 5), 1.0, out)
    assert np.isnan(out.astype(float)).all()
    paged.decode(q, ints(8, 4))  # four tokens do not need that page


@pytest.mark.parametrize(("slot", "expected"), [(3, 21), (21, 21), (-1, 21)])
def test_attention_from_projections_takes_the_slot_of_its_last_token_or_none(slot, expected):
    paged = Paged(np.random.default_rng(11), [6, 0], heads=(2, 1, 8))
    paged.table[0] = 3, 5  # the sixth token stands in page 5, offset 1
    paged.k, paged.v = (gaussian(paged.rng, 8, 4, 1, 8) for _ in "kv")
    q, k, v = paged.queries(2), gaussian(paged.rng, 2, 1, 8), gaussian(paged.rng, 2, 1, 8)
    weights, out, before = (gaussian(paged.rng, 8), gaussian(paged.rng, 8)), empty(2, 2, 8), paged.k.copy()
    arguments = (
        q, k, v, *weights, ints(5, 0), ints(slot, -1), 1e-6, 1.0, 4, 1e4, paged.k, paged.v, paged.table,
        paged.lengths, gaussian(paged.rng, 2, 2, 8), 1.0, out,
    )  # fmt: skip
    if slot in (expected, -1):
        kernel("paged_decode_attn_fresh")(*arguments)
        assert not np.isnan(out.astype(float)).any()
        assert same(paged.k, before) is (slot == -1)
        return
    with pytest.raises(ContractError, match=rf"slots\[0\] is {slot}, expected {expected}, its last token's, or -1"):
        kernel("paged_decode_attn_fresh")(*arguments)
    assert same(paged.k, before)
    assert np.isnan(out.astype(float)).all()


@settings(max_examples=15, deadline=None)
@given(rows=ragged, before=st.integers(0, 9), seed=st.integers(0, 99))
def test_prefill_has_the_bits_of_decode_row_by_row(rows, before, seed):
    paged = Paged(np.random.default_rng(seed), [count + before for count in rows], heads=(3, 1, 8))
    cu_rows = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    q = paged.queries(sum(rows))
    out = paged.prefill(q, cu_rows)
    for sequence, count in enumerate(rows):
        for place in range(count):
            row = slice(cu_rows[sequence] + place, cu_rows[sequence] + place + 1)
            table = paged.table[sequence : sequence + 1]
            alone = paged.decode(q[row], ints(before + place + 1), table)
            assert same(out[row], alone)


def test_prefill_in_parts_has_the_bits_of_prefill_at_once():
    paged = Paged(np.random.default_rng(9), [11])
    q = paged.queries(11)
    at_once = paged.prefill(q, ints(0, 11))
    parts = [paged.prefill(q[a:b], ints(0, b - a), ints(b)) for a, b in ((0, 4), (4, 5), (5, 11))]
    assert same(at_once, np.concatenate(parts))


def test_prefill_of_more_rows_than_context_is_refused():
    paged = Paged(np.random.default_rng(10), [3, 5])
    with pytest.raises(ContractError, match=r"context_lens\[0\] is 3, expected at least its 4 rows"):
        paged.prefill(paged.queries(5), ints(0, 4, 5))


def test_attention_with_query_heads_that_key_heads_do_not_share_is_refused():
    paged = Paged(np.random.default_rng(11), [3], heads=(3, 2, 8))
    with pytest.raises(ContractError, match="Hq is 3, expected a multiple of Hk = 2"):
        paged.decode(paged.queries(1))


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
