"""Host kernels of the rope family."""

import numpy as np
from kernel_muster.plugins._reference import F32, Array, f32
from kernel_muster.plugins._sequences import check_slots
from kernel_muster.plugins.kv_cache.cpu import kv_cache_append
from kernel_muster.plugins.norm.cpu import rms_norm
from kernel_muster.registry.errors import ContractError

_FAST, _SLOW = 32.0, 1.0  # turns in the original context: YaRN's beta_fast and beta_slow


def rope_forward(q: Array, k: Array, positions: Array, rotary_dim: int, theta: np.float32) -> None:
    """Rotate ``q [M, Hq, D]`` and ``k [M, Hk, D]`` BF16 in place by ``positions [M]`` int32.

    Element i of the first half of ``rotary_dim`` turns with element i of the second half, by
    ``position * theta^(-2i / rotary_dim)``; the other ``D - rotary_dim`` elements stay. The angle is float64, its
    cosine and sine are rounded once to FP32, the result once to BF16. Source: Su et al., RoFormer (2021), in the
    half-split order of GPT-NeoX. A negative position raises ContractError before any write.
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


def rope_yarn(
    q: Array, k: Array, positions: Array, rotary_dim: int, theta: np.float32, factor: np.float32, original_context: int
) -> None:
    """Rotate as :func:`rope_forward`, with frequencies stretched for contexts ``factor`` times the original one.

    Frequencies that turn at most once in ``original_context`` positions are divided by ``factor``, those that turn 32
    times or more stay, with a linear ramp over the index between them; cosine and sine are multiplied by
    ``1 + 0.1 ln(factor)``. Source: Peng et al., YaRN (2023), sections 3.2 to 3.4, with the bounds of the ramp rounded
    to whole indices, outwards, as in the authors' code.
    """
    _check("rope::rope_yarn", positions)
    low, width = yarn_ramp(rotary_dim, theta, original_context)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / width, 0.0, 1.0)
    frequencies = _frequencies(rotary_dim, theta) * (1.0 - ramp + ramp / np.float64(factor))
    for row, position in enumerate(positions.tolist()):
        _rotate((q[row], k[row]), position * frequencies, yarn_scale(factor))


def qk_norm_rope_append(
    q: Array,
    k: Array,
    v: Array,
    q_weight: Array,
    k_weight: Array,
    positions: Array,
    slots: Array,
    eps: np.float32,
    weight_offset: np.float32,
    rotary_dim: int,
    theta: np.float32,
    k_cache: Array,
    v_cache: Array,
) -> None:
    """Norm and rotate ``q [M, Hq, D]`` BF16 in place; norm and rotate ``k``, and put it with ``v [M, Hk, D]`` in place.

    The bits are those of ``rms_norm`` over each head, rounded to BF16, of :func:`rope_forward` and of
    ``kv_cache_append``. What they refuse raises ContractError before any write.
    """
    owner = "rope::qk_norm_rope_append"
    _check(owner, positions)
    check_slots(owner, slots, k_cache.shape[0] * k_cache.shape[1])
    size = q.shape[2]
    queries, keys = np.empty(q.shape, q.dtype), np.empty(k.shape, k.dtype)
    for heads, weight, out in ((q, q_weight, queries), (k, k_weight, keys)):
        rms_norm(heads.reshape(-1, size), weight, eps, weight_offset, out.reshape(-1, size))
    rope_forward(queries, keys, positions, rotary_dim, theta)
    q[...] = queries
    kv_cache_append(keys, v, slots, k_cache, v_cache)


def yarn_ramp(rotary_dim: int, theta: np.float32, original_context: int) -> tuple[float, float]:
    """Return the index of the frequency at which stretching begins, and over how many indices it grows."""
    low, high = (_turning_index(turns, rotary_dim, theta, original_context) for turns in (_FAST, _SLOW))
    low, high = max(np.floor(low), 0.0), min(np.ceil(high), rotary_dim - 1.0)
    return float(low), float(max(high - low, 1e-3))


def yarn_scale(factor: np.float32) -> float:
    """Return the factor of cosine and sine."""
    return float(1.0 + 0.1 * np.log(np.float64(factor)))


def _turning_index(turns: float, rotary_dim: int, theta: np.float32, context: int) -> float:
    """Return the index, a fraction, of the frequency that turns so often in a context."""
    return float(rotary_dim * np.log(context / (turns * 2 * np.pi)) / (2 * np.log(np.float64(theta))))


def _check(owner: str, positions: Array) -> None:
    wrong = np.argwhere(positions < 0)
    if len(wrong):
        place = tuple(wrong[0].tolist())
        where = ", ".join(map(str, place))
        raise ContractError(f"{owner}: positions[{where}] is {positions[place]}, expected 0 or more")


def _frequencies(rotary_dim: int, theta: np.float32) -> Array:
    exponents = -np.arange(0, rotary_dim, 2) / rotary_dim
    return np.power(np.float64(theta), exponents)


def _rotate(parts: tuple[Array, ...], angles: Array, scale: float = 1.0) -> None:
    """Rotate every head ``[H, D]`` of one row by its angles ``[rotary_dim / 2]``, and scale the rotated values."""
    cosine, sine = (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)
    half = angles.size
    for heads in parts:
        first, second = f32(heads[:, :half]), f32(heads[:, half : 2 * half])
        heads[:, :half] = _turned(first, cosine, -second, sine)
        heads[:, half : 2 * half] = _turned(second, cosine, first, sine)


def _turned(own: F32, cosine: F32, other: F32, sine: F32) -> F32:
    return own * cosine + other * sine
