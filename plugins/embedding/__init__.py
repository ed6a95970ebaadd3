"""The embedding table: module ``embedding``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.embedding import launch
from kernel_muster.plugins.embedding.contracts import GATHER
from kernel_muster.plugins.embedding.cpu import gather
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract."""
    return (GATHER,)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernel for each target."""
    yield host_spec("embedding::gather", GATHER, gather)
    yield device_spec(key="embedding::gather", contract=GATHER.name, backend=launch.GATHER)
