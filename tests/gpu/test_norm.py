"""RMS norms on a device: a row has the bits of a row alone, in a warp, a block or several blocks."""

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import device_memory

pytestmark = pytest.mark.gpu

BF16 = ml_dtypes.bfloat16


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


def normed(kernels, name, x, residual, weight):
    memory = device_memory(0)
    arrays = {"x": x, "weight": weight, "out": np.full_like(x, 9)}
    if name == "rms_norm_residual":
        arrays["residual"] = residual
    on_device = {key: memory.to(value) for key, value in arrays.items()}
    kernels.kernel("norm", name)(**on_device, eps=1e-6, weight_offset=1.0)
    memory.wait()
    return [memory.back(on_device[key]) for key in ("out", "residual") if key in on_device]


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_residual"])
@pytest.mark.parametrize("columns", [1024, 1030, 1032, 2048, 2056, 5120, 8192, 8200])
@pytest.mark.parametrize("rows", [19, 300])
def test_rows_have_the_bits_of_a_row_alone(kernels, name, columns, rows):
    x, residual, weight = numbers(1, rows, columns), numbers(2, rows, columns), numbers(3, columns)
    together = normed(kernels, name, x, residual, weight)
    for row in range(0, rows, rows // 6):
        one = slice(row, row + 1)
        alone = normed(kernels, name, x[one], residual[one], weight)
        assert [part[one].tobytes() for part in together] == [part.tobytes() for part in alone]
