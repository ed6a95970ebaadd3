"""Products with BF16 weights: modules ``gemv``, for a few rows, and ``gemm``."""

from collections.abc import Iterable

from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.dense_gemm import contracts, cpu, launch
from kernel_muster.registry.contract import weights
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_GEMV = (launch.DENSE_GEMV, launch.DENSE_GEMV_HOPPER)
_GEMM = (launch.DENSE_GEMM, launch.DENSE_GEMM_HOPPER)
_KERNELS = (
    ("gemv::dense_gemv_bf16", contracts.DENSE_GEMV, (), *_GEMV),
    ("gemv::dense_gemv_bf16_batchm", contracts.DENSE_GEMV_BATCHM, ("gemv::dense_gemv_bf16",), *_GEMV),
    ("gemm::dense_gemm_bf16", contracts.DENSE_GEMM, (), *_GEMM),
)


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return one contract for one row, for a few, and for any number."""
    for _, contract, *_ in _KERNELS:
        yield contract


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return every kernel; the one for a few rows is bit-identical to the one-row kernel run row by row."""
    layout = weights.BF16_ROW_MAJOR
    for key, contract, same, device, hopper in _KERNELS:
        yield host_spec(key, contract, cpu.dense_bf16, weight_layout=layout, bit_identical_to=same)
        for archs, backend in ((("sm_80+",), device), (("sm_90a",), hopper)):
            yield KernelSpec(
                key=key, contract=contract.name, archs=archs, backend=backend, weight_layout=layout,
                bit_identical_to=same,
            )  # fmt: skip
