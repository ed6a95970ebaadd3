"""Host arithmetic that the built-in families share: sums in a fixed order, and one rounding.

Host kernels work row by row in FP32: the order of every sum depends on its length only, never on the number of rows,
on memory layout or on a BLAS, so M rows give the same bits as M runs of one row. Results are rounded once, when they
are stored.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.specs import KernelSpec, PythonKernel
from kernel_muster.registry.errors import ContractError
from numpy.typing import NDArray

Array = NDArray[Any]
F32 = NDArray[np.float32]


def f32(values: Array) -> F32:
    """Widen to float32, exactly for BF16."""
    return np.asarray(values, np.float32)


def bf16(values: F32) -> Array:
    """Round to BF16, to nearest, ties to even."""
    return values.astype(numpy_dtype("bf16"))


def ordered_sum(terms: F32) -> F32:
    """Sum the last axis ``[..., K]`` by folding its upper half onto its lower half, in FP32.

    The order depends on K only. The error is at most 2 log2(K) * 2^-24 * sum |terms| (Higham, Accuracy and Stability
    of Numerical Algorithms, section 4.2: the depth of the tree, and one more addition a level for an odd length).
    """
    if terms.shape[-1] == 0:
        return np.zeros(terms.shape[:-1], np.float32)
    while (length := terms.shape[-1]) > 1:
        half = length // 2
        folded = terms[..., :half] + terms[..., half : 2 * half]
        if length % 2:
            folded[..., 0] += terms[..., -1]
        terms = folded
    return terms[..., 0]


def project(x: Array, weight: Any) -> F32:
    """Return ``x w^T`` as FP32 ``[M, N]`` for ``x [M, K]`` BF16 and a logical weight ``(N, K)``, NVFP4 or BF16.

    Products are exact in FP32 (8 bits of BF16 by 6 of E2M1 * E4M3, or by 8 of BF16), sums are :func:`ordered_sum`, and
    ``global_scale_decode`` multiplies the sum once. Decoding refuses a NaN or negative block scale (ContractError).
    """
    values, scale = _decode(weight)
    result = np.empty((x.shape[0], values.shape[0]), np.float32)
    for row, source in enumerate(f32(x)):
        result[row] = ordered_sum(values * source) * scale
    return result


def _decode(weight: Any) -> tuple[F32, np.float32]:
    """Return the exact FP32 values before the tensor's scale, and that scale."""
    if weight.quant == "bf16":
        return f32(weight.values), np.float32(1)
    row_major = nvfp4.transpose(weight) if weight.layout == nvfp4.TRANSPOSED else weight
    scales = np.repeat(nvfp4.decode_e4m3(row_major.block_scale), nvfp4.GROUP, axis=-1)
    return nvfp4.decode_e2m1(nvfp4.unpack(row_major.packed)) * scales, np.float32(weight.global_scale_decode)


def sigmoid(values: F32) -> F32:
    """Return the logistic function, evaluated in float64 and rounded to FP32; it never overflows."""
    wide = values.astype(np.float64)
    small = np.exp(-np.abs(wide))
    return (np.where(wide >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)


def silu_mul(gate: Array, up: Array) -> F32:
    """Return ``silu(gate) * up`` in FP32."""
    wide = f32(gate)
    return wide * sigmoid(wide) * f32(up)


def check_indices(owner: str, name: str, indices: Array, count: int) -> None:
    """Refuse the first index outside ``0 <= index < count`` (ContractError)."""
    wrong = np.argwhere((indices < 0) | (indices >= count))
    if len(wrong):
        place = tuple(int(axis) for axis in wrong[0])
        where = ", ".join(map(str, place))
        raise ContractError(f"{owner}: {name}[{where}] is {indices[place]}, expected 0 <= index < {count}")


def host_spec(
    key: str, contract: Contract, function: Callable[..., None], *, shares: tuple[ModuleType, ...] = (), **more: Any
) -> KernelSpec:
    """Return the reference-tier spec of a host kernel of this module, the format and the modules in ``shares``."""
    backend = PythonKernel(function, shares=(sys.modules[__name__], nvfp4, *shares))
    return KernelSpec(key=key, contract=contract.name, archs=("cpu",), backend=backend, tier="reference", **more)
