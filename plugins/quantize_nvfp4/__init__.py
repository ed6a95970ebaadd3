"""Run-time quantisation to NVFP4, and the transposed copy: module ``quantize_nvfp4``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.quantize_nvfp4 import contracts, cpu, launch
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_KERNELS = (
    (contracts.QUANTIZE, cpu.quantize_bf16_to_nvfp4, launch.QUANTIZE),
    (contracts.QUANTIZE_T, cpu.quantize_bf16_to_nvfp4_t, launch.QUANTIZE_T),
    (contracts.TRANSPOSE, cpu.transpose_nvfp4, launch.TRANSPOSE),
)


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return all contracts."""
    return [contract for contract, _, _ in _KERNELS]


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return each kernel for the host and, written with Numba, for devices."""
    for contract, function, backend in _KERNELS:
        key = f"quantize_nvfp4::{contract.name}"
        yield host_spec(key, contract, function)
        yield KernelSpec(key=key, contract=contract.name, archs=("sm_80+",), backend=backend)
