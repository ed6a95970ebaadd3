"""The host time of one launch as an operator of torch, beside the ways without it and a native operator.

    python benchmarks/torch_overhead.py [--target cuda]

Each figure is the median of several interleaved rounds of one process. On a GPU the problems are so small that the
launches never wait for the device; the stream is empty before each round. On ``cpu`` the kernel itself, NumPy, counts
in every row but the native one.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import kernel_muster as km
import torch
from kernel_muster.torch import Kernels, Nvfp4Linear, RMSNorm
from kernel_muster.torch.arrays import host_array
from record import header
from rich.console import Console
from rich.table import Table

CALLS, ROUNDS, WARM_UP = 2000, 15, 50
ROWS, WIDTH = 4, 256


def contestants(kernels: Kernels) -> dict[str, Callable[[], object]]:
    """Return the calls by name: an RMS norm in every way, modules, and native operators."""
    kernel = kernels.kernel("norm", "rms_norm")
    device = kernels.device
    x = torch.randn(ROWS, WIDTH, device=device).to(torch.bfloat16)
    weight, out = torch.ones(WIDTH, dtype=torch.bfloat16, device=device), torch.empty_like(x)
    arrays = [one if kernel.on_device else host_array(one) for one in (x, weight, out)]
    stream = torch.cuda.current_stream().cuda_stream if kernel.on_device else None
    prepared = kernel.handle.prepare(arrays[0], arrays[1], 1e-6, 0.0, arrays[2])
    op, token = kernel.op, kernel.token
    module = RMSNorm(weight, 1e-6).bind(kernels)
    plain = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=device).to(torch.bfloat16)
    linear = Nvfp4Linear.of_module(plain).bind(kernels)
    return {
        "launch of handle.prepare(...)": lambda: prepared(stream),
        "handle.prepare(...) alone": lambda: kernel.handle.prepare(arrays[0], arrays[1], 1e-6, 0.0, arrays[2]),
        "handle(...)": lambda: kernel.handle(arrays[0], arrays[1], 1e-6, 0.0, arrays[2], stream=stream),
        "torch.ops.muster.rms_norm(...)": lambda: op(x, weight, 1e-6, 0.0, out, served_by=token),
        "Kernel(...)": lambda: kernel(x, weight, 1e-6, 0.0, out),
        "RMSNorm module": lambda: module(x),
        "Nvfp4Linear module": lambda: linear(x),
        "torch.nn.Linear module": lambda: plain(x),
        "torch.nn.functional.rms_norm(...)": lambda: torch.nn.functional.rms_norm(x, (WIDTH,), weight, 1e-6),
        "torch.add(..., out=)": lambda: torch.add(x, x, out=out),
    }


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a graph of ten calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return graph.replay


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the time of one call on the host."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="cuda")
    target = parser.parse_args().target
    with Kernels(km.open_registry(target, levers={})) as kernels, torch.inference_mode():
        rows = contestants(kernels)
        if target != "cpu":
            op = rows["torch.ops.muster.rms_norm(...)"]
            rows["replay of a graph of ten operators, each"] = graph_of(op)
        taken: dict[str, list[float]] = {name: [] for name in rows}
        for call in rows.values():
            microseconds(call, WARM_UP)
        for _ in range(ROUNDS):
            for name, call in rows.items():
                per = 10 if name.startswith("replay") else 1
                taken[name].append(microseconds(call, CALLS // (per if target != "cpu" else 10)) / per)
    device = torch.cuda.get_device_name() if target != "cpu" else "cpu"
    print(header(f"python benchmarks/torch_overhead.py --target {target}"))
    print(f"device: {device}; torch {torch.__version__}; RMS norm of {ROWS} x {WIDTH}, BF16\n")
    table = Table("call", "us, median", "least", "most")
    for name, values in taken.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
