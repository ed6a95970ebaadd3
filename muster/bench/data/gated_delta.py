"""Launches of the gated delta net: convolution, gates and the delta rule."""

from collections.abc import Iterator

import numpy as np
from kernel_muster.bench.data.inputs import Arguments, Data, Sizes, Workload, whole_arrays


def gdn(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return the kernels of a GDN layer with one row a sequence."""
    heads = (rows, m.value_heads)
    group = m.key_heads * 2 * m.gdn_dim + 2 * m.value_heads * m.gdn_dim
    values = m.value_heads * m.gdn_dim
    sizes = _head_sizes(m)
    yield whole_arrays(
        m.name, "ssm_preprocess::deinterleave_qkvz", f"{rows} x {group}",
        lambda: {
            "qkvz": data.bf16(rows, group), **sizes,
            "out_qkv": data.empty(rows, m.channels), "out_z": data.empty(rows, values),
        },
        ("out_qkv", "out_z"),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "ssm_preprocess::compute_gdn_gates", f"{rows} x {m.value_heads}",
        lambda: {
            "a": data.bf16(*heads), "b": data.bf16(*heads), "a_log": data.f32(m.value_heads),
            "dt_bias": data.f32(m.value_heads), "out_decay": data.empty(*heads, dtype="f32"),
            "out_beta": data.empty(*heads, dtype="f32"),
        },
        ("out_decay", "out_beta"),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "causal_conv1d::causal_conv1d_update", f"{rows} x {m.channels}",
        lambda: {
            "x": data.bf16(rows, m.channels), "weight": data.bf16(m.channels, m.taps),
            "state": data.bf16(rows, m.channels, m.taps - 1), "slots": data.i32(np.arange(rows)),
            "out": data.empty(rows, m.channels),
        },
        ("out",), ("state",),
    )  # fmt: skip

    def common(total: int) -> Arguments:
        return {
            "qkv": data.bf16(total, m.channels), "decay": data.f32(total, m.value_heads, low=0.5),
            "beta": data.f32(total, m.value_heads, low=0.1), **sizes,
        }  # fmt: skip

    def pool(sequences: int) -> Arguments:
        state = data.f32(sequences, m.value_heads, m.gdn_dim, m.gdn_dim)
        return {"state": state, "slots": data.i32(np.arange(sequences))}

    decode = "gated_delta_rule::gated_delta_rule_decode"
    yield whole_arrays(
        m.name, decode if rows == 1 else f"{decode}_strided", f"{rows} sequences",
        lambda: {**common(rows), **pool(rows), "out": data.empty(rows, values)}, ("out",), ("state",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, f"{decode}_norm_strided", f"{rows} sequences",
        lambda: {
            **common(rows), "gate": data.bf16(rows, values), "norm_weight": data.f32(m.gdn_dim), "eps": 1e-6,
            **pool(rows), "out": data.empty(rows, values),
        },
        ("out",), ("state",),
    )  # fmt: skip
    drafts = 4
    yield whole_arrays(
        m.name, "gated_delta_rule::gated_delta_rule_verify_n", f"{rows} x {drafts} rows",
        lambda: {
            **common(rows * drafts), "cu_rows": data.i32(np.arange(rows + 1) * drafts), **pool(rows),
            "out": data.empty(rows * drafts, values),
            "out_states": data.empty(rows * drafts, m.value_heads, m.gdn_dim, m.gdn_dim, dtype="f32"),
        },
        ("out", "out_states"), ("state",),
    )  # fmt: skip


def _head_sizes(m: Sizes) -> Arguments:
    return {"key_heads": m.key_heads, "key_dim": m.gdn_dim, "value_heads": m.value_heads, "value_dim": m.gdn_dim}


def gdn_prefill(data: Data, m: Sizes, rows: int, is_chunked: bool = False) -> Workload:
    """Return the delta rule over a prompt, row by row or in chunks."""
    values = m.value_heads * m.gdn_dim
    return whole_arrays(
        m.name, f"gated_delta_rule::gated_delta_rule_prefill{'_chunked' if is_chunked else ''}", f"{rows} rows",
        lambda: {
            "qkv": data.bf16(rows, m.channels), "cu_rows": data.i32([0, rows]),
            "decay": data.f32(rows, m.value_heads, low=0.5), "beta": data.f32(rows, m.value_heads, low=0.1),
            **_head_sizes(m), "state": data.f32(1, m.value_heads, m.gdn_dim, m.gdn_dim), "slots": data.i32([0]),
            "out": data.empty(rows, values),
        },
        ("out",), ("state",),
    )  # fmt: skip
