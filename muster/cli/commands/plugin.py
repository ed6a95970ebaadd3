"""``muster plugin check``: the checks for authors of kernels."""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.cli.process.exits import PASSED, REFUSED
from kernel_muster.registry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel_muster.audit.plugin_check.rows import PluginReport
    from kernel_muster.audit.render.sections import Section

Subject = Annotated[
    str,
    typer.Argument(metavar="PLUGIN", help="An installed distribution, one of its plugins as listed, or a wheel file."),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="Time for one step. A plugin may load for half of it, and at most MUSTER_PLUGIN_TIMEOUT_S.",
        min=0.1,
        max=86_400,
    ),
]


class CheckStage(StrEnum):
    """Stage required of every kernel."""

    COMPILED = "compiled"
    PROVEN = "proven"


StageOption = Annotated[
    CheckStage | None,
    typer.Option(
        "--stage",
        help="Refuse unless every kernel is compiled, or proven; a missing compiler or GPU is no excuse. Without it, "
        "impossible steps are skipped, and the verdict lists them.",
        show_default=False,
    ),
]


def check(
    plugin: Subject,
    timeout: Timeout = 120.0,
    stage: StageOption = None,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Check a plugin for its author: registration, compilation and results.

    The plugin runs in a child process: hooks, contracts, code for every architecture of its specs, and the contracts'
    cases on the host and on a GPU, if there is one. Warnings of serving refuse here. For one plugin of a distribution,
    only its own registrations are checked. --verbose adds all steps, and the resources of the compiled code.

    Exit code: 0 passed, 1 refused, 2 usage.
    """
    from kernel_muster.audit.plugin_check.check import check_plugin
    from kernel_muster.audit.plugin_check.reporting import refused_install
    from kernel_muster.cli.process.ending import cleaned_up
    from kernel_muster.cli.process.output import check_writable, say, say_printed, write_file
    from kernel_muster.cli.process.progress import shown_progress
    from kernel_muster.cli.wheels import WheelRefused, install_wheel, installed, path_with

    check_writable(output)
    cache_dir = os.environ.get("MUSTER_CACHE_DIR") or None
    with (
        cleaned_up(),
        tempfile.TemporaryDirectory(prefix="muster-check-") as temporary,
        shown_progress() as progress,
    ):
        folder = Path(temporary) / "wheel"
        is_wheel, named = plugin.endswith(".whl"), None
        try:
            if is_wheel:
                if not Path(plugin).is_file():
                    raise UsageError(f"{plugin} is no file")
                found = install_wheel(Path(plugin), folder)
                path = path_with(found, folder, Path(temporary) / "shadows")
            else:
                (found, named), path = installed(plugin), sys.path
        except WheelRefused as error:
            report = refused_install(Path(plugin).name, error.why, error.log, error.remedy)
        else:
            report = check_plugin(
                str(found.metadata["Name"]),
                found.version,
                path=path,
                seconds=timeout,
                plugin=named,
                stage=stage.value if stage else None,
                cache_dir=cache_dir,
                unpacked=folder if is_wheel else None,
                progress=progress,
                printed=partial(say_printed, str(found.metadata["Name"])),
            )
    text = json.dumps(asdict(report), indent=1) if format is options.Format.JSON else _text(report, verbose)
    if output is None:
        say(text)
    else:
        write_file(output, text)
    return PASSED if report.passed else REFUSED


def _text(report: "PluginReport", verbose: bool) -> str:
    from kernel_muster.audit.render.text import render_sections

    return render_sections(_sections(report, verbose), _headline(report), _headline(report))


def _headline(report: "PluginReport") -> str:
    from kernel_muster.audit.render.plain import plural

    counts = {outcome: sum(step.outcome == outcome for step in report.steps) for outcome in ("ok", "failed", "skipped")}
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    name = f"{report.distribution} {report.distribution_version}".strip()
    name += f", plugin {report.plugin_asked}" if report.plugin_asked else ""
    missed = "".join(f"{separator} {text}" for separator, text in zip(";,", report.not_done, strict=False))
    return f"{report.verdict.upper()}: {name}: {plural(len(report.steps), 'step')}: {said}{missed}"


def _sections(report: "PluginReport", verbose: bool) -> "Iterator[Section]":
    from kernel_muster.audit.plugin_check.protocol.machine_code import spill_notes
    from kernel_muster.audit.render.sections import Section, Table, finding_sections

    yield from finding_sections(report.findings, verbose=verbose)
    for row in report.plugins:
        hooks = " ".join(hook.removeprefix("muster_") for hook in row.hooks) or "no hook"
        yield Section(f"Plugin {row.name} ({row.status}): {hooks}", lines=row.keys)
    counted: dict[tuple[str, str], list[str]] = {}
    for step in report.steps:
        counted.setdefault((step.kind, step.target or "-"), []).append(step.outcome)
    summary = tuple(
        (kind, target, *(str(outcomes.count(name)) for name in ("ok", "failed", "skipped")))
        for (kind, target), outcomes in counted.items()
    )
    yield Section("Steps", table=Table(("STEP", "TARGET", "OK", "FAILED", "SKIPPED"), summary))
    if notes := tuple(spill_notes(report.entries)):
        yield Section("Registers do not suffice: these kernels spill to memory", lines=notes)
    if report.notes:
        yield Section("Notes about its process", lines=report.notes)
    if lines := tuple(_skipped_lines(report)):
        yield Section("Skipped", lines=lines)
    shown = [step for step in report.steps if verbose or step.outcome == "failed"]
    if shown:
        rows = tuple((s.kind, s.subject, s.target or "-", s.outcome, f"{s.seconds:.2f}", s.reason) for s in shown)
        title = "All steps" if verbose else "Steps that failed"
        yield Section(title, table=Table(("STEP", "WHAT", "TARGET", "OUTCOME", "SECONDS", "REASON"), rows))
    if verbose:
        yield from _code_sections(report)


def _code_sections(report: "PluginReport") -> "Iterator[Section]":
    """Yield the resources of the compiled code, and compiler warnings."""
    from kernel_muster.audit.render.sections import Section, Table

    def shown(number: int | None) -> str:
        return "-" if number is None else str(number)

    if report.entries:
        head = (
            "ENTRY",
            "SOURCE",
            "TARGET",
            "REGISTERS",
            "SHARED",
            "DYNAMIC",
            "STACK",
            "STORED",
            "LOADED",
            "THREADS",
        )
        rows = tuple(
            (row.entry, row.source, row.target, str(row.registers), str(row.static_shared_bytes),
             str(row.dynamic_shared_bytes), str(row.stack_bytes), shown(row.spill_store_bytes),
             shown(row.spill_load_bytes), shown(row.max_threads))
            for row in report.entries
        )  # fmt: skip
        title = "Compiled code: registers, stack and spilled bytes a thread; static and dynamic shared bytes a block"
        yield Section(title, table=Table(head, rows))
    if report.warnings:
        lines = tuple(f"{row.source} for {row.target}: {row.text}" for row in report.warnings)
        yield Section("Warnings of the compilers", lines=lines)


def _skipped_lines(report: "PluginReport") -> "Iterator[str]":
    """Yield a line for each reason, with the kinds and targets of its steps."""
    by_reason: dict[str, list[tuple[str, str]]] = {}
    for step in report.steps:
        if step.outcome == "skipped":
            by_reason.setdefault(step.reason, []).append((step.kind, step.target))
    for reason, places in by_reason.items():
        kinds, targets = (", ".join(dict.fromkeys(filter(None, names))) for names in zip(*places, strict=True))
        yield f"{len(places)} x {kinds}{f' on {targets}' if targets else ''}: {reason}"
