"""``muster bench``: measure kernels on the device at hand, beside the peers that are installed."""

from typing import Annotated

import typer
from kernel_muster.cli import options

Models = Annotated[
    list[str] | None, typer.Option("--model", help="Measure this model's projections; repeatable.", show_default=False)
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="Measure N features of depth K: NxK; repeatable.", show_default=False),
]
Rows = Annotated[str, typer.Option(help="Row counts M, 1 to 16, with commas.")]
Rounds = Annotated[int, typer.Option(help="Replays of each contestant.", min=5, max=1000)]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Run the peers that are installed beside ours.")]


def bench(
    model: Models = None,
    shape: Shapes = None,
    rows: Rows = "1,8,16",
    rounds: Rounds = 25,
    peers: Peers = True,
    target: options.Target = None,
    format: options.AnyFormat = options.ReportFormat.TEXT,
    output: options.Output = None,
) -> int:
    """Measure the NVFP4 GEMV on a GPU: microseconds, ratio to a read of the same bytes, error, and the peers' figures.

    Exit code: 0 measured, 1 no usable device or a wrong result, 2 usage.
    """
    import sys

    from kernel_muster.api import open_registry
    from kernel_muster.bench import plugin
    from kernel_muster.bench.contestants import PEERS
    from kernel_muster.bench.gemv import measure
    from kernel_muster.bench.record import record_of, to_json, to_markdown
    from kernel_muster.cli.output import check_writable, say, write_file
    from kernel_muster.registry.errors import BootRefused

    counts, shapes = _rows(rows), _shapes(model or [], shape or [])
    check_writable(output)
    try:
        kernels = open_registry(target, local_plugins={plugin.NAME: plugin})
    except BootRefused as refused:
        say(str(refused))
        return 1
    if kernels.target.device is None:
        say(f"{kernels.target}: a measurement needs a device: --target cuda")
        return 1

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"{text}\n")

    measured = list(measure(kernels, shapes, counts, peers=PEERS if peers else (), rounds=rounds, say=progress))
    digest = kernels.kernel("w4a16_gemv", "w4a16_gemv").spec
    source = digest.backend.source_sha256 if digest is not None else ""
    record = record_of(measured, kernels.target, f"muster {' '.join(sys.argv[1:])}", source)
    text = to_json(record) if format is options.ReportFormat.JSON else to_markdown(record)
    if output is None:
        say(text)
    else:
        write_file(output, text)
    return 1 if any(row.note and "::" in row.contestant for row in measured) else 0


def _rows(text: str) -> list[int]:
    from kernel_muster.registry.errors import UsageError

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--rows {text!r}: expected numbers with commas") from None
    if not all(1 <= count <= 16 for count in counts):
        raise UsageError(f"--rows {text!r}: a GEMV takes 1 to 16 rows")
    return counts


def _shapes(models: list[str], texts: list[str]) -> list[tuple[str, int, int]]:
    from kernel_muster.bench.shapes import distinct, parse_shape, shapes_of
    from kernel_muster.MODEL_toml import Catalogue, manifest_folder
    from kernel_muster.registry.errors import UsageError

    found = [parse_shape(text) for text in texts]
    catalogue = Catalogue.from_folders([manifest_folder()])
    for name in models or ([] if found else ["qwen3.6-27b", "qwen3.6-35b-a3b"]):
        manifest = catalogue.resolve(name).manifest
        if manifest is None:
            raise UsageError(f"--model {name}: no shipped manifest has that name; muster models lists them")
        found += [(f"{manifest.name} {role}", features, depth) for role, features, depth in shapes_of(manifest)]
    return distinct(found)
