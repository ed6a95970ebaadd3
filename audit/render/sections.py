"""What a report says, and in which order: the text, Markdown and terminal renderers share these sections."""

from collections import Counter
from collections.abc import Iterable, Iterator

from kernel_muster.audit.render.folded import cause_text, consequence_lines, folded, key_lines, remedy_texts
from kernel_muster.audit.render.plain import fold_layers, plural, size_text
from kernel_muster.audit.report import FindingRow, KernelRow, LeverRow, Report
from kernel_muster.registry.findings import CODES
from kernel_muster.registry.levers import concerns
from kernel_muster.registry.values import frozen

#: What is cut in a finding unless all of it is asked for; the JSON report always has everything.
MOST_LINES = 20
MOST_SITES = 8


@frozen
class Entry:
    """One finding: its number, code and subject, and labelled lines."""

    number: int
    code: str
    subject: str
    fields: tuple[tuple[str, tuple[str, ...]], ...]


@frozen
class Table:
    """Rows under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@frozen
class Section:
    """A titled part of the report; ``tone`` is the severity that colours it."""

    title: str
    tone: str = ""
    entries: tuple[Entry, ...] = ()
    lines: tuple[str, ...] = ()
    table: Table | None = None


def tone_of(report: Report) -> str:
    """Return the severity that colours the verdict; empty for a plain pass."""
    return "refuse" if not report.passed else "warn" if report.degraded or report.below_stage_asked else ""


def headline(report: Report) -> str:
    """Return the verdict in one line: what a model is called ends none."""
    subject = f"{report.model or '(no model)'} on {target_text(report)}".replace("\n", "\\n")
    counts = report.counts
    rest = f"{plural(counts.warnings, 'warning')}, {plural(counts.notes, 'note')}"
    if report.is_refused:
        return f"REFUSED: {subject}: {plural(counts.refusing, 'finding')} to act on, {rest}"
    if not report.passed:
        return f"INCOMPLETE: {subject}: the model was not built to its end, so that nothing is proven; {rest}"
    asked = f"{plural(counts.keys, 'kernel')} asked for, {counts.waived} waived"
    # A check that was asked for and did not run has not passed: the verdict says how far it holds.
    only = f" only at stage {report.stage_reached}, not {report.stage_asked}" if report.below_stage_asked else ""
    if report.degraded:
        allowed = "absent and allowed by --dangerously-allow-unresolved: "
        allowed += ", ".join(f.subject for f in report.findings if f.allowed)
        return f"PASSED, DEGRADED{only}: {subject}: {allowed}; {rest}"
    return f"PASSED{only}: {subject}: {asked}; {rest}"


def target_text(report: Report) -> str:
    """Return the target with its architecture and device."""
    more = [text for text in (report.arch, report.device) if text and text != report.target]
    return (report.target or "(no target)") + (f" ({', '.join(more)})" if more else "")


def sections(report: Report, *, verbose: bool = False) -> Iterator[Section]:
    """Yield the sections: what must be acted on first, then what is worth knowing, then what it rests on."""
    if not report.is_refused:
        yield from _failure(report, verbose)
    yield from finding_sections(report.findings, verbose=verbose)
    if report.is_refused:  # what refuses is acted on first
        yield from _failure(report, verbose)
    yield from _waivers(report, verbose)
    yield from _levers(report, verbose)
    yield from _kernels(report, verbose)
    yield from _plugins(report, verbose)
    yield from _layouts(report)
    yield _basis(report)


def _failure(report: Report, verbose: bool) -> Iterator[Section]:
    """Say why the model was not built to its end, unless a finding covers it."""
    if report.failure and not report.failure_reported:
        yield Section("The model was not built to its end", "refuse", lines=_cut(report.failure.splitlines(), verbose))


def finding_sections(findings: Iterable[FindingRow], *, verbose: bool = False) -> Iterator[Section]:
    """Yield findings by what they do, those that refuse first, numbered throughout."""
    rows = tuple(findings)
    groups = (
        ("To act on", "refuse", [f for f in rows if f.severity == "refuse" and not f.allowed]),
        ("Allowed for this boot by --dangerously-allow-unresolved", "warn", [f for f in rows if f.allowed]),
        ("Warnings", "warn", [f for f in rows if f.severity == "warn" and not f.allowed]),
        ("Notes", "note", [f for f in rows if f.severity == "note" and not f.allowed]),
    )
    number, explained = 0, set[str]()
    for title, tone, group in groups:
        if not group:
            continue
        codes = Counter(finding.code for finding in group)
        entries = []
        for alike in folded(group):
            number += 1
            code = alike[0].code
            make = _entry if len(alike) == 1 else _folded_entry
            entries.append(make(number, alike, verbose, is_first=code not in explained))
            explained.add(code)
        counted = ", ".join(f"{count} {code}" for code, count in codes.items())
        yield Section(f"{title}: {counted}", tone, tuple(entries))


def _folded_entry(number: int, alike: tuple[FindingRow, ...], verbose: bool, *, is_first: bool) -> Entry:
    """Tell findings that differ in nothing but their keys as one; the JSON report keeps them apart."""
    first = alike[0]
    fields = (
        ("what", (first.title,) if is_first else ()),
        ("why", (cause_text(first),)),
        ("keys", key_lines(alike, verbose=verbose)),
        ("where", () if verbose else ("--verbose shows the layers and sites of each",)),
        ("remedy", remedy_texts(first)),
    )
    return Entry(number, first.code, f"{len(alike)} keys", tuple((label, lines) for label, lines in fields if lines))


def _entry(number: int, alike: tuple[FindingRow, ...], verbose: bool, *, is_first: bool) -> Entry:
    finding = alike[0]
    fields = (
        ("what", (finding.title,) if is_first else ()),  # what a code means is said once
        ("why", tuple(finding.why.splitlines())),
        ("layers", (fold_layers(finding.layers),) if finding.layers else ()),
        ("where", _cut(finding.where, verbose, MOST_SITES)),  # what to do shall not stand behind them
        ("remedy", finding.remedies),
        ("explains", _cut(consequence_lines(finding.explains), verbose)),
        ("log", _cut_between(finding.log.splitlines(), verbose)),
    )
    return Entry(number, finding.code, finding.subject, tuple((label, lines) for label, lines in fields if lines))


def _cut(lines: Iterable[str], verbose: bool, most: int = MOST_LINES) -> tuple[str, ...]:
    whole = tuple(lines)
    if verbose or len(whole) <= most + 1:  # a line that says there is one more is no shorter
        return whole
    return (*whole[:most], f"... ({len(whole) - most} more lines: --verbose, or --format json)")


def _cut_between(lines: Iterable[str], verbose: bool, most: int = MOST_LINES) -> tuple[str, ...]:
    """Keep both ends of a log: a compiler's first error stands in front, what a traceback comes to behind."""
    whole = tuple(lines)
    if verbose or len(whole) <= most + 1:
        return whole
    head = most // 2
    left_out = f"... ({len(whole) - most} lines between: --verbose, or --format json)"
    return (*whole[:head], left_out, *whole[head - most :])


def _kernels(report: Report, verbose: bool) -> Iterator[Section]:
    if not report.kernels:
        return
    served = {row.served_by: _provider(row) for row in report.kernels if row.served_by}
    providers = Counter(served.values())
    lines = [f"{plural(count, 'key')} served by {provider}" for provider, count in sorted(providers.items())]
    lines += [f"{' > '.join(row.chain)}: {row.served_by} serves" for row in report.kernels if row.outcome == "fallback"]
    counts = report.counts
    title = f"Kernels: {plural(counts.keys, 'key')} in {plural(counts.lookups, 'lookup')}"
    header = ("KEY OR CHAIN", "KIND", "OUTCOME", "PROVIDER", "TIER", "STAGE", "TIMES", "LAYERS", "REACHED BY", "WHEN")
    table = Table(header, tuple(map(_kernel_cells, report.kernels))) if verbose else None
    yield Section(title, lines=tuple(lines), table=table)


def _provider(row: KernelRow) -> str:
    return f"{row.distribution} {row.version}".strip() + f" (tier {row.tier}, {row.backend or 'unknown backend'})"


def _kernel_cells(row: KernelRow) -> tuple[str, ...]:
    return (
        " > ".join(row.chain) or row.key,
        row.kind,
        row.outcome,
        f"{row.distribution} {row.version}".strip() or "-",
        row.tier or "-",
        row.stage or "-",
        str(sum(row.sites.values())),
        fold_layers(row.layers) or "-",
        row.reached_by or "-",
        row.when,
    )


def _waivers(report: Report, verbose: bool) -> Iterator[Section]:
    if not report.waivers:
        return
    hint = "" if verbose else " (reasons: --verbose)"
    lines = [
        f"{w.key}: {w.reason} ({w.where}{f', until {w.until}' if w.until else ''})" if verbose else w.key
        for w in report.waivers
    ]
    yield Section(f"Waived: {plural(len(report.waivers), 'absent kernel')}{hint}", lines=tuple(lines))


def lever_text(row: LeverRow) -> str:
    """Return ``MUSTER_NO_X=0 (environment) -> kernel kept``."""
    value = " unset" if row.value is None else f"={value_text(row.value)} ({row.origin})"
    effect = f" -> {row.effect}" if row.effect else ""
    return f"{row.name}{value}{effect}{' [diagnostic: not for serving]' if row.diagnostic else ''}"


def value_text(value: bool | int | str | None) -> str:
    """Return a lever's value as one would set it."""
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def assumed_text(names: Iterable[str], where: str) -> str:
    """Return the one line about levers whose built-in values nobody measured here."""
    return f"assumed, not measured on {where} with the kernels that serve: {', '.join(names)}"


def _levers(report: Report, verbose: bool) -> Iterator[Section]:
    if not report.levers:
        return
    shown = [row for row in report.levers if verbose or row.origin != "built-in"]
    lines = [lever_text(row) for row in shown] or ["all at their built-in values"]
    asked = {key for row in report.kernels for key in (row.key, *row.chain)}
    assumed = [row.name for row in report.levers if row.assumed and concerns(row.keys, asked)]
    if assumed:
        lines.append(assumed_text(assumed, report.device or report.arch))
    yield Section("Levers", lines=tuple(lines))


def _plugins(report: Report, verbose: bool) -> Iterator[Section]:
    rows = report.plugins if verbose else [row for row in report.plugins if row.status != "loaded" or row.notes]
    lines = [
        f"{row.name} {row.status}: {f'{row.distribution} {row.version}'.strip()}, {plural(row.kernels, 'key')}"
        + "".join(f"; {note}" for note in row.notes)
        for row in rows
    ]
    counted = Counter(row.status for row in report.plugins)
    title = "Plugins: " + ", ".join(f"{count} {status}" for status, count in sorted(counted.items(), reverse=True))
    if report.plugins:
        yield Section(title, lines=tuple(lines))


def _layouts(report: Report) -> Iterator[Section]:
    sizes: dict[str, list[int]] = {}
    conditional: dict[str, list[int]] = {}
    for row in report.layouts:
        sizes.setdefault(row.layout, []).append(row.size_bytes)
        if row.condition:
            conditional.setdefault(row.condition, []).append(row.size_bytes)
    if sizes:
        total = size_text(sum(map(sum, sizes.values())))
        lines = [f"{layout}: {plural(len(s), 'weight')}, {size_text(sum(s))}" for layout, s in sorted(sizes.items())]
        for condition, s in sorted(conditional.items()):
            copies = "copy is" if len(s) == 1 else "copies are"
            lines.append(f"{len(s)} {copies} built, {size_text(sum(s))}, {condition}")
        yield Section(f"Copies of weights: {total}", lines=tuple(lines))


def _uncompiled(report: Report) -> str:
    """Say why nothing was compiled, where that needs no device: no kernel serves, a trace was replayed, no compiler.

    Where a build failed, its finding says so.
    """
    if report.arch in ("", "cpu") or report.stage_reached != "registered" or report.stage_asked:
        return ""
    if report.replayed:
        return "; a replay compiles nothing"
    serving = [row for row in report.kernels if row.served_by]
    if not serving:
        return "; no kernel serves, so that nothing was compiled"
    has_builds = any(row.stage != "registered" for row in serving)
    if has_builds or any(CODES[row.code].group == "build" for row in report.findings if row.code in CODES):
        return ""
    return "; nothing was compiled: install kernel-muster[nvrtc13,numba13]"


def _builder(report: Report) -> str:
    """Return the builder with its maturity, and the recorded run that it rests on."""
    run = f", judged at full size on {report.recorded_run}" if report.recorded_run else ""
    return f"{report.builder} ({report.maturity}{run})" if report.builder else ""


def _basis(report: Report) -> Section:
    asked = f" (asked for: {report.stage_asked})" if report.stage_asked else ""
    facts = (
        ("manifest", report.manifest),
        ("builder", _builder(report)),
        ("quant", report.quant),
        ("profile", report.profile),
        ("as of", report.as_of),
        ("stage", report.stage_reached + asked + _uncompiled(report)),
        ("set hash", report.set_hash),
        ("kernel-muster", report.muster_version),
    )
    return Section("Basis", lines=tuple(f"{name}: {value}" for name, value in facts if value))
