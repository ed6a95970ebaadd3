"""The activation of a SwiGLU: module ``silu``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.silu import launch
from kernel_muster.plugins.silu.contracts import SILU_MUL
from kernel_muster.plugins.silu.cpu import silu_mul_rows
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract."""
    return (SILU_MUL,)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernel for each target."""
    yield host_spec("silu::silu_mul", SILU_MUL, silu_mul_rows)
    yield device_spec(key="silu::silu_mul", contract=SILU_MUL.name, backend=launch.SILU_MUL)
