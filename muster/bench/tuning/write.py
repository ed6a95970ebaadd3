"""The table, and its summary as Markdown."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from kernel_muster._version import __version__
from kernel_muster.audit.tuning.table import SCHEMA, VERSION, Table, parse_table
from kernel_muster.bench.tuning.edges import FoundEdge, find_edges
from kernel_muster.bench.tuning.picks import Pick, picks
from kernel_muster.bench.tuning.questions import with_values
from kernel_muster.bench.tuning.source import BF16_ARMS, CUBLAS, Source, Timing
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.target import Device
from kernel_muster.registry.levers import Levers

METHOD = (
    "CUDA graph replays over copies that exceed the L2 (>= 320 MiB), plain launches, all arms of a shape and row count "
    "in turn; median of the rounds, spread = half the distance of the quartiles over the median; correctness against "
    "float64 first; an edge stands where the summed logarithm of the losses is least. figures: time of the arm above "
    "over that of the arm below."
)


def make_table(
    device: Device, arch: str, cuda: str, source: Source, timings: Sequence[Timing], edges: Sequence[FoundEdge],
    command: str,
) -> Table:  # fmt: skip
    """Build a table. UsageError if it is invalid. It covers the shapes of NVFP4 weights, if any."""
    of_nvfp4 = [one for one in timings if not set(one.us) <= {*BF16_ARMS, CUBLAS}]
    covered = of_nvfp4 or timings
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "device": {
            "name": device.name,
            "arch": arch,
            "multiprocessors": device.multiprocessors,
            "driver": device.driver,
            "cuda": cuda,
        },
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": command,
        "method": METHOD,
        "muster_version": __version__,
        "kernels": dict(sorted(source.kernels.items())),
        "covers": {
            name: {"least": min(values), "most": max(values)}
            for name, values in (
                ("rows", [t.rows for t in covered]),
                ("features", [t.features for t in covered]),
                ("depth", [t.depth for t in covered]),
            )
        },
        "edges": [_edge(edge) for edge in edges],
        "timings": [_timing(timing) for timing in timings],
    }
    return _sound(document)


def _sound(document: dict[str, Any]) -> Table:
    """Make the table. UsageError if a boot would refuse it."""
    table = parse_table(json.dumps(document), "the new table")
    if problems := table.problems():
        raise UsageError(f"the new table: no boot would take it: {'; '.join(problems)}")
    return table


def refitted(table: Table, levers: Levers, command: str) -> Table:
    """Return a table with edges derived again from its times. Device, date and kernels are those of the times.

    UsageError if no edge follows from them, or one that a boot would refuse.
    """
    edges = [_edge(edge) for edge in find_edges(timings_of(table), levers)]
    return _sound(table.model_dump(mode="json", by_alias=True) | {"edges": edges, "command": command})


def _edge(edge: FoundEdge) -> dict[str, Any]:
    question = edge.question
    return {
        "lever": question.lever,
        "value": edge.value,
        "built_in": edge.built_in,
        "below": question.below,
        "above": question.above,
        "loss": round(edge.loss, 4),
        "spread": round(edge.spread, 4),
        "figures": list(edge.figures),
    }


def _timing(timing: Timing) -> dict[str, Any]:
    return {
        "features": timing.features,
        "depth": timing.depth,
        "rows": timing.rows,
        "us": {arm: round(us, 3) for arm, us in timing.us.items()},
        "spread": {arm: round(spread, 4) for arm, spread in timing.spread.items()},
    }


def timings_of(table: Table) -> list[Timing]:
    """Return the times of a table."""
    return [Timing(t.features, t.depth, t.rows, t.us, t.spread) for t in table.timings]


def to_markdown(table: Table, levers: Levers) -> str:
    """Return the edges and, for each point, the dispatched arm beside cuBLAS. ``levers`` are the built-in ones."""
    known = {name: value for name, value in table.values().items() if name in levers}
    taken = list(picks(timings_of(table), with_values(levers, known)))
    lines = [*_head(table), *_edges(table), *_verdict(taken), *_rows(taken)]
    return "\n".join(lines) + "\n"


def _head(table: Table) -> Iterator[str]:
    yield f"- device: {table.where}, driver for CUDA {table.device.driver}, {table.device.cuda}"
    yield f"- date: {table.date}; kernel-muster {table.muster_version}; command: `{table.command}`"
    yield f"- method: {table.method}"
    yield ""


def _edges(table: Table) -> Iterator[str]:
    yield "| lever | value | built in | below / above | left to lose | spread |"
    yield "|---|--:|--:|---|--:|--:|"
    for edge in table.edges:
        cells = (edge.lever, edge.value, edge.built_in, f"{edge.below} / {edge.above}")
        yield f"| {' | '.join(map(str, cells))} | {edge.loss:.1%} | {edge.spread:.1%} |"
    yield ""


def _verdict(taken: Sequence[Pick]) -> Iterator[str]:
    compared = [pick for pick in taken if pick.cublas_us is not None]
    slower = [pick for pick in compared if pick.is_slower]
    if not compared:
        yield "cuBLAS was not measured."
    elif not slower:
        yield f"What dispatch picks is at none of {len(compared)} points slower than cuBLAS in BF16."
    else:
        where = ", ".join(f"{p.features}x{p.depth} M={p.rows}" for p in slower)
        yield f"What dispatch picks is slower than cuBLAS in BF16 at {len(slower)} of {len(compared)} points: {where}."
    yield ""


def _rows(taken: Sequence[Pick]) -> Iterator[str]:
    yield "| N x K | M | picked | us | fastest | us | cuBLAS bf16 us | cuBLAS / picked |"
    yield "|---|--:|---|--:|---|--:|--:|--:|"
    for p in taken:
        cublas = "- | -" if p.cublas_us is None else f"{p.cublas_us:.2f} | {p.cublas_us / p.us:.2f}"
        place = f"{p.features} x {p.depth} | {p.rows}"
        yield f"| {place} | {p.arm} | {p.us:.2f} | {p.fastest} | {p.fastest_us:.2f} | {cublas} |"
