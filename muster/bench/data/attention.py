"""Launches of attention: rotary embedding, cache, paged decode and prefill."""

from collections.abc import Iterator

import numpy as np
from kernel_muster.bench.data.inputs import PAGE, Arguments, Data, Sizes, Workload, whole_arrays


def attention_side(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return the kernels between a projection and attention."""
    q, k = (rows, m.heads, m.head_dim), (rows, m.kv_heads, m.head_dim)
    positions = np.arange(rows) + 4000
    turned = 2 * rows * (m.heads + m.kv_heads) * m.rotary_dim
    rope = {"rotary_dim": m.rotary_dim, "theta": 1e7}
    yield Workload(
        m.name, "rope::rope_forward", f"{rows} rows", turned, turned,
        lambda: {"q": data.bf16(*q), "k": data.bf16(*k), "positions": data.i32(positions), **rope},
    )  # fmt: skip
    sections = dict(zip(("section_t", "section_h", "section_w"), m.sections, strict=True))
    yield Workload(
        m.name, "rope::rope_mrope_interleaved", f"{rows} rows", turned, turned,
        lambda: {"q": data.bf16(*q), "k": data.bf16(*k), "positions": data.i32([positions] * 3), **sections, **rope},
    )  # fmt: skip
    pages, row_bytes = 64, 2 * 2 * rows * m.kv_heads * m.head_dim
    cache = (pages, PAGE, m.kv_heads, m.head_dim)
    together = 2 * rows * m.heads * m.head_dim + row_bytes
    yield Workload(
        m.name, "rope::qk_norm_rope_append", f"{rows} rows", together, together,
        lambda: {
            "q": data.bf16(*q), "k": data.bf16(*k), "v": data.bf16(*k), "q_weight": data.bf16(m.head_dim),
            "k_weight": data.bf16(m.head_dim), "positions": data.i32(positions),
            "slots": data.i32(np.arange(rows) * PAGE + 3), "eps": 1e-6, "weight_offset": 1.0, **rope,
            "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
        },
    )  # fmt: skip
    yield Workload(
        m.name, "kv_cache::kv_cache_append", f"{rows} rows", row_bytes, row_bytes,
        lambda: {
            "k": data.bf16(*k), "v": data.bf16(*k), "slots": data.i32(np.arange(rows) * PAGE + 3),
            "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
        },
    )  # fmt: skip
    width = m.heads * m.head_dim
    yield whole_arrays(
        m.name, "ssm_preprocess::deinterleave_qg", f"{rows} x {2 * width}",
        lambda: {
            "qg": data.bf16(rows, 2 * width), "head_dim": m.head_dim,
            "out_q": data.empty(rows, width), "out_gate": data.empty(rows, width),
        },
        ("out_q", "out_gate"),
    )  # fmt: skip


#: Variants of attention at decode: plain, gated, and gated from the projections on.
PAGED_FORMS = ("", "_gated", "_fresh")


def paged(data: Data, m: Sizes, sequences: int, context: int, form: str = "") -> Workload:
    """Return decode attention of every sequence over its own context, with pages in any order."""
    entries = -(-context // PAGE)
    pages = sequences * entries
    table = np.random.default_rng(3).permutation(pages).reshape(sequences, entries)
    cache = (pages, PAGE, m.kv_heads, m.head_dim)
    q, k = (sequences, m.heads, m.head_dim), (sequences, m.kv_heads, m.head_dim)
    last = context - 1
    slots = table[:, last // PAGE] * PAGE + last % PAGE

    def fresh() -> Arguments:
        return {
            "k": data.bf16(*k), "v": data.bf16(*k), "q_weight": data.bf16(m.head_dim),
            "k_weight": data.bf16(m.head_dim), "positions": data.i32([last] * sequences), "slots": data.i32(slots),
            "eps": 1e-6, "weight_offset": 1.0, "rotary_dim": m.rotary_dim, "theta": 1e7,
        }  # fmt: skip

    def make() -> Arguments:
        return {
            "q": data.bf16(*q), "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
            "block_table": data.i32(table), "context_lens": data.i32([context] * sequences),
            **({"gate": data.bf16(*q)} if form else {}), **(fresh() if form == "_fresh" else {}),
            "scale": m.head_dim**-0.5, "out": data.empty(*q),
        }  # fmt: skip

    rows = 2 * int(np.prod(q))
    size = 2 * 2 * sequences * context * m.kv_heads * m.head_dim + (rows if form else 0)
    return Workload(m.name, f"paged_decode::paged_decode_attn{form}", f"{sequences} x {context}", size, rows, make)


def prefill(data: Data, m: Sizes, rows: int, before: int, *, is_tiled: bool = False) -> Workload:
    """Return prefill attention of one sequence, row by row or in tiles of rows."""
    context = rows + before
    pages = -(-context // PAGE)
    cache, q = (pages, PAGE, m.kv_heads, m.head_dim), (rows, m.heads, m.head_dim)

    def make() -> Arguments:
        return {
            "q": data.bf16(*q), "k_cache": data.bf16(*cache), "v_cache": data.bf16(*cache),
            "block_table": data.i32([np.arange(pages)]), "cu_rows": data.i32([0, rows]),
            "context_lens": data.i32([context]), "scale": m.head_dim**-0.5, "out": data.empty(*q),
        }  # fmt: skip

    size = 2 * 2 * context * m.kv_heads * m.head_dim + 2 * int(np.prod(q))
    key = "prefill_paged::prefill_paged_attn" + ("_mma" if is_tiled else "")
    return Workload(m.name, key, f"{rows} after {before}", size, 2 * int(np.prod(q)), make)
