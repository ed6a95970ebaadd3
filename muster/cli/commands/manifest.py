"""``muster manifest``: checks of manifests, and their schema for editors."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.registry.messages.message import message

if TYPE_CHECKING:
    from kernel_muster.registry.findings import Finding

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="MODEL.toml files.", exists=True, dir_okay=False)]

LeverFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--levers", metavar="FILE", exists=True, dir_okay=False, show_default=False,
        help="Levers declared by an engine: a trace, or JSON with declared_levers; repeatable.",
    ),
]  # fmt: skip

_UNCHECKED = (
    "not checked here: whether anything asks for the keys that are waived or expected, whether a builder serves the "
    "model, and whether its dimensions are all that one needs (muster audit does)"
)


def lint(
    files: Files,
    levers: LeverFiles = None,
    no_plugin: options.NoPlugins = None,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Check manifests: all errors, with file and line.

    Only an audit can check that a model asks for a waived key. The levers are those of the loaded plugins and of
    --levers.

    Exit code: 0 no errors (warnings allowed), 1 errors, 2 an unreadable file.
    """
    from datetime import UTC, datetime

    from kernel_muster.audit.render.plain import plural
    from kernel_muster.audit.render.sections import Section
    from kernel_muster.audit.replay.engine_levers import read_engine_levers, with_engines
    from kernel_muster.audit.rules.levers import with_lines
    from kernel_muster.audit.rules.manifest import plain_scopes, run_out
    from kernel_muster.cli.booting import request_of
    from kernel_muster.cli.lists import Listing, find_plugins, rows_of, show
    from kernel_muster.MODEL_toml.resolve import Catalogue
    from kernel_muster.registry.findings import CODES
    from kernel_muster.registry.levers import read_levers

    read = [read_engine_levers(file) for file in levers or ()]
    catalog = find_plugins(request_of(no_plugins=no_plugin), output)
    declared = with_engines(catalog.levers, (lever for own, _ in read for lever in own))
    checked = Catalogue.from_files(dict.fromkeys(files), levers=declared)
    # A failed plugin may explain an unknown lever of a manifest.
    today = datetime.now(UTC).date()
    found, sound = [*(finding for _, bad in read for finding in bad), *checked.findings], []
    for manifest in checked.manifests:
        bad = with_lines(read_levers(declared, [("manifest", manifest.defaults)])[1], manifest)
        found += [*bad, *(finding for waiver in manifest.waivers for finding in run_out(waiver, today))]
        found += plain_scopes(manifest)
        sound += [] if bad else [manifest]
    found = [_with_option(finding) for finding in found]
    unloaded = [row for row in catalog.plugins if row.status != "loaded"]
    broken = [
        finding
        for finding in catalog.findings
        if finding.code == "PLUGIN_NOT_FOUND" or (found and CODES[finding.code].group == "plugins")
    ]
    title = f"Manifests: {plural(len(set(files)), 'file')}, {len(sound)} sound"
    unknown = (
        f"plugin {row.name} {'is blocked' if row.status == 'blocked' else 'did not load (muster plugins says why)'}: "
        "levers that it declares are not known here"
        for row in unloaded
    )
    section = Section(title, lines=(*(f"{m.name}: {m.path}" for m in sound), *unknown, _UNCHECKED))
    data = {"files": [str(file) for file in dict.fromkeys(files)], "sound": [manifest.name for manifest in sound]}
    data["plugins_not_loaded"] = [row.name for row in unloaded]
    return show(
        Listing("manifest-lint", data, (section,), rows_of((*found, *broken))),
        format,
        output,
        verbose=verbose,
    )


def _with_option(finding: "Finding") -> "Finding":
    """Add the remedy for levers that an engine declares and no plugin does."""
    if finding.template not in ("unknown_lever", "bad_manifest.lever"):
        return finding
    return replace(finding, remedies=(*finding.remedies, message("remedy.engine_levers")))


def schema(output: options.Output = None, verbose: options.Verbose = False) -> int:
    """Print the JSON Schema of a manifest."""
    from kernel_muster.cli.process.exits import PASSED
    from kernel_muster.cli.process.output import check_writable, say, write_file
    from kernel_muster.MODEL_toml.generate import schema_text

    check_writable(output)
    if output is None:
        say(schema_text())
    else:
        write_file(output, schema_text())
    return PASSED
