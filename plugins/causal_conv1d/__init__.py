"""The short causal convolution ahead of the gated delta rule: module ``causal_conv1d``."""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _sequences
from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.causal_conv1d import cpu, launch
from kernel_muster.plugins.causal_conv1d.contracts import PREFILL, UPDATE, VERIFY
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_host_spec = partial(host_spec, shares=(_sequences,))


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return UPDATE, PREFILL, VERIFY


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels for each target."""
    update, prefill = (f"causal_conv1d::{contract.name}" for contract in (UPDATE, PREFILL))
    for contract, function, backend, same, same_on_device in (
        (UPDATE, cpu.causal_conv1d_update, launch.UPDATE, (), ()),
        (PREFILL, cpu.causal_conv1d_update_prefill, launch.RAGGED, (), (update,)),
        (VERIFY, cpu.causal_conv1d_verify_n, launch.RAGGED, (prefill,), (prefill,)),
    ):
        key = f"causal_conv1d::{contract.name}"
        yield _host_spec(key, contract, function, bit_identical_to=same)
        yield device_spec(key=key, contract=contract.name, backend=backend, bit_identical_to=same_on_device)
