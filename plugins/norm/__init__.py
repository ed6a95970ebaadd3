"""RMS norms: module ``norm``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.norm import contracts, cpu
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return contracts.RMS_NORM, contracts.RMS_NORM_RESIDUAL, contracts.RMS_NORM_GATED


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels."""
    yield host_spec("norm::rms_norm", contracts.RMS_NORM, cpu.rms_norm)
    yield host_spec("norm::rms_norm_residual", contracts.RMS_NORM_RESIDUAL, cpu.rms_norm_residual)
    yield host_spec("norm::rms_norm_gated", contracts.RMS_NORM_GATED, cpu.rms_norm_gated)
