"""The host kernel of the prefill_paged family."""

import numpy as np
from kernel_muster.plugins._reference import Array
from kernel_muster.plugins._sequences import rows_of
from kernel_muster.plugins.paged_decode.cpu import check_context, paged_decode_attn
from kernel_muster.registry.errors import ContractError

_OWNER = "prefill_paged::prefill_paged_attn"


def prefill_paged_attn(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    cu_rows: Array,
    context_lens: Array,
    scale: np.float32,
    out: Array,
) -> None:
    """Write causal attention of rows ``cu_rows[s]`` to ``cu_rows[s + 1]`` for each s, ``q, out [M, Hq, D]`` BF16.

    ``cu_rows [S + 1]`` is int32; ``context_lens [S]`` int32 counts a sequence's tokens in the cache, of which its rows
    are the last ones. Each row is :func:`paged_decode_attn` of the context up to itself, and has its bits; shapes,
    numerics and refusals are those. A context shorter than its rows raises ContractError.
    """
    check_context(_OWNER, k_cache, block_table, context_lens)
    sequences = rows_of(_OWNER, cu_rows, q.shape[0])
    for sequence, (rows, length) in enumerate(zip(sequences, context_lens.tolist(), strict=True)):
        if length < len(rows):
            raise ContractError(
                f"{_OWNER}: context_lens[{sequence}] is {length}, expected at least its {len(rows)} rows"
            )
    for sequence, rows in enumerate(sequences):
        table = block_table[sequence : sequence + 1]
        for row in rows:
            prefix = context_lens[sequence : sequence + 1] - (rows.stop - 1 - row)
            one = slice(row, row + 1)
            paged_decode_attn(q[one], k_cache, v_cache, table, prefix, scale, out[one])
