"""Tile GEMMs of NVFP4 weights with BF16 activations: modules ``w4a16`` and ``w4a16_v2``."""

from collections.abc import Iterable
from typing import Any

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.w4a16.contracts import W4A16_GEMM
from kernel_muster.plugins.w4a16.cpu import w4a16_gemm
from kernel_muster.registry import nvfp4
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.specs import KernelSpec

ONE_ORDER = "w4a16::w4a16_gemm_t"  # every variant adds K in this kernel's order
TWINS = ("k64", "m128", "p3", "k64_p3", "k64_n64_p3")


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the one contract that all variants share."""
    return (W4A16_GEMM,)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the base kernel on row-major weights, and the variants on the transposed copy.

    ``w4a16_v3`` is left out on purpose: who asks for it hears that nobody provides it.
    """
    yield host_spec(
        "w4a16::w4a16_gemm",
        W4A16_GEMM,
        w4a16_gemm,
        weight_layout=nvfp4.ROW_MAJOR,
        bit_identical_to=(ONE_ORDER,),
    )
    yield _transposed(ONE_ORDER)
    for twin in TWINS:
        yield _transposed(f"{ONE_ORDER}_{twin}", bit_identical_to=(ONE_ORDER,))
    yield _transposed("w4a16_v2::w4a16_gemm_t_m128_v2", bit_identical_to=(ONE_ORDER,), opt_in="MUSTER_W4A16_VARIANT")


def _transposed(key: str, **more: Any) -> KernelSpec:
    layout = nvfp4.TRANSPOSED
    return host_spec(key, W4A16_GEMM, w4a16_gemm, weight_layout=layout, prepare=nvfp4.transpose, **more)
