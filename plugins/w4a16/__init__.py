"""Tile GEMMs of NVFP4 weights with BF16 activations: modules ``w4a16`` and ``w4a16_v2``."""

from collections.abc import Iterable

from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.w4a16 import launch, layouts
from kernel_muster.plugins.w4a16.contracts import W4A4_GEMM, W4A16_GEMM
from kernel_muster.plugins.w4a16.cpu import w4a16_gemm
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

ONE_ORDER = "w4a16::w4a16_gemm_t"  # every variant adds K in this kernel's order
_OPT_IN = {"w4a16_v2::w4a16_gemm_t_m128_v2": "MUSTER_W4A16_VARIANT"}


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the one contract that all variants share, and that of the FP4 x FP4 tiles, which others may provide."""
    return (W4A16_GEMM, W4A4_GEMM)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the base kernel on row-major weights, and the variants on the transposed copy.

    ``w4a16_v3`` and ``w4a4`` are left out on purpose: their contracts open them to anybody.
    """
    for key, backend in launch.KERNELS.items():
        same = () if key == ONE_ORDER else (ONE_ORDER,)
        opt_in = _OPT_IN.get(key)
        row_major = launch.TILES[key].row_major
        layout = nvfp4.ROW_MAJOR if row_major else nvfp4.TRANSPOSED
        host_prepare, prepare = (None, None) if row_major else (nvfp4.transpose, layouts.to_transposed)
        yield host_spec(
            key,
            W4A16_GEMM,
            w4a16_gemm,
            weight_layout=layout,
            prepare=host_prepare,
            bit_identical_to=same,
            opt_in=opt_in,
        )
        yield device_spec(
            key=key,
            contract=W4A16_GEMM.name,
            backend=backend,
            weight_layout=layout,
            prepare=prepare,
            bit_identical_to=same,
            opt_in=opt_in,
        )
