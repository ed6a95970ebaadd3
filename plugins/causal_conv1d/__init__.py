"""The short causal convolution ahead of the gated delta rule: module ``causal_conv1d``."""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _sequences
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.causal_conv1d import cpu
from kernel_muster.plugins.causal_conv1d.contracts import PREFILL, UPDATE, VERIFY
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec

_PREFILL_KEY = "causal_conv1d::causal_conv1d_update_prefill"
_host_spec = partial(host_spec, shares=(_sequences,))


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return UPDATE, PREFILL, VERIFY


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels."""
    yield _host_spec("causal_conv1d::causal_conv1d_update", UPDATE, cpu.causal_conv1d_update)
    yield _host_spec(_PREFILL_KEY, PREFILL, cpu.causal_conv1d_update_prefill)
    verify = "causal_conv1d::causal_conv1d_verify_n"
    yield _host_spec(verify, VERIFY, cpu.causal_conv1d_verify_n, bit_identical_to=(_PREFILL_KEY,))
