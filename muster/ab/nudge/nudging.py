"""The effect of rounding alone on a model: results of some kernels moved in their last place, at random.

Two right kernels of one contract may round a result differently. The effect on the logits depends on the model (its
depth, its recurrences, the near ties of its router). So it is measured: the reference arm runs once more, with every
result of the differing kernels moved by one unit in the last place of BF16. A mixer with a seed selects half of the
elements, up or down. Two right kernels differ by less. FP32 results move by 2^-16 of themselves. Sums in another order
move by far less.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from kernel_muster.ab.measure.metering import Wrapped
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import Bound, TensorParam
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.launch.runners import Launch, LaunchOptions, Runner
from kernel_muster.registry.selection.handles import Handle

F32_STEP = 2.0**-16
_LARGEST = 0x7F00  # no step from here reaches infinity


class Nudger(Wrapped):
    """Stands before another runner and moves results of the kernels in ``keys``. All others are unchanged.

    On the host ``keys`` applies when a launch runs, on a device when it is prepared: a captured graph is fixed.
    ``find(dtype)`` returns the kernel that moves a device array.
    """

    def __init__(self, inner: Runner, seed: int, *, is_host: bool) -> None:
        super().__init__(inner)
        self._seed, self._is_host = seed, is_host
        self._calls = 0
        self.keys: frozenset[str] = frozenset()
        self.contracts: Mapping[str, Contract] = {}
        self.find: Callable[[str], Handle | None] = lambda dtype: None

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Return a launch whose results are moved after it has run."""
        launch = self._inner.prepare(owner, spec, bound, options)
        if self._is_host:
            return self._on_host(owner, spec, bound, launch)
        if owner not in self.keys:
            return launch
        return _Both(launch, [move for one in self._results(spec, bound) if (move := self._move(owner, one))])

    def _on_host(self, owner: str, spec: KernelSpec, bound: Bound, launch: Launch) -> Launch:
        def both(stream: Any = None) -> None:
            launch(stream)
            if owner in self.keys:
                for result in self._results(spec, bound):
                    result[...] = nudged(result, self._next_seed(owner))

        return both

    def _results(self, spec: KernelSpec, bound: Bound) -> list[Any]:
        if spec.contract not in self.contracts:  # the boot is still open, without nudges
            return []
        found = [bound.arguments[p.name] for p in row_outputs(self.contracts[spec.contract])]
        return [one for one in found if one is not None]

    def _move(self, owner: str, values: Any) -> Launch | None:
        """Return the launch that moves a device array in place. None for another type or layout."""
        rows = values.reshape(-1, values.shape[-1])
        names = {numpy_dtype(name): name for name in ("bf16", "f32")}
        if rows.data.ptr != values.data.ptr or values.dtype not in names:  # a copy would move, not the result
            return None
        handle = self.find(names[values.dtype])
        return None if handle is None else handle.prepare(values=rows, seed=self._next_seed(owner))

    def _next_seed(self, owner: str) -> int:
        self._calls += 1
        return zlib.crc32(f"{self._seed}/{self._calls}/{owner}".encode()) & 0x7FFFFFFF


class _Both:
    """A launch, and the moves of its results."""

    def __init__(self, launch: Launch, moves: list[Launch]) -> None:
        self._launches = (launch, *moves)

    def __call__(self, stream: object | None = None) -> None:
        for launch in self._launches:
            launch(stream)


def row_outputs(contract: Contract) -> tuple[TensorParam, ...]:
    """Return the floating-point results of a kernel: its outputs, or the rows that it changes in place.

    States and caches are no rows: a kernel that changes them in place also writes rows, or computes nothing.
    """
    floats = [p for p in contract.signature.outputs if {*p.dtype.split("|")} & {"bf16", "f32"}]
    written = tuple(p for p in floats if p.role == "out")
    return written or tuple(p for p in floats if p.shape and p.shape[0] in ("M", "S"))


def nudged(values: Any, seed: int) -> Any:
    """Return a host array with half of its elements moved by one step, up or down. The bits equal those of nudge.cu."""
    step = _steps(values.size, seed).reshape(values.shape)
    if values.dtype == numpy_dtype("bf16"):
        bits = np.ascontiguousarray(values).view(np.uint16)
        size = bits & 0x7FFF
        moved = np.where((size > 0) & (size < _LARGEST), bits + step, bits).astype(np.uint16)
        return moved.view(values.dtype)
    if values.dtype == np.float32:
        return values * (1 + step * F32_STEP).astype(np.float32)
    return values


def _steps(count: int, seed: int) -> Any:
    """Return +1, -1, or 0 for half of all elements, from a mixer of 32-bit words."""
    word = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(seed)
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    choice = (word ^ (word >> np.uint32(16))) & np.uint32(3)
    return np.where(choice == 0, 1, np.where(choice == 1, -1, 0)).astype(np.int32)
