"""Rotary position embedding: module ``rope``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.rope import cpu
from kernel_muster.plugins.rope.contracts import FORWARD, MROPE_INTERLEAVED
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return both contracts."""
    return FORWARD, MROPE_INTERLEAVED


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return both kernels."""
    yield host_spec("rope::rope_forward", FORWARD, cpu.rope_forward)
    yield host_spec("rope::rope_mrope_interleaved", MROPE_INTERLEAVED, cpu.rope_mrope_interleaved)
