"""``muster bench``: measure kernels on the local device, beside the installed peers."""

from typing import TYPE_CHECKING, Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.cli.process.exits import PASSED, REFUSED, complain
from kernel_muster.registry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel_muster.bench.measure import BenchFamily
    from kernel_muster.bench.problem import Request
    from kernel_muster.MODEL_toml.manifest import Manifest

Families = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FAMILY|KEY]...",
        help="gemv, gemm, moe, small; default: all. Or a key, or a pattern (acme::*), at its contract's cases.",
        show_default=False,
    ),
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Measure this model's shapes; repeatable.", show_default=False)
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        show_default=False,
        help="Measure this shape of the named family (gemv, gemm: NxK; moe: EXPERTSxTOP_KxHIDDENxINTERMEDIATE; "
        "small: none); repeatable.",
    ),
]
Rows = Annotated[
    str | None, typer.Option(help="Row counts M, with commas. Default: the family's own.", show_default=False)
]
Rounds = Annotated[int, typer.Option(help="Replays of each contestant.", min=5, max=1000)]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Run the installed peers too.")]
Named = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="Run only peers with this text in their name, also those with minutes of tuning (gemlite); repeatable.",
        show_default=False,
    ),
]

Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="PART", help="Measure only matches in the family, shape, size or kernels; repeatable.",
        show_default=False,
    ),
]  # fmt: skip

#: Above the rows of any family; each family checks its own range.
_MOST_ROWS = 1 << 20
#: Default models: together they have every projection of the shipped models.
_MODELS = ("qwen3.6-27b", "qwen3.6-35b-a3b")


def bench(
    family: Families = None,
    model: Models = None,
    shape: Shapes = None,
    rows: Rows = None,
    only: Only = None,
    rounds: Rounds = 25,
    peers: Peers = True,
    peer: Named = None,
    target: options.Target = None,
    no_plugin: options.NoPlugins = None,
    format: options.AnyFormat = options.ReportFormat.TEXT,
    output: options.Output = None,
) -> int:
    """Measure kernels on a GPU: microseconds, ratio to a read of the same bytes, error, and the peers' figures.

    Exit code: 0 measured, 1 no usable device or a wrong result, 2 usage.
    """
    import sys

    from kernel_muster.bench import floor, plugin
    from kernel_muster.bench.measure import measure
    from kernel_muster.bench.record import record_of, to_json, to_markdown
    from kernel_muster.cli.measuring import open_to_measure
    from kernel_muster.cli.process.output import check_writable, command_text, only_results_on_stdout, say, write_file
    from kernel_muster.registry.errors import KernelMissing

    for option, texts in (("--model", model), ("--shape", shape), ("--only", only), ("--peer", peer)):
        options.check_not_empty(texts, option)
    models = _manifests(model or _MODELS)
    asked = [
        (one, _request(one, models, shape or [], rows, peers, peer or [], only or []))
        for one in _families(family or [], shape or [])
    ]
    check_writable(output)
    is_json = format is options.ReportFormat.JSON
    own = {plugin.NAME: plugin, floor.NAME: floor}
    kernels = open_to_measure("a measurement", target, is_json=is_json, local_plugins=own, no_plugins=no_plugin)
    if kernels is None:
        return REFUSED

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"{text}\n")

    try:
        with only_results_on_stdout():
            measured = [row for one, request in asked for row in measure(one, request, kernels, rounds, progress)]
    except KernelMissing as error:
        complain(f"error: {error}")
        return REFUSED
    if only and not measured:
        raise UsageError(f"--only {', '.join(only)}: none of it is in the family, shape, size or kernels of anything")
    record = record_of(measured, kernels.target, command_text())
    text = to_json(record) if is_json else to_markdown(record)
    if output is None:
        say(text)
    else:
        write_file(output, text)
    return REFUSED if any(row.note and row.role == "ours" for row in measured) else PASSED


def _families(names: list[str], shapes: list[str]) -> "list[BenchFamily]":
    from kernel_muster.bench.cases import keys_family
    from kernel_muster.bench.measure import MODULES, family

    found = [keys_family(name) if "::" in name else family(name) for name in dict.fromkeys(names or MODULES)]
    if shapes and len(found) != 1:
        raise UsageError(f"--shape belongs to one family: name it, for example muster bench gemv --shape {shapes[0]}")
    return found


def _request(
    family: "BenchFamily",
    models: "tuple[Manifest, ...]",
    shapes: list[str],
    rows: str | None,
    peers: bool,
    named: list[str],
    only: list[str],
) -> "Request":
    from kernel_muster.bench.problem import Request

    counts = family.default_rows if rows is None else options.parse_counts(rows, "--rows", _MOST_ROWS)
    family.check_rows(counts)
    return Request(models, tuple(family.parse_shape(text) for text in shapes), counts, peers, tuple(named), tuple(only))


def _manifests(names: "Sequence[str]") -> "tuple[Manifest, ...]":
    from kernel_muster.MODEL_toml import Catalogue, manifest_folder

    catalogue = Catalogue.from_folders([manifest_folder()])
    found = []
    for name in names:
        manifest = catalogue.resolve(name).manifest
        if manifest is None:
            raise UsageError(
                f"--model {name}: no shipped manifest has that name, and of others no shapes are known: give --shape, "
                "or the key of a kernel, which is measured at the cases of its contract"
            )
        found.append(manifest)
    return tuple(found)
