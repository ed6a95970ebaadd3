"""Sizes, arrays and byte counts of the measured launches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import UsageError

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a model's small kernels."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    value_heads: int
    intermediate: int
    experts: int = 0
    head_dim: int = 256
    rotary_dim: int = 64
    key_heads: int = 16
    gdn_dim: int = 128
    taps: int = 4
    vocabulary: int = 248_320
    sections: tuple[int, int, int] = (11, 11, 10)

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return (2 * self.key_heads + self.value_heads) * self.gdn_dim


MODELS = (
    Sizes("35b", 2048, 16, 2, 32, 512, experts=256),
    Sizes("27b", 5120, 24, 4, 48, 17408),
)
PAGE = 16


def sizes_of(manifest: Manifest) -> Sizes:
    """Return the dimensions of a model with attention, a gated delta net and an FFN. UsageError for any other."""
    model = manifest.model
    attention, gdn, rope = model.attention, model.gdn, model.rope
    intermediate = model.moe.intermediate_size if model.moe else model.intermediate_size
    if not (attention and gdn and rope and model.hidden_size and model.vocab_size and intermediate):
        raise UsageError(f"{manifest.name}: a step is measured of models with attention, a gated delta net and an FFN")
    if gdn.key_dim != gdn.value_dim or not rope.mrope_sections:
        raise UsageError(f"{manifest.name}: a step is measured of delta nets with square states, and mrope")
    time, height, width = rope.mrope_sections
    return Sizes(
        manifest.name, model.hidden_size, attention.heads, attention.kv_heads, gdn.value_heads, intermediate,
        model.moe.experts if model.moe else 0, attention.head_dim, int(attention.head_dim * rope.partial_factor),
        gdn.key_heads, gdn.key_dim, gdn.conv_width, model.vocab_size, (time, height, width),
    )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One launch: its key, new arguments for every copy, and the bytes that it must read and write."""

    model: str
    key: str
    label: str
    reads: int
    writes: int
    make: Callable[[], Arguments]

    @property
    def copy_bytes(self) -> int:
        """Bytes read or written by one launch."""
        return max(self.reads, self.writes)


class Data:
    """Makes arrays from one seed, by CuPy on the current device, or by the module given."""

    def __init__(self, module: Any = None) -> None:
        if module is None:
            import cupy

            module = cupy
        self._module = module
        self._base = module.random.default_rng(7).standard_normal(2**22, dtype=module.float32)

    def f32(self, *shape: int, low: float | None = None) -> Any:
        """Return Gaussian values, or values between ``low`` and 1."""
        values = self._module.resize(self._base, shape)
        return values if low is None else low + (1 - low) * (self._module.abs(values) % 1)

    def bf16(self, *shape: int) -> Any:
        """Return Gaussian values, truncated, which suffices for test data."""
        bits = (self._base.view(self._module.uint32) >> 16).astype(self._module.uint16)
        return self._module.resize(bits, shape).view(numpy_dtype("bf16"))

    def empty(self, *shape: int, dtype: str = "bf16") -> Any:
        """Return an output."""
        kind = numpy_dtype(dtype)
        return self._module.zeros(shape, f"u{kind.itemsize}").view(kind)

    def i32(self, values: Any) -> Any:
        """Return integers given on the host."""
        return self._module.asarray(np.asarray(values, np.int32))


def sum_of_bytes(arguments: Arguments, names: tuple[str, ...]) -> int:
    """Return the total bytes of the named arrays."""
    return sum(int(arguments[name].nbytes) for name in names)


def whole_arrays(
    model: str,
    key: str,
    label: str,
    make: Callable[[], Arguments],
    written: tuple[str, ...],
    inout: tuple[str, ...] = (),
) -> Workload:
    """Return a workload that reads and writes each of its arrays once."""
    sample = make()
    arrays = tuple(name for name, value in sample.items() if hasattr(value, "nbytes"))
    reads = sum_of_bytes(sample, tuple(name for name in arrays if name not in written))
    return Workload(model, key, label, reads, sum_of_bytes(sample, (*written, *inout)), make)
