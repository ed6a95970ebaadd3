"""Run-time quantisation to NVFP4, and the transposed copy: module ``quantize_nvfp4``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.quantize_nvfp4.contracts import QUANTIZE, TRANSPOSE
from kernel_muster.plugins.quantize_nvfp4.cpu import quantize_bf16_to_nvfp4, transpose_nvfp4
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return both contracts."""
    return QUANTIZE, TRANSPOSE


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return both kernels."""
    yield host_spec("quantize_nvfp4::quantize_bf16_to_nvfp4", QUANTIZE, quantize_bf16_to_nvfp4)
    yield host_spec("quantize_nvfp4::transpose_nvfp4", TRANSPOSE, transpose_nvfp4)
