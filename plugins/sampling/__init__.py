"""Choosing tokens, and accepting drafted ones: module ``sampling``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.sampling import cpu, launch
from kernel_muster.plugins.sampling.contracts import SAMPLE, TOPK, VERIFY_GREEDY
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return SAMPLE, TOPK, VERIFY_GREEDY


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels for each target."""
    for contract, function, backend in (
        (SAMPLE, cpu.sample_top_k_top_p, launch.SAMPLE),
        (TOPK, cpu.topk_bf16, launch.TOPK),
        (VERIFY_GREEDY, cpu.verify_greedy, launch.VERIFY_GREEDY),
    ):
        yield host_spec(f"sampling::{contract.name}", contract, function)
        yield device_spec(key=f"sampling::{contract.name}", contract=contract.name, backend=backend)
