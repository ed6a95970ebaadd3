"""``muster tune``: measure the thresholds of dispatch on the local device."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kernel_muster.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel_muster.audit.tuning.table import Table
    from kernel_muster.bench.data.shapes import Shape
    from kernel_muster.bench.tuning.source import Source, Timing
    from kernel_muster.registry.levers import Levers
    from kernel_muster.registry.selection.lookups import Lookups

Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL]...", help="Tune for these models' projections.", show_default=False),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NxK", help="Tune this shape too; repeatable.", show_default=False),
]
Rows = Annotated[str | None, typer.Option(help="Row counts M, with commas.", show_default=False)]
Rounds = Annotated[
    int | None, typer.Option(help="Replays of each arm; default: 25.", min=5, max=1000, show_default=False)
]
Peers = Annotated[
    bool | None,
    typer.Option("--peers/--no-peers", help="Measure cuBLAS too, through torch; default: yes.",
                 show_default=False),
]  # fmt: skip
Seconds = Annotated[
    int | None,
    typer.Option(help="Begin no shape after this time; the table covers the others.", min=1, show_default=False),
]
Again = Annotated[
    Path | None,
    typer.Option(
        "--from", help="Derive the edges again from the times of this table, without measuring.", show_default=False
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="Write the table to this file, whole or not at all.", show_default=False)
]

_MOST_ROWS, _ROUNDS = 4096, 25
#: Default models: together they have every projection of the shipped models.
_MODELS = ("qwen3.6-27b", "qwen3.6-35b-a3b")


def tune(
    model: Models = None,
    shape: Shapes = None,
    rows: Rows = None,
    rounds: Rounds = None,
    peers: Peers = None,
    target: options.Target = None,
    no_plugin: options.NoPlugins = None,
    seconds: Seconds = None,
    again: Again = None,
    format: options.ListFormat = options.Format.TEXT,
    output: Output = None,
) -> int:
    """Measure the row counts at which dispatch should change the kernel, and write a table for MUSTER_TUNING_TABLE.

    Text shows the edges with the dispatched kernels. The JSON is the table itself.

    Exit code: 0 measured, 1 no usable device or a kernel that failed or was wrong, 2 usage.
    """
    from kernel_muster.cli.measuring import open_to_measure, say_refused
    from kernel_muster.cli.process.output import check_writable
    from kernel_muster.registry.errors import BootRefused

    if again is not None:
        given = {"MODEL": model, "--shape": shape, "--rows": rows, "--target": target, "--seconds": seconds}
        _check_alone(given | {"--rounds": rounds, "--peers": peers})
    check_writable(output)
    is_json = format is options.Format.JSON
    if again is not None:
        try:
            return _refit(again, format, output, no_plugin or ())
        except BootRefused as refused:
            say_refused("finding the edges again", refused, is_json=is_json)
            return 1
    options.check_not_empty(model, "MODEL")
    shapes, counts = _shapes(model or [], shape or []), _rows(rows)
    kernels = open_to_measure("tuning", target, is_json=is_json, levers=_without_table(), no_plugins=no_plugin)
    if kernels is None:
        return 1
    source = _source(kernels, _ROUNDS if rounds is None else rounds, shapes, peers=peers is not False)
    return tune_with(kernels, source, shapes, counts, format, output, seconds)


def _check_alone(given: "Mapping[str, object]") -> None:
    """Refuse options of a measurement beside ``--from``, which measures nothing."""
    from kernel_muster.registry.errors import UsageError

    if asked := [name for name, value in given.items() if value not in (None, [])]:
        raise UsageError(f"{', '.join(asked)}: not beside --from, which measures nothing; leave one of them out")


def _without_table() -> "Mapping[str, object]":
    """Return the levers of the environment without a table: a new table must not depend on an old one."""
    import os

    from kernel_muster.audit.tuning.choose import LEVER, NO_TABLE
    from kernel_muster.registry.levers import PREFIX

    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    return ours | {LEVER: NO_TABLE}


def _source(kernels: "Lookups", rounds: int, shapes: "Sequence[Shape]", *, peers: bool) -> "Source":
    import sys

    from kernel_muster.bench.tuning.device import DeviceSource
    from kernel_muster.bench.tuning.shapes import only_bf16

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"{text}\n")

    return DeviceSource(kernels, rounds, peers=peers, only_bf16=only_bf16(shapes), say=progress)


def tune_with(
    kernels: "Lookups",
    source: "Source",
    shapes: "Sequence[Shape]",
    rows: "Sequence[int]",
    format: options.Format,
    output: Path | None,
    seconds: int | None = None,
) -> int:
    """Measure with a source and write the result. Write nothing if an arm of this project failed."""
    from kernel_muster.bench.tuning.edges import find_edges
    from kernel_muster.bench.tuning.write import make_table
    from kernel_muster.cli.process.output import command_text, only_results_on_stdout, say

    built_in = _built_in(kernels)
    with only_results_on_stdout():
        timings = _measure(source, shapes, rows, seconds)
    if source.problems:
        say("nothing was written: an arm failed or was wrong:\n  " + "\n  ".join(source.problems))
        return 1
    edges = list(find_edges(timings, built_in))
    if not edges:
        say(f"nothing was written: {kernels.target} has no two arms to compare for these shapes and rows")
        return 1
    device = kernels.target.device
    assert device is not None  # noqa: S101  (the caller has looked)
    table = make_table(device, str(kernels.target.arch), _compiler(), source, timings, edges, command_text())
    return _write(table, built_in, format, output)


def _measure(source: "Source", shapes: "Sequence[Shape]", rows: "Sequence[int]", seconds: int | None) -> "list[Timing]":
    """Measure shape by shape within the time limit, and report omitted shapes on stderr."""
    from time import monotonic

    from kernel_muster.cli.process.exits import complain

    end = None if seconds is None else monotonic() + seconds
    found: list[Timing] = []
    left = []
    for _, n, k in shapes:
        if end is not None and monotonic() >= end:
            left.append(f"{n}x{k}")
        else:
            found.extend(source.timings(n, k, rows))
    if left:
        complain(f"{seconds} seconds are over; not measured: {', '.join(left)}")
    return found


def _refit(file: Path, format: options.Format, output: Path | None, no_plugins: "Iterable[str]") -> int:
    """Derive the edges again from a table's times: a changed rule or built-in value needs no device."""
    from kernel_muster.api import open_registry
    from kernel_muster.audit.tuning.table import read_table
    from kernel_muster.bench.tuning.write import refitted
    from kernel_muster.cli.process.output import only_results_on_stdout

    with only_results_on_stdout():
        built_in = _built_in(open_registry("cpu", levers=_without_table(), no_plugins=no_plugins))
    table = read_table(file)
    return _write(refitted(table, built_in, table.command), built_in, format, output)


def _write(table: "Table", built_in: "Levers", format: options.Format, output: Path | None) -> int:
    from kernel_muster.audit.tuning.table import table_text
    from kernel_muster.bench.tuning.write import to_markdown
    from kernel_muster.cli.process.output import say, write_file

    if output is not None:
        write_file(output, table_text(table))
    say(table_text(table) if format is options.Format.JSON else to_markdown(table, built_in))
    return 0


def _built_in(kernels: "Lookups") -> "Levers":
    """Return the levers at their built-in values: a table must not depend on an older one."""
    from kernel_muster.registry.levers import read_levers

    return read_levers(kernels.catalog.levers, ())[0]


def _compiler() -> str:
    from kernel_muster.registry.backends.nvrtc.headers import find_toolkit

    return find_toolkit().compiler


def _shapes(models: list[str], texts: list[str]) -> "list[Shape]":
    from kernel_muster.bench.data.shapes import distinct, parse_shape
    from kernel_muster.bench.tuning.shapes import tuned_shapes
    from kernel_muster.MODEL_toml import Catalogue, manifest_folder
    from kernel_muster.registry.errors import UsageError

    given = [parse_shape(text) for text in texts]
    catalogue = Catalogue.from_folders([manifest_folder()])
    manifests = []
    for name in models or (() if given else _MODELS):
        manifest = catalogue.resolve(name).manifest
        if manifest is None:
            raise UsageError(
                f"{name}: no shipped manifest has that name; of others no shapes are known: give --shape NxK"
            )
        manifests.append(manifest)
    return distinct([*tuned_shapes(manifests), *given])


def _rows(text: str | None) -> "Sequence[int]":
    from kernel_muster.bench.tuning.shapes import ROWS

    return ROWS if text is None else sorted(options.parse_counts(text, "--rows", _MOST_ROWS))
