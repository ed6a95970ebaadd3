"""Element-wise steps between layers: module ``residual_add``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.residual_add import contracts, cpu, launch
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return contracts.RESIDUAL_ADD, contracts.GATE_MUL, contracts.GATE_MUL_BATCHED


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels for each target; many gated rows have the bits of one."""
    single = "residual_add::sigmoid_gate_mul"
    for key, contract, function, backend, same in (
        ("residual_add::bf16_residual_add", contracts.RESIDUAL_ADD, cpu.bf16_residual_add, launch.RESIDUAL_ADD, ()),
        (single, contracts.GATE_MUL, cpu.sigmoid_gate_mul, launch.GATE_MUL, ()),
        (f"{single}_batched", contracts.GATE_MUL_BATCHED, cpu.sigmoid_gate_mul, launch.GATE_MUL, (single,)),
    ):
        yield host_spec(key, contract, function, bit_identical_to=same)
        yield device_spec(key=key, contract=contract.name, backend=backend, bit_identical_to=same)
