"""RMS norms: module ``norm``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.norm import contracts, cpu, launch
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return contracts.RMS_NORM, contracts.RMS_NORM_RESIDUAL, contracts.RMS_NORM_GATED


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels for each target."""
    for contract, function, backend in (
        (contracts.RMS_NORM, cpu.rms_norm, launch.RMS_NORM),
        (contracts.RMS_NORM_RESIDUAL, cpu.rms_norm_residual, launch.RMS_NORM_RESIDUAL),
        (contracts.RMS_NORM_GATED, cpu.rms_norm_gated, launch.RMS_NORM_GATED),
    ):
        yield host_spec(f"norm::{contract.name}", contract, function)
        yield device_spec(key=f"norm::{contract.name}", contract=contract.name, backend=backend)
