"""Preprocessing between projections and mixers: module ``ssm_preprocess``."""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _gates
from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.nvfp4_gemv import rows
from kernel_muster.plugins.ssm_preprocess import cpu, launch
from kernel_muster.plugins.ssm_preprocess.contracts import DEINTERLEAVE_QG, DEINTERLEAVE_QKVZ, GDN_GATES
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_host_spec = partial(host_spec, shares=(rows, _gates))


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return DEINTERLEAVE_QG, DEINTERLEAVE_QKVZ, GDN_GATES


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels for each target."""
    for contract, function, backend in (
        (DEINTERLEAVE_QG, cpu.deinterleave_qg, launch.DEINTERLEAVE_QG),
        (DEINTERLEAVE_QKVZ, cpu.deinterleave_qkvz, launch.DEINTERLEAVE_QKVZ),
        (GDN_GATES, cpu.compute_gdn_gates, launch.GDN_GATES),
    ):
        yield _host_spec(f"ssm_preprocess::{contract.name}", contract, function)
        yield device_spec(key=f"ssm_preprocess::{contract.name}", contract=contract.name, backend=backend)
