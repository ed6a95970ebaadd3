"""What happens between the projections and the mixers: module ``ssm_preprocess``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.ssm_preprocess import cpu
from kernel_muster.plugins.ssm_preprocess.contracts import DEINTERLEAVE_QG, DEINTERLEAVE_QKVZ, GDN_GATES
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the three contracts."""
    return DEINTERLEAVE_QG, DEINTERLEAVE_QKVZ, GDN_GATES


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the three kernels."""
    yield host_spec("ssm_preprocess::deinterleave_qg", DEINTERLEAVE_QG, cpu.deinterleave_qg)
    yield host_spec("ssm_preprocess::deinterleave_qkvz", DEINTERLEAVE_QKVZ, cpu.deinterleave_qkvz)
    yield host_spec("ssm_preprocess::compute_gdn_gates", GDN_GATES, cpu.compute_gdn_gates)
