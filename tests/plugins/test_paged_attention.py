"""Paged cache and attention on the host: many rows against one at a time, edges, and refusals."""

import numpy as np
import pytest
from host_kernels import BF16, empty, gaussian, ints, kernel, ragged, same
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.registry.errors import ContractError


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
