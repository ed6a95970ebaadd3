"""GEMVs of a few rows: NVFP4 weights in module ``w4a16_gemv``, BF16 weights in ``gemv`` and ``gemm``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.w4a16_gemv import contracts, cpu
from kernel_muster.registry import nvfp4, weights
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec

_FORMS = (
    (contracts.GEMV, cpu.w4a16_gemv),
    (contracts.QG, cpu.w4a16_gemv_qg),
    (contracts.DUAL, cpu.w4a16_gemv_dual),
)
_DENSE = (
    ("gemv::dense_gemv_bf16", contracts.DENSE_GEMV, ()),
    ("gemv::dense_gemv_bf16_batchm", contracts.DENSE_GEMV_BATCHM, ("gemv::dense_gemv_bf16",)),
    ("gemm::dense_gemm_bf16", contracts.DENSE_GEMM, ()),
)


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return one contract a form and row tier."""
    for tiers, _ in _FORMS:
        yield from tiers
    yield contracts.QKVZ
    for _, contract, _ in _DENSE:
        yield contract


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return every tier; the wider ones are bit-identical to their one-row kernel run row by row."""
    for (single, *tiers), function in _FORMS:
        base = f"w4a16_gemv::{single.name}"
        yield host_spec(base, single, function, weight_layout=nvfp4.ROW_MAJOR)
        for tier in tiers:
            key = f"w4a16_gemv::{tier.name}"
            yield host_spec(key, tier, function, weight_layout=nvfp4.ROW_MAJOR, bit_identical_to=(base,))
    qkvz = contracts.QKVZ
    yield host_spec(f"w4a16_gemv::{qkvz.name}", qkvz, cpu.w4a16_gemv_qkvz, weight_layout=nvfp4.ROW_MAJOR)
    for key, contract, same in _DENSE:
        layout = weights.BF16_ROW_MAJOR
        yield host_spec(key, contract, cpu.dense_bf16, weight_layout=layout, bit_identical_to=same)
