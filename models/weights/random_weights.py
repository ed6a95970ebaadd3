"""Random weights at full size, made where they are needed: the same bits for a seed and a name on host and device.

Packed codes are uniform over E2M1, block scales uniform over E4M3 values 0.5 to 1.875, and the global scale gives a
projection the gain one, so activations stay finite through any depth. A counter and a mixer of 32-bit words (the
finaliser of MurmurHash3, Appleby 2011, public domain) stand for a generator: they are the same in NumPy and CuPy.
"""

import hashlib
from math import prod, sqrt
from typing import Any

import numpy as np
from kernel_muster.models.memory.memory import HostMemory, Memory
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract.nvfp4 import GROUP, Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight

# Mean squares of E2M1 codes and of the 16 scales: the parts of a value's variance.
_CODES_SQUARE = (0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8
_SCALES_SQUARE = sum((2.0 ** (byte // 8 - 7) * (1 + byte % 8 / 8)) ** 2 for byte in range(0x30, 0x40)) / 16
_FIRST_SCALE, _SCALES = 0x30, 0x0F
#: Routers with decisive logits, as trained ones have: near ties between experts are seldom.
_ROUTER_GAIN = 4.0
_ARRAY_SPREAD = 0.1
# Words in each step: limits the extra memory of the arithmetic to about 1 GB.
_STEP = 1 << 26


class RandomWeights:
    """A source of weights. ``plain_norms`` are suffixes of norms around one, not around zero."""

    def __init__(
        self, seed: int = 0, memory: Memory | None = None, plain_norms: tuple[str, ...] = (".gdn.norm",)
    ) -> None:
        self._seed, self._memory, self._plain = seed, memory or HostMemory(), plain_norms

    def on(self, memory: Memory) -> "RandomWeights":
        """Return the same weights, made in a memory."""
        return RandomWeights(self._seed, memory, self._plain)

    def quant_of(self, name: str) -> None:
        """Return None: it makes every requested weight."""

    def find(self, spec: WeightSpec) -> Any:
        """Make a weight."""
        if spec.quant == "nvfp4":
            return self._nvfp4(spec)
        depth = spec.shape[-1] if spec.quant == "bf16" else 0
        gain = _ROUTER_GAIN if spec.name.endswith(".router") else 1.0
        spread = gain * sqrt(3 / depth) if depth else _ARRAY_SPREAD
        middle = 1.0 if spec.quant == "array" and spec.name.endswith(self._plain) else 0.0
        values = self._bf16(spec, spread, middle)
        return Bf16Weight(values) if spec.quant == "bf16" else values

    def _nvfp4(self, spec: WeightSpec) -> Nvfp4Weight:
        *lead, rows, columns = spec.shape
        packed = self._bytes(f"{spec.name}/packed", prod(spec.shape) // 2)
        scales = self._bytes(f"{spec.name}/scale", prod(spec.shape) // GROUP)
        scales &= _SCALES
        scales += _FIRST_SCALE
        decode = np.full(tuple(lead), 1 / sqrt(_CODES_SQUARE * _SCALES_SQUARE * max(columns, 1)), np.float32)
        return Nvfp4Weight(
            packed.reshape(*lead, rows, columns // 2), scales.reshape(*lead, rows, columns // GROUP), decode
        )

    def _bytes(self, name: str, count: int) -> Any:
        out = self._memory.empty((-(-count // 4) * 4,), "u8")
        words = out.view(np.uint32)
        for start in range(0, len(words), _STEP):
            part = words[start : start + _STEP]
            part[...] = self._words(name, start, len(part))
        return out[:count]

    def _bf16(self, spec: WeightSpec, spread: float, middle: float) -> Any:
        """Return uniform values ``middle +- spread``, truncated to BF16. Each operation is one FP32 rounding."""
        count = prod(spec.shape)
        out = self._memory.empty((count,), "bf16")
        bits = out.view(np.uint16)
        for start in range(0, count, _STEP):
            part = bits[start : start + _STEP]
            values = (self._words(spec.name, start, len(part)) >> np.uint32(8)).astype(np.float32)
            values *= np.float32(2.0**-23)
            values -= np.float32(1)
            values *= np.float32(spread)
            values += np.float32(middle)
            part[...] = values.view(np.uint32) >> np.uint32(16)
        return out.reshape(spec.shape)

    def _words(self, name: str, start: int, count: int) -> Any:
        """Return 32-bit words of a counter, mixed."""
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        word = self._counter(start, count)
        word *= np.uint32(0x9E3779B9)
        word += np.frombuffer(digest[:4], np.uint32)[0]
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            word ^= word >> np.uint32(shift)
            word *= np.uint32(factor)
        return word

    def _counter(self, start: int, count: int) -> Any:
        if self._memory.is_host:
            return np.arange(start, start + count, dtype=np.uint32)
        import cupy

        return cupy.arange(start, start + count, dtype=np.uint32)


def in_memory(source: Any, memory: Memory) -> Any:
    """Return a source that makes its weights in a memory, if it can. Any other source is unchanged."""
    return source.on(memory) if isinstance(source, RandomWeights) else source
