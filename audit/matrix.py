"""Models by targets: one audit a cell, and what refuses folded over the cells that share it."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from kernel_muster.audit.render.plain import plural
from kernel_muster.audit.render.sections import Section, Table
from kernel_muster.audit.report import Report
from kernel_muster.registry.values import frozen

SCHEMA = "kernel-muster/matrix"
VERSION = "1.4"


@frozen(kw_only=True)
class Cell:
    """One audit. ``causes`` are code and subject of what refuses, ``warned`` of what warns.

    ``failure`` is what the model's builder raised; ``stage_asked`` the stage that was asked for, if the kernels stayed
    below it.

    ``unknown`` says of a model that no manifest is named so, and which names are near.

    ``unkept`` says where compiled code could not be stored, and why (CACHE_NOT_KEPT): it is compiled in each run.
    """

    model: str
    target: str
    verdict: Literal["passed", "refused", "failed"]
    stage: str
    keys: int
    refusing: int
    warnings: int
    set_hash: str
    causes: tuple[tuple[str, str], ...] = ()
    warned: tuple[tuple[str, str], ...] = ()
    failure: str = ""
    unkept: tuple[tuple[str, str], ...] = ()
    stage_asked: str = ""
    unknown: str = ""

    @property
    def name(self) -> str:
        """The cell as the text calls it."""
        return f"{self.model} on {self.target}"

    @property
    def text(self) -> str:
        """The cell as the table shows it."""
        if self.verdict == "passed":
            warned = f" ({plural(self.warnings, 'warning')})" if self.warnings else ""
            missed = f", not {self.stage_asked}" if self.stage_asked else ""
            return f"{self.stage}{missed}{warned}"
        return f"REFUSED {self.refusing}" if self.verdict == "refused" else "BUILDER FAILED"


@frozen
class Group:
    """Causes that the same cells share: keys by code, and the command that tells why, of the first of the cells."""

    cells: tuple[str, ...]
    keys: tuple[tuple[str, tuple[str, ...]], ...]
    audit: str = ""


@frozen
class Matrix:
    """All cells, row by row: models in order, targets in order; ``options`` are those of the audit of each."""

    models: tuple[str, ...]
    targets: tuple[str, ...]
    cells: tuple[Cell, ...]
    options: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every cell passed."""
        return all(cell.verdict == "passed" for cell in self.cells)

    def groups(self, *, warned: bool = False) -> tuple[Group, ...]:
        """Fold what refuses, or what warns: causes that the same cells share stand together."""
        where: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for cell in self.cells:
            for cause in cell.warned if warned else cell.causes:
                where.setdefault(cause, []).append((cell.model, cell.target))
        shared: dict[tuple[tuple[str, str], ...], list[tuple[str, str]]] = {}
        for cause, places in where.items():
            shared.setdefault(tuple(places), []).append(cause)
        return tuple(
            Group(_folded(places), _by_code(causes), self._audit(places[0])) for places, causes in shared.items()
        )

    def _audit(self, place: tuple[str, str]) -> str:
        model, target = place
        return shlex.join(("muster", "audit", model, "--target", target, *self.options))


def cell_of(model: str, target: str, report: Report, failure: str = "") -> Cell:
    """Return the cell of one audit."""
    refusing = [row for row in report.findings if row.severity == "refuse" and not row.allowed]
    warning = [row for row in report.findings if row.severity == "warn" and not row.allowed]
    # a cell knows why its report is incomplete
    verdict: Literal["passed", "refused", "failed"] = "failed" if report.verdict == "incomplete" else report.verdict
    return Cell(
        model=model,
        target=target,
        verdict=verdict,
        stage=report.stage_reached,
        keys=report.counts.keys,
        refusing=report.counts.refusing,
        warnings=report.counts.warnings,
        set_hash=report.set_hash,
        causes=tuple(dict.fromkeys((row.code, row.subject) for row in refusing)),
        warned=tuple(dict.fromkeys((row.code, row.subject) for row in warning)),
        failure=failure,
        unkept=tuple((row.subject, row.why) for row in report.findings if row.code == "CACHE_NOT_KEPT"),
        stage_asked=report.stage_asked if report.below_stage_asked else "",
        unknown=next((row.why for row in refusing if row.code == "UNKNOWN_MODEL"), ""),
    )


def _by_code(causes: Iterable[tuple[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    keys: dict[str, list[str]] = {}
    for code, subject in causes:
        keys.setdefault(code, []).append(subject)
    return tuple((code, tuple(sorted(subjects))) for code, subjects in keys.items())


def _folded(places: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Name cells by target: ``sm_90a, sm_100a: model, model`` for targets that have the same models."""
    models: dict[str, list[str]] = {}
    for model, target in places:
        models.setdefault(target, []).append(model)
    targets: dict[tuple[str, ...], list[str]] = {}
    for target, names in models.items():
        targets.setdefault(tuple(names), []).append(target)
    return tuple(f"{', '.join(names)} on {', '.join(same)}" for names, same in targets.items())


def headline(matrix: Matrix) -> str:
    """Return the verdict in one line."""
    counts = Counter(cell.verdict for cell in matrix.cells)
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "refused", "failed") if counts[name])
    shape = f"{plural(len(matrix.models), 'model')} x {plural(len(matrix.targets), 'target')}"
    verdict = "PASSED" if matrix.passed else "REFUSED" if counts["refused"] else "INCOMPLETE"
    below = [cell for cell in matrix.cells if cell.verdict == "passed" and cell.stage_asked]
    missed = f", {len(below)} of them below stage {below[0].stage_asked}" if below else ""
    return f"{verdict}: {shape}: {said}{missed}"


def sections(matrix: Matrix) -> Iterator[Section]:
    """Yield the table, then what refuses."""
    by_place = {(cell.model, cell.target): cell.text for cell in matrix.cells}
    rows = tuple((model, *(by_place[model, target] for target in matrix.targets)) for model in matrix.models)
    yield Section("Stage reached, or refused", table=Table(("MODEL", *matrix.targets), rows))
    for title, tone, groups in (
        ("To act on", "refuse", matrix.groups()),
        ("Warnings", "warn", matrix.groups(warned=True)),
    ):
        for group in groups:
            lines = [f"{code}: {', '.join(keys)}" for code, keys in group.keys]
            lines += dict.fromkeys(c.unknown for c in matrix.cells if c.unknown and _names(group, c))
            lines.append(f"why, and what to do: {group.audit}")
            yield Section(f"{title}: {'; '.join(group.cells)}", tone, lines=tuple(lines))
    failed = [f"{cell.name}: {cell.failure}" for cell in matrix.cells if cell.failure]
    if failed:
        yield Section("Builders that failed", "refuse", lines=tuple(failed))
    if unkept := _unkept(matrix):
        yield Section("CACHE_NOT_KEPT: compiled code could not be stored in the cache", "note", lines=unkept)


def _names(group: Group, cell: Cell) -> bool:
    """Whether a group is about a model that is unknown in a cell."""
    subjects = dict(group.keys).get("UNKNOWN_MODEL", ())
    return any(("UNKNOWN_MODEL", subject) in cell.causes for subject in subjects)


def _unkept(matrix: Matrix) -> tuple[str, ...]:
    """Say of each cache that kept nothing why, by the first cell that met it: all cells share it."""
    met: dict[str, list[tuple[str, str]]] = {}
    for cell in matrix.cells:
        for folder, why in cell.unkept:
            met.setdefault(folder, []).append((cell.name, why))
    lines = []
    for folder, ((name, why), *others) in met.items():
        lines.append(f"{folder}: {name}: {why}" + (f" (and {plural(len(others), 'more cell')})" if others else ""))
    return tuple(lines)
