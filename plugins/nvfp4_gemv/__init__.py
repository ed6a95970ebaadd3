"""GEMVs of a few rows by NVFP4 weights: module ``w4a16_gemv``."""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _gates, _sequences
from kernel_muster.plugins._cuda import nvfp4_layout
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.causal_conv1d import cpu as convolution
from kernel_muster.plugins.nvfp4_gemv import contracts, cpu, launch, rows
from kernel_muster.plugins.nvfp4_gemv.gdn_in import GDN_IN
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_KERNELS = (
    (contracts.GEMV, cpu.w4a16_gemv, launch.GEMV8),
    (contracts.QG, cpu.w4a16_gemv_qg, launch.QG),
    (contracts.DUAL, cpu.w4a16_gemv_dual, launch.DUAL),
    (contracts.QGKV, cpu.w4a16_gemv_qgkv, launch.QGKV),
    (contracts.DUAL_SILU, cpu.w4a16_gemv_dual_silu, launch.DUAL_SILU),
)
_WIDER = {"w4a16_gemv_batch16": launch.GEMV16, f"w4a16_gemv_batch{contracts.WIDE_ROWS}": launch.GEMV_WIDE}


# Weights re-laid out for the tensor cores: from sm_80 on, whose mma takes BF16.
_mma_spec = partial(
    KernelSpec, archs=("sm_80+",), weight_layout=nvfp4_layout.LAYOUT, prepare=nvfp4_layout.to_mma_layout
)

_host_spec = partial(host_spec, shares=(rows, convolution, _gates, _sequences))


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return one contract for each kernel and row tier."""
    for tiers, _, _ in _KERNELS:
        yield from tiers
    yield from (contracts.QKVZ, GDN_IN)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return every tier; the wider ones are bit-identical to their one-row kernel run row by row."""
    for tiers, function, backend in _KERNELS:
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
