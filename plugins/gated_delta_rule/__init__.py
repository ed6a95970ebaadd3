"""The recurrent mixer of GDN layers: module ``gated_delta_rule``.

Kernels of several rows (prefill, chunk of 2 or 3, verify) loop over the step of one row, so that a state does not
depend on the division of its rows into launches. ``gated_delta_rule_prefill_chunked`` computes 64 rows of a sequence at
a time with mma.sync, and has other bits. On a device they depend neither on other sequences nor on the division between
chunks, as long as all numbers are finite.
"""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _sequences
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.gated_delta_rule import contracts, cpu, launch
from kernel_muster.plugins.norm import cpu as norm_cpu
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_DECODE, _PREFILL = "gated_delta_rule::gated_delta_rule_decode", "gated_delta_rule::gated_delta_rule_prefill"
_host_spec = partial(host_spec, shares=(_sequences, norm_cpu))
_device_spec = partial(KernelSpec, archs=("sm_80+",), backend=launch.DELTA_RULE)


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract of each kernel."""
    yield from (contracts.DECODE, contracts.DECODE_STRIDED, contracts.DECODE_NORM_STRIDED)
    yield from (contracts.PREFILL, contracts.PREFILL_CHUNKED, contracts.CHUNK2, contracts.CHUNK3, contracts.VERIFY)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return every kernel."""
    yield _host_spec(_DECODE, contracts.DECODE, cpu.gated_delta_rule_decode)
    strided, norm_strided = f"{_DECODE}_strided", f"{_DECODE}_norm_strided"
    yield _host_spec(strided, contracts.DECODE_STRIDED, cpu.gated_delta_rule_decode, bit_identical_to=(_DECODE,))
    yield _host_spec(norm_strided, contracts.DECODE_NORM_STRIDED, cpu.gated_delta_rule_decode_norm)
    yield _host_spec(_PREFILL, contracts.PREFILL, cpu.gated_delta_rule_prefill)
    yield _host_spec(f"{_PREFILL}_chunked", contracts.PREFILL_CHUNKED, cpu.gated_delta_rule_prefill)
    for contract in (contracts.CHUNK2, contracts.CHUNK3):
        key = f"gated_delta_rule::{contract.name}"
        yield _host_spec(key, contract, cpu.gated_delta_rule_chunk, bit_identical_to=(_DECODE,))
    verify = "gated_delta_rule::gated_delta_rule_verify_n"
    yield _host_spec(verify, contracts.VERIFY, cpu.gated_delta_rule_verify_n, bit_identical_to=(_PREFILL,))
    yield from _on_a_device()


def _on_a_device() -> Iterable[KernelSpec]:
    """Return the CUDA kernels. One kernel serves all contracts except those with a norm and in chunks."""
    for contract, same in (
        (contracts.DECODE, ()),
        (contracts.DECODE_STRIDED, (_DECODE,)),
        (contracts.PREFILL, (_DECODE,)),
        (contracts.CHUNK2, (_DECODE,)),
        (contracts.CHUNK3, (_DECODE,)),
        (contracts.VERIFY, (_PREFILL,)),
    ):
        yield _device_spec(key=f"gated_delta_rule::{contract.name}", contract=contract.name, bit_identical_to=same)
    for contract, backend in (
        (contracts.DECODE_NORM_STRIDED, launch.DECODE_NORM),
        (contracts.PREFILL_CHUNKED, launch.CHUNKED),
    ):
        yield _device_spec(key=f"gated_delta_rule::{contract.name}", contract=contract.name, backend=backend)
