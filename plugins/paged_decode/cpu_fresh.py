"""The host kernel that goes from projections to gated attention."""

from typing import Any

import numpy as np
from kernel_muster.plugins._reference import Array
from kernel_muster.plugins._sequences import PADDING
from kernel_muster.plugins.paged_decode.cpu import check_context, paged_decode_attn_gated
from kernel_muster.plugins.rope.cpu import qk_norm_rope_append
from kernel_muster.registry.errors import ContractError


def paged_decode_attn_fresh(
    q: Array,
    slots: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    context_lens: Array,
    gate: Array,
    scale: np.float32,
    out: Array,
    **turning: Any,
) -> None:
    """Run ``qk_norm_rope_append`` and then ``paged_decode_attn_gated``, without a change of q.

    ``turning`` are the other arguments of the former, by their names in the contract. A row's slot is that of the last
    token of its context, or -1 if that token is already in the cache. Another slot, and arguments that either kernel
    refuses, raise ContractError before any write.
    """
    owner = "paged_decode::paged_decode_attn_fresh"
    pages = check_context(owner, k_cache, block_table, context_lens)
    _check_newest(owner, pages, k_cache.shape[1], context_lens, slots)
    turned = q.copy()
    qk_norm_rope_append(q=turned, slots=slots, k_cache=k_cache, v_cache=v_cache, **turning)
    paged_decode_attn_gated(turned, k_cache, v_cache, block_table, context_lens, gate, scale, out)


def _check_newest(owner: str, pages: list[Array], page_size: int, context_lens: Array, slots: Array) -> None:
    for row, (used, length, slot) in enumerate(zip(pages, context_lens.tolist(), slots.tolist(), strict=True)):
        newest = int(used[-1]) * page_size + (length - 1) % page_size if length else PADDING
        if slot not in (newest, PADDING):
            raise ContractError(f"{owner}: slots[{row}] is {slot}, expected {newest}, its last token's, or {PADDING}")
