"""Host kernels of the gated_delta_rule family. Kernels of many rows loop over the step of one row.

Shapes, with S sequences, M rows and R slots: ``qkv [rows, 2 keys + values]`` BF16 is ``[q | k | v]`` after the
convolution, keys is ``key_heads * key_dim`` and values is ``value_heads * value_dim``; ``decay, beta
[rows, value_heads]`` FP32; ``state [R, value_heads, key_dim, value_dim]`` FP32, changed in place at ``slots [S]``
int32; ``out [rows, values]`` BF16. A slot of -1 is padding: its rows of ``out`` are zero and no state moves. Other
slots outside the pool, or named twice, and offsets that do not share the rows out raise ContractError, before anything
is written.
"""

import numpy as np
from kernel_muster.plugins._reference import F32, Array, bf16, f32, ordered_sum
from kernel_muster.plugins._sequences import PADDING, check_slots, rows_of
from kernel_muster.plugins.norm.cpu import rms_norm_gated

_EPS = np.float32(1e-6)


def gated_delta_rule_decode(
    qkv: Array,
    decay: Array,
    beta: Array,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    state: Array,
    slots: Array,
    out: Array,
) -> None:
    """Advance one row a sequence: rows are sequences."""
    check_slots("gated_delta_rule_decode", slots, state.shape[0])
    heads = (key_heads, key_dim, value_heads, value_dim)
    for row, slot in enumerate(slots.tolist()):
        out[row] = _step(qkv[row], decay[row], beta[row], heads, state, slot)


def gated_delta_rule_decode_norm(
    qkv: Array,
    decay: Array,
    beta: Array,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    gate: Array,
    norm_weight: Array,
    eps: np.float32,
    state: Array,
    slots: Array,
    out: Array,
) -> None:
    """Advance one row a sequence, and write the gated norm of each head of the result, rounded to BF16 before it.

    ``gate [S, values]`` BF16, ``norm_weight [value_dim]`` FP32 or BF16: the bits are those of the decode step and
    :func:`rms_norm_gated` one after the other.
    """
    check_slots("gated_delta_rule_decode_norm_strided", slots, state.shape[0])
    heads, by_head = (key_heads, key_dim, value_heads, value_dim), (value_heads, value_dim)
    for row, slot in enumerate(slots.tolist()):
        mixed = bf16(_step(qkv[row], decay[row], beta[row], heads, state, slot))
        if slot == PADDING:
            out[row] = 0
        else:
            rms_norm_gated(
                mixed.reshape(by_head), gate[row].reshape(by_head), norm_weight, eps, out[row].reshape(by_head)
            )


def gated_delta_rule_prefill(
    qkv: Array,
    cu_rows: Array,
    decay: Array,
    beta: Array,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    state: Array,
    slots: Array,
    out: Array,
) -> None:
    """Advance sequence s by its rows ``cu_rows[s]`` to ``cu_rows[s + 1]``, one after the other."""
    owner, heads = "gated_delta_rule_prefill", (key_heads, key_dim, value_heads, value_dim)
    check_slots(owner, slots, state.shape[0])
    for slot, rows in zip(slots.tolist(), rows_of(owner, cu_rows, qkv.shape[0]), strict=True):
        for row in rows:
            out[row] = _step(qkv[row], decay[row], beta[row], heads, state, slot)


def gated_delta_rule_verify_n(
    qkv: Array,
    cu_rows: Array,
    decay: Array,
    beta: Array,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    state: Array,
    slots: Array,
    out: Array,
    out_states: Array,
) -> None:
    """Run :func:`gated_delta_rule_prefill`, and write the state after each row to ``out_states``.

    To roll back a sequence to row r, copy ``out_states[r]`` (``[M, value_heads, key_dim, value_dim]``
    FP32) to its slot: the state then is the one of plain decode, bit for bit.
    """
    owner, heads = "gated_delta_rule_verify_n", (key_heads, key_dim, value_heads, value_dim)
    check_slots(owner, slots, state.shape[0])
    for slot, rows in zip(slots.tolist(), rows_of(owner, cu_rows, qkv.shape[0]), strict=True):
        for row in rows:
            out[row] = _step(qkv[row], decay[row], beta[row], heads, state, slot)
            out_states[row] = 0 if slot == PADDING else state[slot]


def gated_delta_rule_chunk(
    qkv: Array,
    decay: Array,
    beta: Array,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    state: Array,
    slots: Array,
    out: Array,
    out_states: Array,
) -> None:
    """Run :func:`gated_delta_rule_verify_n` for the few rows of one sequence; ``slots [1]``."""
    all_rows = np.array([0, qkv.shape[0]], np.int32)
    heads = (key_heads, key_dim, value_heads, value_dim)
    gated_delta_rule_verify_n(qkv, all_rows, decay, beta, *heads, state, slots, out, out_states)


def _step(qkv: Array, decay: F32, beta: F32, heads: tuple[int, int, int, int], state: Array, slot: int) -> F32:
    """Move the state in ``slot`` on by one row ``qkv [2 keys + values]``, and return ``[values]``.

    Per value head, with its key head's q and k normalised to length 1 and q scaled by ``key_dim^-0.5``::

        state = decay * state;  state += k (x) beta * (v - k . state);  out = q . state

    FP32 throughout, sums over key_dim ordered by its length only. Source: Yang et al., Gated Delta Networks (2024),
    equation 10; normalisation, scale and grouping as in Qwen3-Next.
    """
    key_heads, key_dim, value_heads, value_dim = heads
    if slot == PADDING:
        return np.zeros(value_heads * value_dim, np.float32)
    keys = key_heads * key_dim
    q, k = (f32(part).reshape(key_heads, key_dim) for part in (qkv[:keys], qkv[keys : 2 * keys]))
    v = f32(qkv[2 * keys :]).reshape(value_heads, value_dim)
    q, k = _for_values(_unit(q) * np.float32(key_dim**-0.5), value_heads), _for_values(_unit(k), value_heads)
    memory: F32 = state[slot]
    memory *= decay[:, None, None]
    delta = (v - _read(k, memory)) * beta[:, None]
    memory += k[:, :, None] * delta[:, None, :]
    return _read(q, memory).ravel()


def _unit(vectors: F32) -> F32:
    """Scale each vector ``[H, D]`` to length 1."""
    squares = ordered_sum(vectors * vectors)[:, None]
    unit: F32 = vectors * (np.float32(1) / np.sqrt(squares + _EPS))
    return unit


def _for_values(vectors: F32, value_heads: int) -> F32:
    """Repeat each key head's vector for its value heads, which are adjacent."""
    return np.repeat(vectors, value_heads // vectors.shape[0], axis=0)


def _read(vectors: F32, memory: F32) -> F32:
    """Return ``vectors [H, Dk] . memory [H, Dk, Dv]``."""
    return ordered_sum((vectors[:, :, None] * memory).swapaxes(1, 2))
