"""Element-wise steps between layers: module ``residual_add``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.residual_add import contracts, cpu
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return contracts.RESIDUAL_ADD, contracts.GATE_MUL, contracts.GATE_MUL_BATCHED


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels."""
    single = "residual_add::sigmoid_gate_mul"
    yield host_spec("residual_add::bf16_residual_add", contracts.RESIDUAL_ADD, cpu.bf16_residual_add)
    yield host_spec(single, contracts.GATE_MUL, cpu.sigmoid_gate_mul)
    yield host_spec(f"{single}_batched", contracts.GATE_MUL_BATCHED, cpu.sigmoid_gate_mul, bit_identical_to=(single,))
