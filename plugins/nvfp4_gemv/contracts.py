"""Contracts of the NVFP4 GEMV. Each row tier has a contract, because its limit of M differs."""

import numpy as np
from kernel_muster.plugins._contracts import (
    BF16_ROUNDING,
    DEEPEST_K,
    F32_ROUNDING,
    Dims,
    deep_cases,
    dot_tolerance,
    exact_sigmoid,
    exact_weight,
    f64,
    projection,
    projection_cases,
)
from kernel_muster.plugins.nvfp4_gemv.rows import qkvz_rows
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, WeightParam

#: Rows of the launch that takes 32 at a time.
WIDE_ROWS = 256
#: Depths K of the models' projections, which kernels unroll. Cases have them with small and with larger N.
DEPTHS = (2048, 5120)
_X = TensorParam("x", "bf16", ("M", "K"))
_WHOLE_GROUPS = (("K", nvfp4.GROUP),)
# Few features of query and gate or many, and of key and value: Q, head_dim, A and B.
_QGKV_SIZES = (
    ("few", 40, 20, 17, 33), ("many", 520, 260, 530, 520), ("many_and_few", 520, 260, 40, 50),
    ("few_and_many", 40, 20, 520, 530),
)  # fmt: skip


def _tier(name: str, rows: int) -> str:
    return name if rows == 1 else f"{name}_batch{rows}"


def _rows(rows: int) -> tuple[int, ...]:
    return (1,) if rows == 1 else (1, rows - 1, rows) if rows > 2 else (1, 2)


def _rows_text(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def _gemv(rows: int) -> Contract:
    name, weight = _tier("w4a16_gemv", rows), WeightParam("w", "nvfp4", ("N", "K"))
    summary = f"out = x w^T for NVFP4 weights and at most {_rows_text(rows)} of BF16"
    if rows == WIDE_ROWS:
        most = Case("most_rows", {"M": rows, "N": 33, "K": 80})
        return projection(name, summary, weight, (*projection_cases((1, 17, 32, 70)), *deep_cases(35), most), rows)
    # One, eight and sixteen rows cover all tiers: code is compiled for eight and for sixteen.
    deep = deep_cases(9 if rows == 16 else rows) if rows in (1, 8, 16) else ()
    return projection(name, summary, weight, (*projection_cases(_rows(rows)), *deep), rows)


def _exact_qg(arguments: Arguments, dims: Dims) -> dict[str, object]:
    y = f64(arguments["x"]) @ exact_weight(arguments["w"]).T
    heads = y.reshape(y.shape[0], dims["Q"] // dims["head_dim"], 2, dims["head_dim"])
    flat = (y.shape[0], dims["Q"])
    return {"out_q": heads[:, :, 0].reshape(flat), "out_gate": heads[:, :, 1].reshape(flat)}


def _qg(rows: int) -> Contract:
    """Rows of ``w`` are grouped by head, ``[q (head_dim) | gate (head_dim)]``; the outputs are not."""
    params = (
        _X,
        WeightParam("w", "nvfp4", ("2*Q", "K")),
        ScalarParam("head_dim", "i32", minimum=1),
        TensorParam("out_q", "bf16", ("M", "Q"), "out"),
        TensorParam("out_gate", "bf16", ("M", "Q"), "out"),
    )
    sizes = (
        ("one_head", 8, 8, 16),
        ("odd_heads", 15, 5, 48),
        ("wide_heads", 512, 256, 64),
        ("deep_k", 12, 4, DEEPEST_K),
        *((f"k_{k}", 520, 260, k) for k in DEPTHS),
    )
    cases = [
        Case(name, {"M": rows, "Q": q, "head_dim": d, "K": k}, tolerance=dot_tolerance(k)) for name, q, d, k in sizes
    ]
    cases += [Case(f"rows_{m}", {"M": m, "Q": 24, "head_dim": 8, "K": 80}) for m in range(rows)]
    signature = Signature(params, multiples=(*_WHOLE_GROUPS, ("Q", "head_dim")), limits=(("M", rows),))
    summary = f"query and gate of gated attention in one projection, at most {_rows_text(rows)}"
    name = _tier("w4a16_gemv_qg", rows)
    return Contract(name, summary, signature, _exact_qg, tuple(cases), dot_tolerance(DEEPEST_K))


def _exact_dual(arguments: Arguments, dims: Dims) -> dict[str, object]:
    x = f64(arguments["x"])
    return {"out_a": x @ exact_weight(arguments["w_a"]).T, "out_b": x @ exact_weight(arguments["w_b"]).T}


def _dual(rows: int) -> Contract:
    params = (
        _X,
        WeightParam("w_a", "nvfp4", ("A", "K")),
        WeightParam("w_b", "nvfp4", ("B", "K")),
        TensorParam("out_a", "bf16", ("M", "A"), "out"),
        TensorParam("out_b", "bf16", ("M", "B"), "out"),
    )
    sizes = (
        ("one_group", 1, 2, 16),
        ("unequal", 129, 33, 80),
        ("one_side_empty", 0, 5, 32),
        ("deep_k", 3, 7, DEEPEST_K),
        *((f"k_{k}", 520, 530, k) for k in DEPTHS),
    )
    cases = [Case(name, {"M": rows, "A": a, "B": b, "K": k}, tolerance=dot_tolerance(k)) for name, a, b, k in sizes]
    cases += [Case(f"rows_{m}", {"M": m, "A": 40, "B": 40, "K": 112}) for m in range(rows)]
    signature = Signature(params, multiples=_WHOLE_GROUPS, limits=(("M", rows),))
    summary = f"two projections of one input in one launch, at most {_rows_text(rows)}"
    return Contract(
        _tier("w4a16_gemv_dual", rows), summary, signature, _exact_dual, tuple(cases), dot_tolerance(DEEPEST_K)
    )


def _exact_qgkv(arguments: Arguments, dims: Dims) -> dict[str, object]:
    return _exact_qg(arguments, dims) | _exact_dual(arguments, dims)


def _qgkv(rows: int) -> Contract:
    """Query and gate as in ``w4a16_gemv_qg``, key and value as the two weights of ``w4a16_gemv_dual``."""
    params = (
        _X,
        WeightParam("w", "nvfp4", ("2*Q", "K")),
        WeightParam("w_a", "nvfp4", ("A", "K")),
        WeightParam("w_b", "nvfp4", ("B", "K")),
        ScalarParam("head_dim", "i32", minimum=1),
        TensorParam("out_q", "bf16", ("M", "Q"), "out"),
        TensorParam("out_gate", "bf16", ("M", "Q"), "out"),
        TensorParam("out_a", "bf16", ("M", "A"), "out"),
        TensorParam("out_b", "bf16", ("M", "B"), "out"),
    )
    sizes = (
        ("one_head", 8, 8, 8, 8, 16),
        ("odd_heads", 15, 5, 5, 10, 48),
        ("no_key", 24, 8, 0, 3, 80),
        ("deep_k", 12, 4, 4, 4, DEEPEST_K),
        *((f"{name}_{k}", q, d, a, b, k) for k in DEPTHS for name, q, d, a, b in _QGKV_SIZES),
    )
    cases = [
        Case(name, {"M": rows, "Q": q, "head_dim": d, "A": a, "B": b, "K": k}, tolerance=dot_tolerance(k))
        for name, q, d, a, b, k in sizes
    ]
    cases += [Case(f"rows_{m}", {"M": m, "Q": 24, "head_dim": 8, "A": 8, "B": 16, "K": 112}) for m in range(rows)]
    signature = Signature(params, multiples=(*_WHOLE_GROUPS, ("Q", "head_dim")), limits=(("M", rows),))
    summary = f"query, gate, key and value of gated attention in one launch, at most {_rows_text(rows)}"
    name, tolerance = _tier("w4a16_gemv_qgkv", rows), dot_tolerance(DEEPEST_K)
    return Contract(name, summary, signature, _exact_qgkv, tuple(cases), tolerance)


def scaled_x(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Return x ``[M, K]``, scaled so that its dot products with unit Gaussian rows are unit Gaussians."""
    x = rng.standard_normal((dims["M"], dims["K"])) / np.sqrt(dims["K"])
    return {"x": x.astype(numpy_dtype("bf16"))}


def scaled_dot_error(depth: int) -> float:
    """Bound the error of ``depth`` FP32 additions, as :func:`dot_tolerance`, for such an x."""
    return float(36 * np.sqrt(depth) * F32_ROUNDING)


def _exact_dual_silu(arguments: Arguments, dims: Dims) -> dict[str, object]:
    x = f64(arguments["x"])
    gate, up = (x @ exact_weight(arguments[name]).T for name in ("w_gate", "w_up"))
    return {"out": gate * exact_sigmoid(gate) * up}


def _dual_silu_tolerance(depth: int) -> Tolerance:
    return Tolerance(
        relative=4 * BF16_ROUNDING,
        absolute=5.0 * (0.25 * BF16_ROUNDING + 2 * scaled_dot_error(depth)),
        derivation="gate, up and output are rounded to BF16 (2^-8 each); silu'(g) * g is below 1.28 silu(g) for g > 0 "
        "and below 0.25 for g < 0, there times |up| < 5; FP32 sums of K products scaled by 1/sqrt(K) err by "
        f"36 sqrt(K) * 2^-24, K = {depth}",
    )


def _dual_silu(rows: int) -> Contract:
    params = (
        _X,
        WeightParam("w_gate", "nvfp4", ("N", "K")),
        WeightParam("w_up", "nvfp4", ("N", "K")),
        TensorParam("out", "bf16", ("M", "N"), "out"),
    )
    sizes = (
        ("one_group", 1, 16),
        ("whole_tiles", 64, 128),
        ("odd_features", 129, 80),
        ("no_features", 0, 32),
        ("deep_k", 7, DEEPEST_K),
        *((f"few_k_{k}", 70, k) for k in DEPTHS),
        *((f"k_{k}", 530, k) for k in DEPTHS),
    )
    cases = [Case(name, {"M": rows, "N": n, "K": k}, tolerance=_dual_silu_tolerance(k)) for name, n, k in sizes]
    cases += [Case(f"rows_{m}", {"M": m, "N": 40, "K": 112}) for m in {0, 1, rows - 1} - {rows}]
    signature = Signature(params, multiples=_WHOLE_GROUPS, limits=(("M", rows),))
    summary = f"silu(x w_gate^T) * (x w_up^T), both rounded to BF16 first, at most {_rows_text(rows)}"
    name, tolerance = _tier("w4a16_gemv_dual_silu", rows), _dual_silu_tolerance(DEEPEST_K)
    return Contract(name, summary, signature, _exact_dual_silu, tuple(cases), tolerance, inputs=scaled_x)


def _exact_qkvz(arguments: Arguments, dims: Dims) -> dict[str, object]:
    y = f64(arguments["x"]) @ exact_weight(arguments["w"]).T
    qkv, z = qkvz_rows(dims["key_heads"], dims["key_dim"], dims["value_heads"], dims["value_dim"])
    return {"out_qkv": y[:, qkv], "out_z": y[:, z]}


def _qkvz() -> Contract:
    params = (
        _X,
        WeightParam("w", "nvfp4", ("2*key_heads*key_dim + 2*value_heads*value_dim", "K")),
        ScalarParam("key_heads", "i32", minimum=1),
        ScalarParam("key_dim", "i32", minimum=1),
        ScalarParam("value_heads", "i32", minimum=1),
        ScalarParam("value_dim", "i32", minimum=1),
        TensorParam("out_qkv", "bf16", ("M", "2*key_heads*key_dim + value_heads*value_dim"), "out"),
        TensorParam("out_z", "bf16", ("M", "value_heads*value_dim"), "out"),
    )
    heads = ("key_heads", "key_dim", "value_heads", "value_dim")
    sizes = (
        ("one_head", 1, (1, 8, 1, 8), 16),
        ("two_values_a_key", 1, (2, 8, 4, 8), 80),
        ("three_values_a_key", 1, (2, 5, 6, 7), 48),
        ("deep_k", 1, (1, 4, 2, 4), DEEPEST_K),
        ("no_rows", 0, (1, 8, 1, 8), 16),
        *((f"k_{k}", 1, (2, 130, 4, 66), k) for k in DEPTHS),
    )
    cases = [
        Case(name, {"M": m, "K": k, **dict(zip(heads, h, strict=True))}, tolerance=dot_tolerance(k))
        for name, m, h, k in sizes
    ]
    signature = Signature(params, (*_WHOLE_GROUPS, ("value_heads", "key_heads")), (("M", 1),))
    summary = "GDN's fused input projection, split into q|k|v and z for one row"
    tolerance = dot_tolerance(DEEPEST_K)
    return Contract("w4a16_gemv_qkvz", summary, signature, _exact_qkvz, tuple(cases), tolerance)


#: By rows a launch: 1, 2 ... 8, 16 and 256.
GEMV = tuple(_gemv(rows) for rows in (*range(1, 9), 16, WIDE_ROWS))
QG = tuple(_qg(rows) for rows in (1, 2, 3))
QGKV = tuple(_qgkv(rows) for rows in (1, 2, 3))
DUAL = tuple(_dual(rows) for rows in (1, 2, 3))
DUAL_SILU = tuple(_dual_silu(rows) for rows in (1, 2, 3, 8))
QKVZ = _qkvz()
