"""Rotary position embedding: module ``rope``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.rope import cpu, launch
from kernel_muster.plugins.rope.contracts import FORWARD, MROPE_INTERLEAVED, YARN
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contracts."""
    return FORWARD, MROPE_INTERLEAVED, YARN


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernels for each target."""
    for contract, function, backend in (
        (FORWARD, cpu.rope_forward, launch.FORWARD),
        (MROPE_INTERLEAVED, cpu.rope_mrope_interleaved, launch.MROPE_INTERLEAVED),
        (YARN, cpu.rope_yarn, launch.YARN),
    ):
        yield host_spec(f"rope::{contract.name}", contract, function)
        yield device_spec(key=f"rope::{contract.name}", contract=contract.name, backend=backend)
