"""Choosing tokens, and accepting drafted ones: module ``sampling``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.sampling import cpu
from kernel_muster.plugins.sampling.contracts import SAMPLE, TOPK, VERIFY_GREEDY
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return SAMPLE, TOPK, VERIFY_GREEDY


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels."""
    yield host_spec("sampling::sample_top_k_top_p", SAMPLE, cpu.sample_top_k_top_p)
    yield host_spec("sampling::topk_bf16", TOPK, cpu.topk_bf16)
    yield host_spec("sampling::verify_greedy", VERIFY_GREEDY, cpu.verify_greedy)
