"""Contracts of products with BF16 weights, for a few rows or for any number."""

from kernel_muster.plugins._contracts import dot_tolerance, projection, projection_cases
from kernel_muster.registry.contract.contracts import Case, Contract
from kernel_muster.registry.contract.signature import WeightParam

# By the most rows of a launch (None: any number), the rows of its cases.
_COUNTS: dict[int | None, tuple[int, ...]] = {1: (1,), 16: (1, 15, 16), None: (1, 17, 65)}


def _dense(name: str, rows: int | None) -> Contract:
    counts = _COUNTS[rows]
    cases = (
        *projection_cases(counts),
        *((Case("five_groups", {"M": 1, "N": 5, "K": 80}),) if rows else (Case("odd_k", {"M": 1, "N": 5, "K": 77}),)),
        Case("whole_model_k", {"M": 1, "N": 70, "K": 5120}, tolerance=dot_tolerance(5120)),
        Case("many_features", {"M": max(counts), "N": 4300, "K": 592}, tolerance=dot_tolerance(592)),
    )
    if rows is None:
        cases = (*cases, *_gemm_cases())
    limit = "" if rows is None else ", at most 1 row" if rows == 1 else f", at most {rows} rows"
    summary = f"out = x w^T for BF16 weights{limit}"
    return projection(name, summary, WeightParam("w", "bf16", ("N", "K")), cases, rows)


def _gemm_cases() -> tuple[Case, ...]:
    """Return cases of a few rows and of many: whole tiles and one above, few features and many, K of any step."""
    few = ((3, 256, 2048), (16, 520, 2048), (9, 1030, 272), (16, 96, 5120), (33, 70, 2064), (13, 4300, 144))
    many = ((128, 640, 256), (129, 513, 264), (257, 520, 1016), (70, 1, 8), (65, 1030, 2048), (300, 96, 5120))
    more = ((2100, 65, 512), (17, 9001, 72), (5000, 97, 64))
    sizes = (
        *few,
        *many,
        *more,
        (1100, 70, 400),
        (1030, 4100, 64),
        (1030, 3500, 200),
        (500, 4800, 72),
        (200, 5000, 72),
        (100, 600, 0),
    )
    return tuple(Case(f"m_{m}_n_{n}_k_{k}", {"M": m, "N": n, "K": k}, tolerance=dot_tolerance(k)) for m, n, k in sizes)


DENSE_GEMV = _dense("dense_gemv_bf16", 1)
DENSE_GEMV_BATCHM = _dense("dense_gemv_bf16_batchm", 16)
DENSE_GEMM = _dense("dense_gemm_bf16", None)
