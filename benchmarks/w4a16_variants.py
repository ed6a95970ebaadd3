"""Every variant of the portable W4A16 GEMM beside cuBLAS on BF16 weights: microseconds, TFLOP/s, and equal bits.

    python benchmarks/w4a16_variants.py [--shapes qkv,gate_up,down,o_proj] [--rows 16,64,...] [--rounds 9]

Cold L2, graph replays, all contestants of a shape in turn, as in ``muster bench``. A variant whose result differs from
that of ``w4a16_gemm_t`` in one bit is not timed. Each row is printed after its measurement.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import cupy
import kernel_muster as km
from kernel_muster.bench.contestants import (
    Absent,
    Contestant,
    Entry,
    copied,
    found,
    launch_of,
    poisoned,
    size_of,
)
from kernel_muster.bench.data.nvfp4 import DenseData, make_dense_data
from kernel_muster.bench.families.gemv import LARGEST_ERROR
from kernel_muster.bench.peers.peers import cublas_bf16
from kernel_muster.bench.problem import Problem
from kernel_muster.bench.race import Row, free_memory, race
from kernel_muster.bench.timing import Timer, copies_of
from kernel_muster.plugins.w4a16 import ONE_ORDER
from kernel_muster.plugins.w4a16.launch import TILES
from kernel_muster.registry.selection.handles import Handle
from record import header

SHAPES = {"qkv": (14336, 5120), "gate_up": (17408, 5120), "down": (5120, 17408), "o_proj": (5120, 6144)}
ROWS = (16, 32, 64, 128, 256, 512, 1024, 4096)
CUBLAS = "cuBLAS bf16"
KEYS = (ONE_ORDER, *(key for key in TILES if key != ONE_ORDER))


def judge(data: DenseData, rows: int) -> Callable[[Any], float]:
    """Return the judge of a result: its error, or infinity if a variant's bits differ from the first one's."""
    first: list[Any] = []

    def error(out: Any) -> float:
        if isinstance(out, cupy.ndarray):  # ours; the peer's is a torch tensor
            bits = out[:rows].view(cupy.uint16)
            first.append(bits.copy())
            if not bool((bits == first[0]).all()):
                return float("inf")
            del first[1:]
        return data.error(out, rows)

    return error


def cold_weights(handles: Mapping[str, Handle], data: DenseData) -> dict[str, list[Any]]:
    """Return cold copies of the weight by layout, shared by all variants of a layout."""
    made: dict[str, list[Any]] = {}
    for handle in handles.values():
        layout = str(handle.weight_layout)
        if layout not in made:
            first = handle.prepare_weight(data.weight)
            made[layout] = [first, *(copied(first) for _ in range(copies_of(size_of(first)) - 1))]
    return made


def variant(handle: Handle, data: DenseData, rows: int, weights: Sequence[Any]) -> Contestant:
    """Return one variant over the copies of its layout."""

    def make(stream: Any) -> Entry:
        out = poisoned((rows, data.features))
        launches = tuple(launch_of(handle, stream, x=data.x[:rows], w=weight, out=out) for weight in weights)
        return Entry(launches, out, size_of(weights[0]), 2.0 * rows * data.features * data.depth)

    return Contestant(str(handle.key), "ours", make, (handle,))


def shown(row: Row) -> str:
    """Return one cell: microseconds and TFLOP/s, or the reason for their absence."""
    return f"{row.us:.1f} ({row.tflop_per_s:.0f})" if row.us is not None and row.tflop_per_s else row.note


def main() -> None:
    """Print the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    rows = [int(count) for count in given.rows.split(",")]
    command = f"python benchmarks/w4a16_variants.py --shapes {given.shapes} --rows {given.rows} --rounds {given.rounds}"
    print(header(command))
    device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    packages = ("cupy-cuda13x", "nvidia-cuda-nvrtc", "cuda-bindings", "torch")
    print(f"device: {device}; " + ", ".join(f"{name} {version(name)}" for name in packages))
    kernels, timer = km.open_registry("cuda"), Timer()
    handles = {key: found(kernels, *key.split("::")) for key in KEYS}
    print("\nus (TFLOP/s)\n\n| shape | M | " + " | ".join((*KEYS, CUBLAS)) + " | error |")
    print("|---|--:|" + "--:|" * (len(TILES) + 2))
    for name in given.shapes.split(","):
        data = make_dense_data(*SHAPES[name], max(rows))
        weights = cold_weights(handles, data)
        for count in rows:
            variants = [variant(one, data, count, weights[str(one.weight_layout)]) for one in handles.values()]
            peer = Contestant(CUBLAS, "peer", partial(_peer, data, count), (), 1e-2)
            size = f"{data.features} x {data.depth}"
            problem = Problem(name, size, count, (*variants, peer), judge(data, count), LARGEST_ERROR)
            taken = list(race(timer, "w4a16", problem, given.rounds))
            error = max(row.relative_l2 or 0.0 for row in taken[:-1])
            print(f"| {name} | {count} | " + " | ".join(map(shown, taken)) + f" | {error:.1e} |", flush=True)
        del weights
        free_memory()


def _peer(data: DenseData, rows: int, stream: Any) -> Entry | Absent:
    return cublas_bf16(data, rows)


if __name__ == "__main__":
    main()
