"""Data of a measurement: NVFP4 weights distributed like quantised Gaussian ones, made on the device from a seed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_muster.bench.contestants import as_cupy
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight

#: Features computed by the reference; up to this number all are compared.
CHECKED_FEATURES = 2048


@dataclass(frozen=True)
class DenseData:
    """One shape: a logical weight ``(N, K)``, activations ``[M, K]`` BF16, and the exact result for some features."""

    features: int
    depth: int
    weight: Nvfp4Weight
    x: Any
    expected: Any  # float64 [M, min(N, CHECKED_FEATURES)], on the host

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight in the stored format."""
        return self.features * self.depth // 2 + self.features * self.depth // nvfp4.GROUP

    def error(self, out: Any, rows: int) -> float:
        """Return the relative L2 error of ``out [rows, N]`` (on the device), NaN counting as infinite."""
        import cupy

        checked = self.expected[:rows]
        result = as_cupy(out)[:rows, : checked.shape[1]].astype(cupy.float32)
        return relative_l2(cupy.asnumpy(result), checked)


def bf16_values(weight: Nvfp4Weight, arrays: Any, step: int = 8192) -> Any:
    """Return a weight of :func:`make_dense_data` as BF16 values ``(N, K)``. ``arrays`` is CuPy, or NumPy on the host.

    They are exact: code and block scale together have six significant bits, and the global scale is a power of two.
    """
    codes = arrays.asarray(nvfp4.decode_e2m1(np.arange(16, dtype=np.uint8)))
    factors = arrays.asarray(nvfp4.decode_e4m3(np.arange(127, dtype=np.uint8)))
    features, half = weight.packed.shape
    out = arrays.empty((features, 2 * half), np.uint16)
    for start in range(0, features, step):
        packed, scales = weight.packed[start : start + step], weight.block_scale[start : start + step]
        values = arrays.stack([codes[packed & 15], codes[packed >> 4]], axis=-1).reshape(len(packed), 2 * half)
        blocks = factors[scales] * np.float32(weight.global_scale_decode)
        values *= blocks.repeat(nvfp4.GROUP, axis=1)
        out[start : start + step] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return out.view(numpy_dtype("bf16"))


def relative_l2(result: Any, expected: Any) -> float:
    """Return the relative L2 error of a host array against float64, NaN counting as infinite."""
    error = float(np.linalg.norm(np.asarray(result, np.float64) - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def _code_shares() -> Any:
    """Return the frequency of each E2M1 code in groups of 16 Gaussian values scaled to their largest."""
    rng = np.random.default_rng(1)
    weight = nvfp4.quantize(rng.standard_normal((256, 1024)).astype(np.float32))
    counts = np.bincount(nvfp4.unpack(weight.packed).ravel(), minlength=16).astype(np.float64)
    return counts / counts.sum()


def make_dense_data(features: int, depth: int, rows: int, seed: int = 0) -> DenseData:
    """Make a weight and ``rows`` rows of activations on the current device."""
    import cupy

    generator = cupy.random.default_rng(seed)
    edges = cupy.asarray(np.cumsum(_code_shares())[:-1], cupy.float32)
    packed = cupy.empty((features, depth // 2), cupy.uint8)
    step = max(1, 2**26 // depth)
    for start in range(0, features, step):
        part = packed[start : start + step]
        low, high = (
            cupy.searchsorted(edges, generator.random(part.shape, dtype=cupy.float32)).astype(cupy.uint8)
            for _ in range(2)
        )
        part[:] = low | (high << 4)
    # E4M3 bytes from 2^-7 (below the smallest normal number) to 2^7: all magnitudes of a checkpoint.
    scales = generator.integers(4, 104, (features, depth // nvfp4.GROUP), dtype=cupy.uint8)
    weight = Nvfp4Weight(packed, scales, np.array(2.0**-8, np.float32))
    x = np.random.default_rng(seed).standard_normal((rows, depth)).astype(np.float32)
    bf16 = x.view(np.uint32) >> 16  # truncation suffices for test data
    values = (bf16 << 16).view(np.float32)
    checked = min(features, CHECKED_FEATURES)
    host = Nvfp4Weight(cupy.asnumpy(packed[:checked]), cupy.asnumpy(scales[:checked]), np.array(2.0**-8, np.float32))
    expected = values.astype(np.float64) @ nvfp4.dequantize(host).T
    return DenseData(features, depth, weight, _bf16(bf16.astype(np.uint16)), expected)


def _bf16(bits: Any) -> Any:
    import cupy

    return cupy.asarray(bits).view(numpy_dtype("bf16"))
