"""Shared by the contracts of the built-in families: float64 references, tolerances and cases.

References and host kernels have only the exact decoding of weights in common.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import Dim, Signature, TensorParam, WeightParam
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]
Dims = Mapping[str, int]

#: Half a unit in the last place, relative: BF16 has 8 significant bits, FP32 has 24.
BF16_ROUNDING = 2.0**-8
F32_ROUNDING = 2.0**-24


def f64(values: Array) -> F64:
    """Widen to float64."""
    return np.asarray(values).astype(np.float64)


def exact_weight(weight: Any) -> F64:
    """Return a logical weight ``(..., N, K)`` in float64."""
    return f64(weight.values) if weight.quant == "bf16" else nvfp4.dequantize(weight)


def exact_sigmoid(values: F64) -> F64:
    """Return the logistic function in float64, by another formula than :func:`sigmoid`."""
    return 0.5 + 0.5 * np.tanh(0.5 * values)


def exact_project(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    """Return ``out = x w^T`` in float64."""
    return {"out": f64(arguments["x"]) @ exact_weight(arguments["w"]).T}


def dot_tolerance(depth: int, output_rounding: float = BF16_ROUNDING) -> Tolerance:
    """Bound a dot product of at most ``depth`` terms, each the product of two unit Gaussians.

    A partial sum stays below 6 sqrt(depth), six standard deviations. Each of at most depth additions rounds it by at
    most 2^-24 of that, with no preferred sign, so that all together stay below 6 sqrt(depth) times one of them:
    36 * depth * 2^-24. Storing adds one rounding of the result.
    """
    return Tolerance(
        relative=output_rounding,
        absolute=36 * depth * F32_ROUNDING,
        derivation=f"one rounding of the output ({output_rounding:g}) and {depth} FP32 additions in any order, each "
        "of a partial sum below 6 sqrt(depth) (six standard deviations of unit Gaussian x and w), of random sign: "
        f"36 * {depth} * 2^-24",
    )


EXACT = Tolerance(0.0, 0.0, "integers, or every operation rounded as the contract says: no freedom is left")

DEEPEST_K = 1040


def projection_cases(rows: tuple[int, ...]) -> tuple[Case, ...]:
    """Return ``(M, N, K)`` cases for the given row counts: whole, partial and one above a tile, odd N, deep K."""
    features = (
        ("one_group", 1, 16),
        ("odd_features", 33, 48),
        ("whole_tiles", 64, 128),
        ("one_feature_above_a_tile", 129, 80),
        ("partial_k_step", 40, 272),
        ("deep_k", 7, DEEPEST_K),
    )
    most = max(rows)
    full = [Case(name, {"M": most, "N": n, "K": k}) for name, n, k in features]
    fewer = [Case(f"rows_{m}", {"M": m, "N": 37, "K": 112}) for m in rows if m != most]
    return (*full, *fewer, Case("no_rows", {"M": 0, "N": 16, "K": 32}), Case("no_features", {"M": 1, "N": 0, "K": 32}))


def deep_cases(rows: int) -> tuple[Case, ...]:
    """Return cases of the depths that kernels unroll for, each with its own bound: few features, and more than few."""
    sizes = ((17, 2048), (17, 4096), (17, 5120), (17, 6144), (17, 17408), (1040, 2048), (1040, 5120))
    return tuple(Case(f"n_{n}_k_{k}", {"M": rows, "N": n, "K": k}, tolerance=dot_tolerance(k)) for n, k in sizes)


def projection(
    name: str, summary: str, weight: WeightParam, cases: tuple[Case, ...], most_rows: int | None = None
) -> Contract:
    """Return the contract of ``out = x w^T``: ``x [M, K]`` BF16, ``w (N, K)``, ``out [M, N]`` BF16."""
    params = (TensorParam("x", "bf16", ("M", "K")), weight, TensorParam("out", "bf16", ("M", "N"), "out"))
    limits: tuple[tuple[Dim, Dim], ...] = () if most_rows is None else (("M", most_rows),)
    # NVFP4 has a scale for 16 k; for a GEMV, BF16 rows of 16 k begin where a vector load may.
    whole_groups = weight.quant == "nvfp4" or most_rows is not None
    multiples: tuple[tuple[Dim, Dim], ...] = (("K", nvfp4.GROUP),) if whole_groups else ()
    signature = Signature(params, multiples=multiples, limits=limits)
    return Contract(name, summary, signature, exact_project, cases, dot_tolerance(DEEPEST_K))


# Gate and up are BF16 and given: no rounding but the output's, and a handful of FP32 operations and one exponential.
_SILU_TOLERANCE = Tolerance(
    relative=BF16_ROUNDING + 16 * F32_ROUNDING,
    absolute=1e-37,
    derivation="one rounding to BF16 (2^-8), 16 FP32 roundings for the exponential and four operations; absolute: the "
    "smallest normal number",
)


def _exact_silu_mul(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    gate = f64(arguments["gate"])
    return {"out": gate * exact_sigmoid(gate) * f64(arguments["up"])}


def silu_mul_contract(name: str) -> Contract:
    """Return the contract of ``out = silu(gate) * up``, all ``[M, I]`` BF16."""
    sizes = (
        ("one_row", 1, 128),
        ("one_value", 3, 1),
        ("one_above_a_tile", 17, 1025),
        ("odd", 5, 77),
        ("no_rows", 0, 64),
    )
    params = (
        TensorParam("gate", "bf16", ("M", "I")),
        TensorParam("up", "bf16", ("M", "I")),
        TensorParam("out", "bf16", ("M", "I"), "out"),
    )
    cases = tuple(Case(case, {"M": m, "I": i}) for case, m, i in sizes)
    summary = "out = silu(gate) * up, FP32 inside"
    return Contract(name, summary, Signature(params), _exact_silu_mul, cases, _SILU_TOLERANCE)


def random_cu_rows(dims: Dims, rng: "np.random.Generator") -> Array:
    """Return offsets ``[S + 1]`` that share M rows out; of three sequences and more one is empty."""
    rows, sequences = dims["M"], dims["S"]
    if sequences == 0:
        return np.zeros(1, np.int32)
    inner = np.sort(rng.integers(0, rows + 1, sequences - 1))
    if sequences > 2:
        inner[1] = inner[0]
    return np.concatenate([[0], inner, [rows]]).astype(np.int32)


def random_slots(dims: Dims, rng: "np.random.Generator") -> Array:
    """Return a slot of R for each of S sequences, in any order; of three and more the last is padding."""
    slots = rng.permutation(dims["R"])[: dims["S"]].astype(np.int32)
    slots[2:][-1:] = -1
    return slots
