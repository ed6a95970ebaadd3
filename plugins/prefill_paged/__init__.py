"""Causal attention of many new tokens of each sequence over a paged cache: module ``prefill_paged``.

``prefill_paged_attn`` gives a row the bits of decode, by the same kernels. ``prefill_paged_attn_mma`` computes tiles of
rows with mma.sync or wgmma, and rounds weights to BF16. The bits of a row do not depend on other rows and sequences, as
long as all numbers are finite.

Few rows after many tokens use split-KV. The number of splits depends on the sizes of the arguments and on the device
only. A row with one split has the same bits in any launch; with enough rows all have one. A row with several splits has
the same bits in any launch that splits the same context length in the same way.
"""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _sequences
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.paged_decode import cpu as paged_decode_cpu
from kernel_muster.plugins.paged_decode.launch import ROWS
from kernel_muster.plugins.prefill_paged import launch
from kernel_muster.plugins.prefill_paged.contracts import PREFILL, PREFILL_MMA
from kernel_muster.plugins.prefill_paged.cpu import prefill_paged_attn
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_host_spec = partial(host_spec, shares=(_sequences, paged_decode_cpu))


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contracts."""
    return (PREFILL, PREFILL_MMA)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernels, for the host and for a device."""
    key, same = "prefill_paged::prefill_paged_attn", ("paged_decode::paged_decode_attn",)
    yield _host_spec(key, PREFILL, prefill_paged_attn)
    yield KernelSpec(key=key, contract=PREFILL.name, archs=("sm_80+",), backend=ROWS, bit_identical_to=same)
    mma = "prefill_paged::prefill_paged_attn_mma"
    yield _host_spec(mma, PREFILL_MMA, prefill_paged_attn)
    yield KernelSpec(key=mma, contract=PREFILL_MMA.name, archs=("sm_80+",), backend=launch.PREFILL_MMA)
    yield KernelSpec(key=mma, contract=PREFILL_MMA.name, archs=("sm_90a",), backend=launch.PREFILL_HOPPER)
