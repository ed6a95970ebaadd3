"""Attention of one new token a sequence over a paged cache: module ``paged_decode``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.paged_decode import launch
from kernel_muster.plugins.paged_decode.contracts import DECODE
from kernel_muster.plugins.paged_decode.cpu import paged_decode_attn
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract."""
    return (DECODE,)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernel, for the host and for a device."""
    key = "paged_decode::paged_decode_attn"
    yield host_spec(key, DECODE, paged_decode_attn)
    yield KernelSpec(key=key, contract=DECODE.name, archs=("sm_80+",), backend=launch.DECODE)
