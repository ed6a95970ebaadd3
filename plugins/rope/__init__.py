"""Rotary position embedding: module ``rope``."""

from collections.abc import Iterable

from kernel_muster.plugins import _sequences
from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.kv_cache import cpu as kv_cache_cpu
from kernel_muster.plugins.norm import cpu as norm_cpu
from kernel_muster.plugins.rope import cpu, launch
from kernel_muster.plugins.rope.contracts import FORWARD, MROPE_INTERLEAVED, QK_NORM_ROPE_APPEND, YARN
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_SHARES = (_sequences, norm_cpu, kv_cache_cpu)


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contracts."""
    return FORWARD, MROPE_INTERLEAVED, YARN, QK_NORM_ROPE_APPEND


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernels for each target."""
    for contract, function, backend in (
        (FORWARD, cpu.rope_forward, launch.FORWARD),
        (MROPE_INTERLEAVED, cpu.rope_mrope_interleaved, launch.MROPE_INTERLEAVED),
        (YARN, cpu.rope_yarn, launch.YARN),
        (QK_NORM_ROPE_APPEND, cpu.qk_norm_rope_append, launch.QK_NORM_ROPE_APPEND),
    ):
        yield host_spec(f"rope::{contract.name}", contract, function, shares=_SHARES)
        yield device_spec(key=f"rope::{contract.name}", contract=contract.name, backend=backend)
