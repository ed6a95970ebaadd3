"""Causal attention of many new tokens a sequence over a paged cache: module ``prefill_paged``.

``prefill_paged_attn`` gives a row the bits of decode, by the same kernels. ``prefill_paged_attn_mma`` takes tiles of
rows, by mma.sync or by wgmma, and rounds weights to BF16: a row has bits of its own, whatever the other rows and
sequences are (as long as all numbers are finite). Few rows behind many tokens are shared out: contexts are cut in as
many parts as a launch has room for, by the sizes of its arguments and the device alone. A row that sees one part, as
all do where launches have enough rows, has the bits that it has in any launch, wherever its prompt was cut. One that
sees several has those of any launch that cuts its sequence's context alike: one as long, in as many.
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
