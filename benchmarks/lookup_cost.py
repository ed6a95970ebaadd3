"""The cost of a lookup, beside a dict lookup, a pluggy hook call and a metadata scan.

    python benchmarks/lookup_cost.py

Each figure is the median of several interleaved rounds in one process, so ratios hold on any machine.
"""

import statistics
import time
from collections.abc import Callable
from importlib.metadata import distributions

import kernel_muster as km
import pluggy
from kernel_muster.registry.discovery.entry_points import scan
from kernel_muster.registry.selection.lookups import Lookups
from record import header
from rich.console import Console
from rich.table import Table

CALLS = 100_000
ROUNDS = 7

spec, impl = pluggy.HookspecMarker("bench"), pluggy.HookimplMarker("bench")


class _Spec:
    @spec
    def ask(self, module: str, func: str) -> None:
        """Answer."""


class _Plugin:
    @impl
    def ask(self, module: str, func: str) -> int:
        return 1


def dict_lookup() -> None:
    """Look a key up in a dict."""
    table = {("w4a16", "w4a16_gemm_t"): 1}
    for _ in range(CALLS):
        table.get(("w4a16", "w4a16_gemm_t"))


def pluggy_call() -> None:
    """Call a hook with one implementation."""
    manager = pluggy.PluginManager("bench")
    manager.add_hookspecs(_Spec)
    manager.register(_Plugin())
    for _ in range(CALLS):
        manager.hook.ask(module="w4a16", func="w4a16_gemm_t")


def same_site(kernels: Lookups) -> None:
    """Look one key up from one line, as a loop over layers does."""
    for _ in range(CALLS):
        kernels.try_kernel("w4a16", "w4a16_gemm_t")


def new_layers(kernels: Lookups) -> None:
    """Look keys up under a new layer's label each time 10 keys were asked: every lookup is a new place."""
    for layer in range(CALLS // 10):
        view = kernels.for_layer(f"layers.{layer}")
        view.try_kernel("w4a16", "w4a16_gemm")
        view.try_kernel("w4a16", "w4a16_gemm_t")
        view.try_kernel("w4a16", "w4a16_gemm_t_k64")
        view.try_kernel("w4a16", "w4a16_gemm_t_m128")
        view.try_kernel("w4a16", "w4a16_gemm_t_p3")
        view.try_kernel("w4a16_gemv", "w4a16_gemv")
        view.try_kernel("w4a16_gemv", "w4a16_gemv_batch2")
        view.try_kernel("w4a16_gemv", "w4a16_gemv_batch3")
        view.try_kernel("w4a16_gemv", "w4a16_gemv_batch4")
        view.try_kernel("silu", "silu_mul")


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the table."""

    def scan_all() -> None:
        scan()

    def list_all() -> None:
        for distribution in distributions():
            tuple(distribution.entry_points)

    rows: dict[str, tuple[Callable[[], object], int]] = {
        "dict lookup": (dict_lookup, CALLS),
        "pluggy hook call, one implementation": (pluggy_call, CALLS),
        "try_kernel, same site": (lambda: same_site(km.open_registry("cpu", levers={})), CALLS),
        "try_kernel, every place new": (lambda: new_layers(km.open_registry("cpu", levers={})), CALLS),
        "importlib.metadata: all entry points": (list_all, 1),
        "our scan of entry points": (scan_all, 1),
    }
    opening = statistics.median(_once(lambda: km.open_registry("cpu", levers={})) for _ in range(ROUNDS))
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, (call, _) in rows.items():
            times[name].append(_once(call))
    base = statistics.median(times["dict lookup"]) / CALLS
    table = Table("what", "us each", "spread", "x dict lookup", title=f"Lookups, {CALLS} calls, {ROUNDS} rounds")
    for name, (_, calls) in rows.items():
        taken = [t - (opening if name.startswith("try_kernel") else 0) for t in times[name]]
        each = statistics.median(taken) / calls
        spread = (max(taken) - min(taken)) / statistics.median(taken)
        table.add_row(name, f"{each * 1e6:.3f}", f"{spread:.0%}", f"{each / base:.1f}")
    console = Console(width=110)
    console.print(header("python benchmarks/lookup_cost.py"))
    console.print(table)


if __name__ == "__main__":
    main()
