"""Greedy sampling: module ``argmax``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.argmax import launch
from kernel_muster.plugins.argmax.contracts import ARGMAX
from kernel_muster.plugins.argmax.cpu import argmax_bf16
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract."""
    return (ARGMAX,)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernel for each target."""
    yield host_spec("argmax::argmax_bf16", ARGMAX, argmax_bf16)
    yield device_spec(key="argmax::argmax_bf16", contract=ARGMAX.name, backend=launch.ARGMAX)
