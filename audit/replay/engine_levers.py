"""Levers that an engine declares itself, as its traces write them down: for replays, and for checks of manifests."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kernel_muster.audit.replay.trace import parse_trace, read_document
from kernel_muster.audit.replay.trace_model import Trace, TraceLever
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.levers import CORE_LEVERS, Lever
from kernel_muster.registry.messages.message import message

#: What the rest of a trace may be, in a file of levers alone.
_NO_BOOT = {"version": "1.0", "target": {"arch": "cpu"}, "kernels": [], "lookups": []}


def engine_levers(
    rows: Iterable[TraceLever], source: str, where: tuple[str, ...] = ()
) -> tuple[list[Lever], list[Finding]]:
    """Return the levers that an engine declares; one that is malformed is BAD_LEVER, and takes any text."""
    levers, findings = [], []
    for row in rows:
        lever = Lever(
            name=row.name,
            kind=row.kind,
            default=row.default,
            doc="declared by the traced engine",
            minimum=row.minimum,
            maximum=row.maximum,
            choices=row.choices,
            conflicts=row.conflicts,
            tuning=row.tuning,
        )
        if problems := lever.problems():
            why = message("bad_lever.declared", source=source, problems=problems)
            remedies = (message("remedy.declared_levers"),)
            findings.append(Finding("BAD_LEVER", row.name, why, where, remedies))
            lever = replace(lever, kind="text", default=None, choices=())
        levers.append(lever)
    return levers, findings


def with_engines(known: Iterable[Lever], own: Iterable[Lever]) -> tuple[Lever, ...]:
    """Return this program's levers and an engine's: of one that both declare the engine's, unless any boot has it."""
    return tuple({lever.name: lever for lever in (*known, *own, *CORE_LEVERS)}.values())


def read_engine_levers(path: Path) -> tuple[list[Lever], list[Finding]]:
    """Read a trace's levers, or those of a JSON object with ``declared_levers`` alone; UsageError for another file."""
    data = read_document(path)
    if not isinstance(data, dict) or not data.keys() & {"version", "declared_levers"}:
        raise UsageError(f'{path}: expected a trace, or an object with "declared_levers": [{{"name": ...}}]')
    trace: Trace = parse_trace({**_NO_BOOT, **data}, str(path))
    return engine_levers(trace.declared_levers, str(path), (str(path),))
