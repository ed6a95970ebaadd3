"""GEMVs of a few rows: NVFP4 weights in module ``w4a16_gemv``, BF16 weights in ``gemv`` and ``gemm``."""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _gates, _sequences
from kernel_muster.plugins._cuda import nvfp4_layout
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.causal_conv1d import cpu as convolution
from kernel_muster.plugins.w4a16_gemv import contracts, cpu, dense_launch, launch, rows
from kernel_muster.plugins.w4a16_gemv.gdn_in import GDN_IN
from kernel_muster.registry.contract import nvfp4, weights
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_FORMS = (
    (contracts.GEMV, cpu.w4a16_gemv, launch.GEMV8),
    (contracts.QG, cpu.w4a16_gemv_qg, launch.QG),
    (contracts.DUAL, cpu.w4a16_gemv_dual, launch.DUAL),
    (contracts.QGKV, cpu.w4a16_gemv_qgkv, launch.QGKV),
    (contracts.DUAL_SILU, cpu.w4a16_gemv_dual_silu, launch.DUAL_SILU),
)
_WIDER = {"w4a16_gemv_batch16": launch.GEMV16, f"w4a16_gemv_batch{contracts.WIDE_ROWS}": launch.GEMV_WIDE}
_GEMV, _GEMM = (
    (dense_launch.DENSE_GEMV, dense_launch.DENSE_GEMV_HOPPER),
    (dense_launch.DENSE_GEMM, dense_launch.DENSE_GEMM_HOPPER),
)
_DENSE = (
    ("gemv::dense_gemv_bf16", contracts.DENSE_GEMV, (), *_GEMV),
    ("gemv::dense_gemv_bf16_batchm", contracts.DENSE_GEMV_BATCHM, ("gemv::dense_gemv_bf16",), *_GEMV),
    ("gemm::dense_gemm_bf16", contracts.DENSE_GEMM, (), *_GEMM),
)


# Weights re-laid out for the tensor cores: from sm_80 on, whose mma takes BF16.
_mma_spec = partial(
    KernelSpec, archs=("sm_80+",), weight_layout=nvfp4_layout.LAYOUT, prepare=nvfp4_layout.to_mma_layout
)

_host_spec = partial(host_spec, shares=(rows, convolution, _gates, _sequences))


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return one contract a form and row tier."""
    for tiers, _, _ in _FORMS:
        yield from tiers
    yield from (contracts.QKVZ, GDN_IN)
    for _, contract, *_ in _DENSE:
        yield contract


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return every tier; the wider ones are bit-identical to their one-row kernel run row by row."""
    for tiers, function, backend in _FORMS:
        base = f"w4a16_gemv::{tiers[0].name}"
        for tier in tiers:
            key = f"w4a16_gemv::{tier.name}"
            same = () if key == base else (base,)
            device = _WIDER.get(tier.name, backend)
            yield _host_spec(key, tier, function, weight_layout=nvfp4.ROW_MAJOR, bit_identical_to=same)
            yield _mma_spec(key=key, contract=tier.name, backend=device, bit_identical_to=same)
            if device is launch.GEMV16:
                hopper = launch.GEMV16_HOPPER
                yield _mma_spec(key=key, contract=tier.name, archs=("sm_90a",), backend=hopper, bit_identical_to=same)
    inputs = (
        (contracts.QKVZ, cpu.w4a16_gemv_qkvz, launch.QKVZ),
        (GDN_IN, cpu.w4a16_gemv_gdn_in, launch.GDN_IN),
    )
    for contract, host, device in inputs:
        key = f"w4a16_gemv::{contract.name}"
        yield _host_spec(key, contract, host, weight_layout=nvfp4.ROW_MAJOR)
        yield _mma_spec(key=key, contract=contract.name, backend=device)
    for key, contract, same, device, hopper in _DENSE:
        layout = weights.BF16_ROW_MAJOR
        yield _host_spec(key, contract, cpu.dense_bf16, weight_layout=layout, bit_identical_to=same)
        for archs, backend in ((("sm_80+",), device), (("sm_90a",), hopper)):
            yield KernelSpec(
                key=key, contract=contract.name, archs=archs, backend=backend, weight_layout=layout,
                bit_identical_to=same,
            )  # fmt: skip
