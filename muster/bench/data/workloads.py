"""Launches of one decode step of a model, at a given number of sequences."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from kernel_muster.bench.data.attention import attention_side
from kernel_muster.bench.data.gated_delta import gdn
from kernel_muster.bench.data.inputs import Arguments, Data, Sizes, Workload, whole_arrays
from kernel_muster.registry.contract.weights import Bf16Weight


def elementwise(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return norms, activations, residual and gates."""
    eps = {"eps": 1e-6}
    zero_centred = {**eps, "weight_offset": 1.0}
    wide, heads = m.heads * m.head_dim, rows * m.value_heads

    def like(*names: str, shape: tuple[int, ...] = (rows, m.hidden)) -> Arguments:
        return {name: data.bf16(*shape) for name in names}

    yield whole_arrays(
        m.name, "norm::rms_norm", f"{rows} x {m.hidden}",
        lambda: {**like("x"), "weight": data.bf16(m.hidden), **zero_centred, **like("out")}, ("out",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "norm::rms_norm", f"heads {rows * m.heads} x {m.head_dim}",
        lambda: {
            **like("x", "out", shape=(rows * m.heads, m.head_dim)), "weight": data.bf16(m.head_dim), **zero_centred,
        },
        ("out",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "norm::rms_norm_residual", f"{rows} x {m.hidden}",
        lambda: {**like("x", "residual"), "weight": data.bf16(m.hidden), **zero_centred, **like("out")},
        ("out",), ("residual",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "norm::rms_norm_gated", f"{heads} x {m.gdn_dim}",
        lambda: {**like("x", "gate", "out", shape=(heads, m.gdn_dim)), "weight": data.f32(m.gdn_dim), **eps}, ("out",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "silu::silu_mul", f"{rows} x {m.intermediate}",
        lambda: like("gate", "up", "out", shape=(rows, m.intermediate)), ("out",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "residual_add::bf16_residual_add", f"{rows} x {m.hidden}", lambda: like("x", "residual"),
        (), ("residual",),
    )  # fmt: skip
    gate = "residual_add::sigmoid_gate_mul" + ("_batched" if rows > 1 else "")
    yield whole_arrays(m.name, gate, f"{rows} x {wide}", lambda: like("x", "gate", "out", shape=(rows, wide)), ("out",))


def ends(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return the first and last kernels of a step: embedding, argmax, sampling, verify."""
    row = 2 * rows * m.hidden
    ids = np.random.default_rng(5).integers(0, m.vocabulary, rows)
    table = data.bf16(m.vocabulary, m.hidden)
    yield Workload(
        m.name, "embedding::gather", f"{rows} x {m.hidden}", row, row,
        lambda: {"table": table, "ids": data.i32(ids), "out": data.empty(rows, m.hidden)},
    )  # fmt: skip
    logits = {"logits": (rows, m.vocabulary)}

    def made(**more: Any) -> Arguments:
        return {"logits": data.bf16(*logits["logits"]), **more}

    yield whole_arrays(
        m.name, "argmax::argmax_bf16", f"{rows} x {m.vocabulary}", lambda: made(out=data.empty(rows, dtype="i32")),
        ("out",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "sampling::topk_bf16", f"{rows} x {m.vocabulary}, k = 20",
        lambda: made(k=20, out_values=data.empty(rows, 20, dtype="f32"), out_ids=data.empty(rows, 20, dtype="i32")),
        ("out_values", "out_ids"),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "sampling::sample_top_k_top_p", f"{rows} x {m.vocabulary}",
        lambda: made(
            temperature=data.f32(rows, low=0.7), top_k=data.i32([20] * rows), top_p=data.f32(rows, low=0.9),
            uniform=data.f32(rows, low=0.1), out=data.empty(rows, dtype="i32"),
        ),
        ("out",),
    )  # fmt: skip
    yield whole_arrays(
        m.name, "sampling::verify_greedy", f"{rows} x 3",
        lambda: {
            "draft_ids": data.i32(np.ones((rows, 3))), "target_ids": data.i32(np.ones((rows, 4))),
            "out_accepted": data.empty(rows, dtype="i32"),
        },
        ("out_accepted",),
    )  # fmt: skip


def dense(data: Data, m: Sizes, rows: int, features: int, key: str | None = None) -> Workload:
    """Return a BF16 projection of the hidden state."""
    name = key or ("gemv::dense_gemv_bf16" if rows == 1 else "gemv::dense_gemv_bf16_batchm")

    def make() -> Arguments:
        weight = Bf16Weight(data.bf16(features, m.hidden))
        return {"x": data.bf16(rows, m.hidden), "w": weight, "out": data.empty(rows, features)}

    reads = 2 * m.hidden * (features + rows)
    return Workload(m.name, name, f"{rows} x {features} x {m.hidden}", reads, 2 * rows * features, make)


def step(data: Data, m: Sizes, rows: int) -> Iterator[Workload]:
    """Return every launch of one step with ``rows`` sequences, except projections of NVFP4 weights."""
    yield from elementwise(data, m, rows)
    yield from attention_side(data, m, rows)
    yield from gdn(data, m, rows)
    yield from ends(data, m, rows)
    if m.experts:
        yield dense(data, m, rows, m.experts, "gemm::dense_gemm_bf16")
    if rows <= 16:
        yield dense(data, m, rows, 2 * m.value_heads)
        yield dense(data, m, rows, m.heads * m.head_dim)
