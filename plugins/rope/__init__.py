"""Rotary position embedding: module ``rope``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.rope import cpu
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
    """Return the kernels."""
    yield host_spec("rope::rope_forward", FORWARD, cpu.rope_forward)
    yield host_spec("rope::rope_mrope_interleaved", MROPE_INTERLEAVED, cpu.rope_mrope_interleaved)
    yield host_spec("rope::rope_yarn", YARN, cpu.rope_yarn)
