"""What rounding alone does to a model: some kernels' results moved in their last place, at random.

Two right kernels of one contract may round a result differently. How far that carries to the logits depends on the
model (its depth, its recurrences, how often a router turns), so it is measured and not guessed: the reference arm runs
once more with every result of the kernels that differ between the arms moved by one unit in the last place of BF16,
half of the elements up or down, chosen from a seed. That is more than two right kernels differ by. FP32 results
move by 2^-16 of themselves, sums in another order by far less.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.registry.contracts import Contract
from kernel_muster.registry.dtypes import numpy_dtype
from kernel_muster.registry.running import BuildState, Launch, LaunchOptions, Progress, Runner
from kernel_muster.registry.signature import Bound, TensorParam
from kernel_muster.registry.specs import KernelSpec

F32_STEP = 2.0**-16
_LARGEST = 0x7F00  # no step leads from here to infinity


class Nudger:
    """Stands before another runner and moves results of the kernels in ``keys``; all others are left alone."""

    def __init__(self, inner: Runner, seed: int) -> None:
        self._inner, self._seed, self._calls = inner, seed, 0
        self.keys: frozenset[str] = frozenset()
        self.contracts: Mapping[str, Contract] = {}

    def start(self, spec: KernelSpec) -> None:
        """Begin what must happen before a launch."""
        self._inner.start(spec)

    def join(self, progress: Progress | None = None) -> None:
        """Wait for all that was started."""
        self._inner.join(progress)

    def state(self, spec: KernelSpec) -> BuildState:
        """Say how far a spec has come."""
        return self._inner.state(spec)

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return what a launch needs besides its arguments."""
        return self._inner.scratch_bytes(owner, spec, bound)

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Return a launch whose results are moved when it has run."""
        launch = self._inner.prepare(owner, spec, bound, options)
        results = [bound.arguments[p.name] for p in row_outputs(self.contracts[spec.contract])]

        def nudged(stream: Any = None) -> None:
            launch(stream)
            if owner not in self.keys:
                return
            self._calls += 1
            rng = np.random.default_rng([self._seed, self._calls, zlib.crc32(owner.encode())])
            for result in results:
                if result is not None:
                    nudge(result, rng)

        return nudged


def row_outputs(contract: Contract) -> tuple[TensorParam, ...]:
    """Return the floating-point results of a kernel: what it writes, or the rows that it changes in place.

    States and caches are no rows: a kernel that changes them in place also writes rows, or computes nothing.
    """
    floats = [p for p in contract.signature.outputs if {*p.dtype.split("|")} & {"bf16", "f32"}]
    written = tuple(p for p in floats if p.role == "out")
    return written or tuple(p for p in floats if p.shape and p.shape[0] in ("M", "S"))


def nudge(values: Any, rng: np.random.Generator) -> None:
    """Move half of the elements of a host array by one step, up or down."""
    moves = rng.integers(0, 4, values.shape, dtype=np.int8)
    step = np.where(moves == 0, 1, np.where(moves == 1, -1, 0))
    if values.dtype == numpy_dtype("bf16"):
        bits = np.ascontiguousarray(values).view(np.uint16)
        size = bits & 0x7FFF
        moved = np.where((size > 0) & (size < _LARGEST), bits + step.astype(np.int32), bits).astype(np.uint16)
        values[...] = moved.view(values.dtype)
    elif values.dtype == np.float32:
        values *= (1 + step * F32_STEP).astype(np.float32)
