"""A W4A16 GEMM of our own for Hopper: module ``w4a16_hopper``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.w4a16_hopper import launch, layout
from kernel_muster.plugins.w4a16_hopper.contracts import W4A16_HOPPER_GEMM
from kernel_muster.plugins.w4a16_hopper.cpu import w4a16_hopper_gemm
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

KEY = "w4a16_hopper::w4a16_hopper_gemm"


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the one contract."""
    return (W4A16_HOPPER_GEMM,)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the host kernel and the device kernel.

    The device kernel gives the same bits in every run. It adds K in an order of its own, which depends on M, N, K and
    the number of multiprocessors (they decide where a tile is shared): the bits of a row may differ between one M and
    another, so it claims no bit identity with any other kernel.
    """
    yield host_spec(KEY, W4A16_HOPPER_GEMM, w4a16_hopper_gemm, weight_layout=nvfp4.ROW_MAJOR)
    yield KernelSpec(
        key=KEY,
        contract=W4A16_HOPPER_GEMM.name,
        archs=("sm_90a",),
        backend=launch.GEMM,
        weight_layout=layout.LAYOUT,
        prepare=layout.to_wgmma_layout,
    )
