"""Output of the listing commands: as text, on a terminal or as JSON, with findings."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernel_muster.audit.opening import BootRequest, discover_for
from kernel_muster.audit.render.sections import Section, finding_sections
from kernel_muster.audit.render.text import render_sections
from kernel_muster.audit.report import FindingRow
from kernel_muster.audit.reporting import finding_row
from kernel_muster.audit.rules.levers import list_levers, with_lines
from kernel_muster.audit.tuning.choose import read_tuned_levers
from kernel_muster.audit.verdict import judge
from kernel_muster.cli.options import Format
from kernel_muster.cli.process.exits import PASSED, REFUSED
from kernel_muster.cli.process.output import check_writable, only_results_on_stdout, say, write_file
from kernel_muster.cli.process.results import is_terminal
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.target import Target, resolve_target
from kernel_muster.registry.levers import Levers, Origin
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.values import frozen

VERSION = "1.1"


@frozen
class Listing:
    """The result of a command. ``data`` goes into the JSON unchanged. Findings come last in the text.

    ``is_long``: findings that refuse come first, because a reader may stop before the end.
    """

    name: str
    data: dict[str, Any]
    sections: tuple[Section, ...]
    findings: tuple[FindingRow, ...] = ()
    is_long: bool = False
    version: str = VERSION

    @property
    def is_refused(self) -> bool:
        """Whether a finding would refuse a boot."""
        return any(row.severity == "refuse" for row in self.findings)


def show(listing: Listing, format: Format, output: Path | None, *, verbose: bool) -> int:
    """Write a list. Exit code 1 if a finding would refuse a boot."""
    found = tuple(finding_sections(listing.findings, verbose=verbose))
    is_first = listing.is_long and listing.is_refused
    parts = (*found, *listing.sections) if is_first else (*listing.sections, *found)
    check_writable(output)
    if format is Format.JSON:
        text = json.dumps(_document(listing), indent=1)
    elif output is None and is_terminal():
        text = _coloured(parts)
    else:
        text = render_sections(parts)
    if output is None:
        say(text)
    else:
        write_file(output, text)
    return REFUSED if listing.is_refused else PASSED


def _document(listing: Listing) -> dict[str, Any]:
    head = {"schema": f"kernel-muster/{listing.name}", "version": listing.version}
    return {**head, **listing.data, "findings": [asdict(row) for row in listing.findings]}


def _coloured(parts: Iterable[Section]) -> str:
    from kernel_muster.audit.render.terminal import print_sections
    from kernel_muster.cli.reports import TerminalText

    stream = TerminalText()
    print_sections(parts, stream)
    return stream.getvalue()


def find_plugins(request: BootRequest, output: Path | None = None) -> Catalog:
    """Discover plugins with their output on stderr. UsageError first for an output file that cannot be written."""
    check_writable(output)
    with only_results_on_stdout():
        return discover_for(request)


def find_target(name: str | None) -> tuple[Target | None, list[Finding]]:
    """Resolve a target. If that fails, return the reason."""
    target, finding = resolve_target(name)
    return target, [finding] if finding else []


def find_levers(
    catalog: Catalog, request: BootRequest, manifest: Manifest | None = None, target: Target | None = None
) -> tuple[Levers, tuple[Finding, ...]]:
    """Read the levers like a boot, with a model's defaults if there is a model, and the table of a target."""
    sources: list[tuple[Origin, Mapping[str, object]]] = [(request.levers_origin, request.levers)]
    if manifest is not None:
        sources.append(("manifest", manifest.defaults))
    levers, findings, _ = read_tuned_levers(catalog.levers, sources, target)
    return levers, tuple(with_lines((*findings, *list_levers(levers, catalog.key_names)), manifest))


def rows_of(findings: Iterable[Finding]) -> tuple[FindingRow, ...]:
    """Return findings as report rows, judged as for serving."""
    return tuple(finding_row(judged) for judged in judge(findings, "serve").findings)
