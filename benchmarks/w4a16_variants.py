"""Every variant of the portable W4A16 GEMM beside cuBLAS on BF16 weights: microseconds, TFLOP/s, and equal bits.

    python benchmarks/w4a16_variants.py [--shapes qkv,gate_up,down,o_proj] [--rows 16,64,...] [--rounds 9]

Cold L2, graph replays, all contestants of a shape in turn (``muster bench`` says how). A variant whose result differs
from that of ``w4a16_gemm_t`` in one bit is not timed. Each row is printed when it is measured.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import cupy
import kernel_muster as km
from kernel_muster.bench.contestants import Contestant, found
from kernel_muster.bench.data import DenseData, make_dense_data
from kernel_muster.bench.gemv import LARGEST_ERROR, ours
from kernel_muster.bench.peers import cublas_bf16
from kernel_muster.bench.problem import Problem
from kernel_muster.bench.race import Row, free_memory, race
from kernel_muster.bench.timing import Timer
from kernel_muster.plugins.w4a16 import ONE_ORDER
from kernel_muster.plugins.w4a16.launch import TILES
from record import header

SHAPES = {"qkv": (14336, 5120), "gate_up": (17408, 5120), "down": (5120, 17408), "o_proj": (5120, 6144)}
ROWS = (16, 32, 64, 128, 256, 512, 1024, 4096)
CUBLAS = "cuBLAS bf16"
KEYS = (ONE_ORDER, *(key for key in TILES if key != ONE_ORDER))


def judge(data: DenseData, rows: int) -> Callable[[Any], float]:
    """Return what judges a result: its error, or infinity if a variant's bits are not those of the first."""
    first: list[Any] = []

    def error(out: Any) -> float:
        if isinstance(out, cupy.ndarray):  # ours; the peer's is torch's
            bits = out[:rows].view(cupy.uint16)
            first.append(bits.copy())
            if not bool((bits == first[0]).all()):
                return float("inf")
            del first[1:]
        return data.error(out, rows)

    return error


def measured(timer: Timer, kernels: Any, data: DenseData, name: str, rows: int, rounds: int) -> list[Row]:
    """Measure one shape at one row count."""
    variants = [ours(found(kernels, *key.split("::")), data, rows) for key in KEYS]
    peer = Contestant(CUBLAS, "peer", lambda stream: cublas_bf16(data, rows), (), 1e-2)
    size = f"{data.features} x {data.depth}"
    problem = Problem(name, size, rows, (*variants, peer), judge(data, rows), LARGEST_ERROR)
    return list(race(timer, "w4a16", problem, rounds))


def shown(row: Row) -> str:
    """Return one cell: microseconds and TFLOP/s, or why there is none."""
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
    print("\nus (TFLOP/s)\n\n| shape | M | " + " | ".join((*KEYS, CUBLAS)) + " | error |")
    print("|---|--:|" + "--:|" * (len(TILES) + 2))
    for name in given.shapes.split(","):
        data = make_dense_data(*SHAPES[name], max(rows))
        for count in rows:
            taken = measured(timer, kernels, data, name, count, given.rounds)
            error = max(row.relative_l2 or 0.0 for row in taken[:-1])
            print(f"| {name} | {count} | " + " | ".join(map(shown, taken)) + f" | {error:.1e} |", flush=True)
            free_memory()


if __name__ == "__main__":
    main()
