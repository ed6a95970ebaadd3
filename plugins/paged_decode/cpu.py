"""The host kernel of the paged_decode family."""

import numpy as np
from kernel_muster.plugins._reference import F32, Array, f32, ordered_sum, sigmoid
from kernel_muster.registry.errors import ContractError


def paged_decode_attn(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    context_lens: Array,
    scale: np.float32,
    out: Array,
) -> None:
    """Write ``out = softmax(scale q k^T) v`` for one row a sequence, ``q, out [S, Hq, D]`` BF16.

    ``k_cache, v_cache [P, B, Hk, D]`` BF16 hold pages of B tokens; token t of sequence s is in page
    ``block_table[s, t // B]`` (``[S, L]`` int32) and there at ``t % B``, ``context_lens [S]`` int32 counts them. Later
    tokens are not read. Query head h reads key head ``h // (Hq / Hk)``. Products are exact in FP32, sums over D and
    over the context are ordered by their length only, the exponential is rounded to FP32 and the result once to BF16. A
    context of 0 gives zeros; one longer than its L pages, or a page outside the cache, raises ContractError.
    """
    pages = check_context("paged_decode::paged_decode_attn", k_cache, block_table, context_lens)
    for row, (table, length) in enumerate(zip(pages, context_lens.tolist(), strict=True)):
        if length == 0:
            out[row] = 0
        else:
            keys, values = (_tokens(cache, table, length) for cache in (k_cache, v_cache))
            out[row] = _attend(f32(q[row]), keys, values, scale)


def paged_decode_attn_gated(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    context_lens: Array,
    gate: Array,
    scale: np.float32,
    out: Array,
) -> None:
    """Write :func:`paged_decode_attn`, rounded to BF16, times ``sigmoid(gate)``, ``gate [S, Hq, D]`` BF16.

    The bits are those of ``sigmoid_gate_mul`` after it.
    """
    paged_decode_attn(q, k_cache, v_cache, block_table, context_lens, scale, out)
    for row in range(out.shape[0]):
        out[row] = f32(out[row]) * sigmoid(f32(gate[row]))


def check_context(owner: str, k_cache: Array, block_table: Array, context_lens: Array) -> list[Array]:
    """Return the pages that each sequence's context uses; ContractError if they do not hold it."""
    count, page_size = k_cache.shape[:2]
    most = block_table.shape[1] * page_size
    used = []
    for row, length in enumerate(context_lens.tolist()):
        if not 0 <= length <= most:
            raise ContractError(f"{owner}: context_lens[{row}] is {length}, expected 0 to the {most} of its pages")
        table = block_table[row, : -(-length // page_size)]
        wrong = np.flatnonzero((table < 0) | (table >= count))
        if wrong.size:
            at = int(wrong[0])
            raise ContractError(f"{owner}: block_table[{row}, {at}] is {table[at]}, expected 0 <= page < {count}")
        used.append(table)
    return used


def _tokens(cache: Array, table: Array, length: int) -> F32:
    """Gather one sequence's context ``[Hk, T, D]``."""
    pages = cache[table]
    return f32(pages.reshape(-1, *pages.shape[2:])[:length].transpose(1, 0, 2))


def _attend(q: F32, keys: F32, values: F32, scale: np.float32) -> F32:
    """Return ``[Hq, D]`` of ``q [Hq, D]``, one key head after the other."""
    heads = keys.shape[0]
    grouped = q.reshape(heads, -1, q.shape[1])
    result = np.empty_like(grouped)
    for head in range(heads):
        for query in range(grouped.shape[1]):
            scores = ordered_sum(keys[head] * grouped[head, query]) * scale
            powers = np.exp((scores - scores.max()).astype(np.float64)).astype(np.float32)
            weighted = ordered_sum(values[head].T * powers)
            result[head, query] = weighted / ordered_sum(powers)
    return result.reshape(q.shape)
