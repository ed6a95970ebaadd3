"""Attention of one new token a sequence over a paged cache: module ``paged_decode``."""

from collections.abc import Iterable

from kernel_muster.plugins import _sequences
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.kv_cache import cpu as kv_cache_cpu
from kernel_muster.plugins.norm import cpu as norm_cpu
from kernel_muster.plugins.paged_decode import cpu, launch
from kernel_muster.plugins.paged_decode.contracts import DECODE, DECODE_FRESH, DECODE_GATED
from kernel_muster.plugins.paged_decode.cpu import paged_decode_attn, paged_decode_attn_gated
from kernel_muster.plugins.paged_decode.cpu_fresh import paged_decode_attn_fresh
from kernel_muster.plugins.rope import cpu as rope_cpu
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_SHARES = (_sequences, cpu, norm_cpu, rope_cpu, kv_cache_cpu)


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contracts."""
    return DECODE, DECODE_GATED, DECODE_FRESH


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernels, for the host and for a device, where one source serves plain and gated attention."""
    for contract, function, shares, backend in (
        (DECODE, paged_decode_attn, (), launch.ROWS),
        (DECODE_GATED, paged_decode_attn_gated, (), launch.ROWS),
        (DECODE_FRESH, paged_decode_attn_fresh, _SHARES, launch.DECODE_FRESH),
    ):
        key = f"paged_decode::{contract.name}"
        yield host_spec(key, contract, function, shares=shares)
        yield KernelSpec(key=key, contract=contract.name, archs=("sm_80+",), backend=backend)
