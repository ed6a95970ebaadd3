"""Attention of one new token a sequence over a paged cache: module ``paged_decode``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.paged_decode import launch
from kernel_muster.plugins.paged_decode.contracts import DECODE, DECODE_GATED
from kernel_muster.plugins.paged_decode.cpu import paged_decode_attn, paged_decode_attn_gated
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contracts."""
    return DECODE, DECODE_GATED


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernels, for the host and for a device, where one source serves both."""
    for contract, function in ((DECODE, paged_decode_attn), (DECODE_GATED, paged_decode_attn_gated)):
        key = f"paged_decode::{contract.name}"
        yield host_spec(key, contract, function)
        yield KernelSpec(key=key, contract=contract.name, archs=("sm_80+",), backend=launch.DECODE)
