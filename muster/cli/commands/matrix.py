"""``muster matrix``: every model on every target."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.cli.process.exits import INTERNAL, PASSED, REFUSED, describe
from kernel_muster.registry.errors import UsageError

if TYPE_CHECKING:
    from kernel_muster.audit.evidence import AuditOptions
    from kernel_muster.audit.matrix import Cell, Matrix
    from kernel_muster.audit.opening import BootRequest
    from kernel_muster.registry.launch.runners import Progress

TARGETS = ("cpu", "sm_80", "sm_90a", "sm_100a", "sm_121a")

Models = Annotated[
    list[str] | None,
    typer.Option("--models", metavar="NAME,...", help="These models only; repeatable.", show_default=False),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--targets",
        metavar="TARGET,...",
        help=f"Targets in place of {', '.join(TARGETS)}; repeatable.",
        show_default=False,
    ),
]


def matrix(
    models: Models = None,
    targets: Targets = None,
    manifests: options.Manifests = None,
    profile: options.Profile = options.ProfileName.SERVE,
    stage: options.Stage = None,
    as_of: options.AsOf = None,
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    format: options.AnyFormat = options.ReportFormat.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Audit models on targets: one table, and the findings that refuse.

    The default is all models with a manifest. Each kernel is compiled once for each architecture.

    Exit code: 0 all passed, 1 any refused, 2 usage, 3 a builder failed.
    """
    from kernel_muster.audit.matrix import Matrix
    from kernel_muster.cli.booting import audit_options, request_of
    from kernel_muster.cli.lists import find_plugins
    from kernel_muster.cli.process.logs import configured_logs
    from kernel_muster.cli.process.output import check_writable, say, write_file
    from kernel_muster.cli.process.progress import shown_progress
    from kernel_muster.MODEL_toml.resolve import Catalogue

    date = options.parse_date(as_of)
    asked = audit_options(
        profile=profile.value, stage=stage.value if stage else None, as_of=date, set_hash=None, allowed=()
    )
    columns = _checked_targets(options.split_commas(targets, "--targets") or TARGETS)
    check_writable(output)
    names = tuple(dict.fromkeys(options.split_commas(models, "--models")))
    if not names:
        catalog = find_plugins(request_of(plugins=plugin, no_plugins=no_plugin))
        catalogue = Catalogue.from_folders(manifests or catalog.manifest_folders, levers=catalog.levers)
        names = tuple(manifest.name for manifest in catalogue.manifests)
    if not names:
        raise UsageError("no manifest describes a model: name --models, or --manifests")
    with configured_logs(verbose=verbose), shown_progress() as progress:
        cells = [
            _cell(
                request_of(model=name, target=target, manifests=manifests, plugins=plugin, no_plugins=no_plugin),
                asked,
                progress,
            )
            for target in columns
            for name in names
        ]
    order = {(cell.model, cell.target): cell for cell in cells}
    cells = [order[name, target] for name in names for target in columns]
    given: dict[str, Sequence[object]] = {
        "--profile": [profile.value] if profile is not options.ProfileName.SERVE else [],
        "--stage": [stage.value] if stage else [],
        "--as-of": [as_of] if as_of else [],
        "--manifests": manifests or [],
        "--plugin": plugin or [],
        "--no-plugin": no_plugin or [],
    }
    again = [text for option, values in given.items() for value in values for text in (option, str(value))]
    found = Matrix(names, columns, tuple(cells), tuple(again))
    text = _rendered(found, format)
    if output is None:
        say(text)
    else:
        write_file(output, text)
    return _code(found)


def _checked_targets(names: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an invalid target before any work."""
    from kernel_muster.registry.hardware.target import resolve_target

    for name in names:
        resolve_target(name)
    return tuple(dict.fromkeys(names))


def _cell(request: "BootRequest", asked: "AuditOptions", progress: "Progress | None") -> "Cell":
    from kernel_muster.audit.matrix import cell_of
    from kernel_muster.cli.booting import run_audit

    def show(done: int, total: int, name: str) -> None:
        if progress is not None:
            progress(done, total, f"{request.model} on {request.target}: {name}")

    audited = run_audit(request, asked, progress=show)
    failure = describe(audited.failure) if audited.failure is not None else ""
    return cell_of(str(request.model), str(request.target), audited.report, failure)


def _rendered(matrix: "Matrix", format: options.ReportFormat) -> str:
    from kernel_muster.audit.matrix import SCHEMA, VERSION, headline, sections

    if format is options.ReportFormat.JSON:
        groups = [asdict(group) | {"keys": dict(group.keys)} for group in matrix.groups()]
        head = {"schema": SCHEMA, "version": VERSION, "passed": matrix.passed}
        return json.dumps({**head, **asdict(matrix), "groups": groups}, indent=1)
    if format is options.ReportFormat.MARKDOWN:
        from kernel_muster.audit.render.markdown import render_markdown_sections

        return render_markdown_sections(headline(matrix), sections(matrix))
    from kernel_muster.audit.render.text import render_sections

    return render_sections(sections(matrix), headline(matrix), headline(matrix))


def _code(matrix: "Matrix") -> int:
    if any(cell.verdict == "refused" for cell in matrix.cells):
        return REFUSED
    return PASSED if matrix.passed else INTERNAL
