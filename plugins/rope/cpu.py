"""Host kernels of the rope family."""

import numpy as np
from kernel_muster.plugins._reference import F32, Array, f32
from kernel_muster.registry.errors import ContractError


def rope_forward(q: Array, k: Array, positions: Array, rotary_dim: int, theta: np.float32) -> None:
    """Rotate ``q [M, Hq, D]`` and ``k [M, Hk, D]`` BF16 in place by ``positions [M]`` int32.

    Element i of the first half of ``rotary_dim`` turns with element i of the second half, by
    ``position * theta^(-2i / rotary_dim)``; the other ``D - rotary_dim`` elements stay. The angle is float64, its
    cosine and sine are rounded once to FP32, the result once to BF16. Source: Su et al., RoFormer (2021), in the
    half-split order of GPT-NeoX. A negative position raises ContractError and changes nothing.
    """
    _check("rope::rope_forward", positions)
    frequencies = _frequencies(rotary_dim, theta)
    for row, position in enumerate(positions.tolist()):
        _rotate((q[row], k[row]), position * frequencies)


def rope_mrope_interleaved(
    q: Array,
    k: Array,
    positions: Array,
    section_t: int,
    section_h: int,
    section_w: int,
    rotary_dim: int,
    theta: np.float32,
) -> None:
    """Rotate as :func:`rope_forward`, with ``positions [3, M]`` (time, height, width) int32.

    Frequency i turns with the height where ``i % 3 == 1`` and ``i < 3 * section_h``, with the width where
    ``i % 3 == 2`` and ``i < 3 * section_w``, else with the time. Source: the interleaved layout of Qwen3-VL.
    """
    _check("rope::rope_mrope_interleaved", positions)
    frequencies = _frequencies(rotary_dim, theta)
    axis = np.zeros(rotary_dim // 2, int)
    axis[1 : 3 * section_h : 3] = 1
    axis[2 : 3 * section_w : 3] = 2
    for row in range(positions.shape[1]):
        _rotate((q[row], k[row]), positions[axis, row] * frequencies)


def _check(owner: str, positions: Array) -> None:
    wrong = np.argwhere(positions < 0)
    if len(wrong):
        place = tuple(wrong[0].tolist())
        where = ", ".join(map(str, place))
        raise ContractError(f"{owner}: positions[{where}] is {positions[place]}, expected 0 or more")


def _frequencies(rotary_dim: int, theta: np.float32) -> Array:
    exponents = -np.arange(0, rotary_dim, 2) / rotary_dim
    return np.power(np.float64(theta), exponents)


def _rotate(parts: tuple[Array, ...], angles: Array) -> None:
    """Turn every head ``[H, D]`` of one row by its angles ``[rotary_dim / 2]``."""
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    half = angles.size
    for heads in parts:
        first, second = f32(heads[:, :half]), f32(heads[:, half : 2 * half])
        heads[:, :half] = _turned(first, cosine, -second, sine)
        heads[:, half : 2 * half] = _turned(second, cosine, first, sine)


def _turned(own: F32, cosine: F32, other: F32, sine: F32) -> F32:
    return own * cosine + other * sine
