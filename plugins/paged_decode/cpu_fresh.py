"""The host kernel that goes from projections to gated attention."""

import numpy as np
from kernel_muster.plugins._reference import Array
from kernel_muster.plugins._sequences import PADDING
from kernel_muster.plugins.paged_decode.cpu import check_context, paged_decode_attn_gated
from kernel_muster.plugins.rope.cpu import qk_norm_rope_append
from kernel_muster.registry.errors import ContractError


def paged_decode_attn_fresh(
    q: Array,
    k: Array,
    v: Array,
    q_weight: Array,
    k_weight: Array,
    positions: Array,
    slots: Array,
    eps: np.float32,
    weight_offset: np.float32,
    rotary_dim: int,
    theta: np.float32,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    context_lens: Array,
    gate: Array,
    scale: np.float32,
    out: Array,
) -> None:
    """Write what ``qk_norm_rope_append`` and ``paged_decode_attn_gated`` after it give; q is left as it is.

    A row's slot is the place of the last token of its context, or -1 where that one is in the cache already: another
    place raises ContractError, as does what the two refuse, and nothing is written.
    """
    owner = "paged_decode::paged_decode_attn_fresh"
    pages = check_context(owner, k_cache, block_table, context_lens)
    _check_newest(owner, pages, k_cache.shape[1], context_lens, slots)
    turned = q.copy()
    qk_norm_rope_append(
        turned, k, v, q_weight, k_weight, positions, slots, eps, weight_offset, rotary_dim, theta, k_cache, v_cache
    )
    paged_decode_attn_gated(turned, k_cache, v_cache, block_table, context_lens, gate, scale, out)


def _check_newest(owner: str, pages: list[Array], page_size: int, context_lens: Array, slots: Array) -> None:
    for row, (used, length, slot) in enumerate(zip(pages, context_lens.tolist(), slots.tolist(), strict=True)):
        newest = int(used[-1]) * page_size + (length - 1) % page_size if length else PADDING
        if slot not in (newest, PADDING):
            raise ContractError(f"{owner}: slots[{row}] is {slot}, expected {newest}, its last token's, or {PADDING}")
