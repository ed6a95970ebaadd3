"""Attention at decode: fused launches have the bits of their parts, and a row has its bits however it is shared out."""

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import device_memory
from kernel_muster.plugins.paged_decode import launch

pytestmark = pytest.mark.gpu

BF16 = ml_dtypes.bfloat16
MODEL_35B, MODEL_27B = (16, 2, 256), (24, 4, 256)
PAGE = 16


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(BF16)


def full(*shape):
    return np.full(shape, 9, BF16)


# Between projections and cache


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize(
    ("heads", "rotary_dim"),
    [(MODEL_35B, 64), (MODEL_27B, 64), ((4, 1, 128), 128), ((5, 3, 33), 12), ((3, 1, 1024), 1000), ((3, 1, 1023), 90)],
)
def test_norm_turn_append_has_the_bits_of_its_parts(launched, rows, heads, rotary_dim):
    rng = np.random.default_rng(rows)
    query_heads, key_heads, width = heads
    q, k, v = (numbers(rng, rows, count, width) for count in (query_heads, key_heads, key_heads))
    cache = (rows + 2, PAGE, key_heads, width)
    slots = rng.permutation(cache[0] * PAGE)[:rows].astype(np.int32)
    positions = rng.integers(0, 262_144, rows, np.int32)
    slots[4:5], slots[5:6], positions[6:7] = -1, cache[0] * PAGE, -3  # refused entries change nothing, as in the parts
    weights = {"q": numbers(rng, width), "k": numbers(rng, width)}
    norm, rope = {"eps": 1e-6, "weight_offset": 1.0}, {"rotary_dim": rotary_dim, "theta": 1e7}

    normed = {
        name: launched("norm::rms_norm", x=x.reshape(-1, width), weight=weights[name], **norm,
                       out=full(x.size // width, width))["out"].reshape(x.shape)
        for name, x in (("q", q), ("k", k))
    }  # fmt: skip
    turned = launched("rope::rope_forward", **normed, positions=positions, **rope)
    kept = launched(
        "kv_cache::kv_cache_append", k=turned["k"], v=v, slots=slots, k_cache=full(*cache),
        v_cache=full(*cache),
    )  # fmt: skip
    got = launched(
        "rope::qk_norm_rope_append", q=q, k=k, v=v, q_weight=weights["q"], k_weight=weights["k"],
        positions=positions, slots=slots, **norm, **rope, k_cache=full(*cache), v_cache=full(*cache),
    )  # fmt: skip
    assert got["q"].tobytes() == turned["q"].tobytes()
    assert got["k_cache"].tobytes() == kept["k_cache"].tobytes()
    assert got["v_cache"].tobytes() == kept["v_cache"].tobytes()


# Paged attention


def context(rng, lengths, heads, entries=None):
    """Return what attention over contexts takes: of each sequence as many entries as asked for, or as it needs."""
    query_heads, key_heads, width = heads
    needed = -(-max(lengths) // PAGE)
    pages = max(needed, 40)
    table = rng.integers(0, pages, (len(lengths), max(entries or needed, 1)), np.int32)
    return {
        "q": numbers(rng, len(lengths), query_heads, width), "k_cache": numbers(rng, pages, PAGE, key_heads, width),
        "v_cache": numbers(rng, pages, PAGE, key_heads, width), "block_table": table,
        "context_lens": np.array(lengths, np.int32), "scale": width**-0.5,
    }  # fmt: skip


def attended(launched, given, key="paged_decode::paged_decode_attn", **more):
    return launched(key, **given, **more, out=full(*given["q"].shape))["out"]


@pytest.mark.parametrize("heads", [MODEL_35B, MODEL_27B, (8, 2, 64), (32, 4, 128), (15, 5, 33)])
@pytest.mark.parametrize("lengths", [(1,), (20, 0, 64), (65, 300, 512, 513), (4096,), (1500,) * 40])
def test_gated_attention_has_the_bits_of_attention_then_gate(launched, heads, lengths):
    rng = np.random.default_rng(len(lengths))
    given = context(rng, lengths, heads)
    gate = numbers(rng, *given["q"].shape)
    plain = attended(launched, given)
    flat = (len(lengths), heads[0] * heads[2])
    expected = launched(
        "residual_add::sigmoid_gate_mul_batched", x=plain.reshape(flat), gate=gate.reshape(flat),
        out=full(*flat),
    )["out"]  # fmt: skip
    got = attended(launched, given, "paged_decode::paged_decode_attn_gated", gate=gate)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("heads", "rotary_dim"), [(MODEL_35B, 64), (MODEL_27B, 64), ((12, 1, 64), 22), ((32, 4, 128), 128)]
)
@pytest.mark.parametrize("lengths", [(1,), (20, 0, 64, 33), (65, 300, 513, 129), (1217,), (8257,)])
@pytest.mark.parametrize(("split_kv", "enough"), [(256, 528), (0, 528), (0, 1)], ids=["split_kv", "groups", "alone"])
def test_attention_from_projections_has_the_bits_of_its_parts(
    launched, monkeypatch, heads, rotary_dim, lengths, split_kv, enough
):
    monkeypatch.setattr(launch, "_SPLIT_KV_BLOCKS", split_kv)
    monkeypatch.setattr(launch, "_ENOUGH_BLOCKS", enough)
    rng = np.random.default_rng(len(lengths))
    rows, (_, key_heads, width) = len(lengths), heads
    needed = max(-(-length // PAGE) for length in lengths)
    given = context(rng, lengths, heads)
    own = rows * needed  # no two rows share a slot
    for name in ("k_cache", "v_cache"):
        given[name] = numbers(rng, own, PAGE, key_heads, width)
    given["block_table"] = rng.permutation(own).astype(np.int32).reshape(rows, needed)
    last = np.maximum(given["context_lens"] - 1, 0)
    slots = (given["block_table"][np.arange(rows), last // PAGE] * PAGE + last % PAGE).astype(np.int32)
    slots[3::4] = -1
    for name in ("k_cache", "v_cache"):
        given[name].reshape(-1, key_heads, width)[slots[slots >= 0]] = np.nan
    gate, k, v = (
        numbers(rng, *given["q"].shape),
        numbers(rng, rows, key_heads, width),
        numbers(rng, rows, key_heads, width),
    )
    shared = {
        "k": k, "v": v, "q_weight": numbers(rng, width), "k_weight": numbers(rng, width), "slots": slots,
        "positions": (last + 7).astype(np.int32), "eps": 1e-6, "weight_offset": 1.0, "rotary_dim": rotary_dim,
        "theta": 1e7,
    }  # fmt: skip
    caches = {name: given[name] for name in ("k_cache", "v_cache")}
    placed = launched("rope::qk_norm_rope_append", q=given["q"], **shared, **caches)
    parts = {name: placed[name] for name in ("q", *caches)}
    expected = attended(launched, {**given, **parts}, "paged_decode::paged_decode_attn_gated", gate=gate)
    got = launched("paged_decode::paged_decode_attn_fresh", **given, **shared, gate=gate, out=full(*given["q"].shape))
    assert got["q"].tobytes() == given["q"].tobytes()
    assert got["k_cache"].tobytes() == placed["k_cache"].tobytes()
    assert got["v_cache"].tobytes() == placed["v_cache"].tobytes()
    assert got["out"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("heads", [MODEL_35B, MODEL_27B, (8, 2, 64), (32, 4, 128), (6, 1, 128)])
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 200, 511, 512, 513, 577, 1100, 4095, 8300])
def test_row_has_the_same_bits_however_it_is_shared_out(launched, heads, length):
    rng = np.random.default_rng(length)
    given = context(rng, (length,), heads, entries=2048)
    narrow = -(-length // PAGE)
    results = []
    for rows, entries in ((1, narrow), (1, 2048), (3, narrow), (40, narrow), (40, 2048), (600, narrow)):
        repeated = {name: np.repeat(given[name], rows, axis=0) for name in ("q", "block_table", "context_lens")}
        repeated["block_table"] = np.ascontiguousarray(repeated["block_table"][:, :entries])
        out = attended(launched, {**given, **repeated})
        assert len({row.tobytes() for row in out}) == 1
        results.append(out[0].tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("rows", [1, 40, 600])
@pytest.mark.parametrize("wrong", [-1, 10**6, -(2**31)])
@pytest.mark.parametrize("at", [0, 40, 70, 129])
def test_row_with_a_page_outside_the_cache_is_zeros_and_its_neighbours_are_not(launched, rows, wrong, at):
    rng = np.random.default_rng(3)
    given = context(rng, (130 * PAGE,) * rows, (8, 2, 64))
    right = attended(launched, given)
    given["block_table"][-1, at] = wrong
    got = attended(launched, given)
    assert got[:-1].tobytes() == right[:-1].tobytes()
    assert not got[-1].astype(np.float32).any()
    given["context_lens"][-1] = at * PAGE  # that page is not needed
    assert got[:-1].tobytes() == attended(launched, given)[:-1].tobytes()


def test_launches_that_share_counters_and_scratch_give_the_same_bits_again(kernels):
    memory = device_memory(0)
    given = context(np.random.default_rng(5), (5000, 700), MODEL_35B)
    arrays = {name: memory.to(value) for name, value in given.items() if isinstance(value, np.ndarray)}
    out = memory.to(full(*given["q"].shape))
    again = kernels.kernel("paged_decode", "paged_decode_attn").prepare(
        **arrays, scale=given["scale"], out=out, overlap=True
    )
    results = []
    for _ in range(20):
        for _ in range(5):
            again()
        memory.wait()
        results.append(memory.back(out).tobytes())
    assert len(set(results)) == 1
