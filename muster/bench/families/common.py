"""The small kernels of a decode step, one line for each result: ``muster bench small`` for interrupted runs.

python -m kernel_muster.bench.families.common --help
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from kernel_muster.bench import floor
from kernel_muster.bench.families.small import COUNTS, FAMILY, MOST_COUNT
from kernel_muster.bench.measure import measure
from kernel_muster.bench.problem import Request
from kernel_muster.bench.race import Row
from kernel_muster.bench.record import record_of, to_markdown
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.errors import BootRefused

ROUNDS = 11
MODELS = ("qwen3.6-35b-a3b", "qwen3.6-27b")


@dataclass(frozen=True)
class Options:
    """The measured parts, whether with peers, and the file of the record."""

    wanted: tuple[str, ...]
    counts: tuple[int, ...]
    has_peers: bool
    record: Path | None

    @property
    def command(self) -> str:
        """The command line of this measurement."""
        more = [repr(text) for text in self.wanted] + ["--counts", ",".join(map(str, self.counts))]
        more += [] if self.has_peers else ["--no-peers"]
        return " ".join(("python -m kernel_muster.bench.families.common", *more))

    def request(self) -> Request:
        """Return the request to the family."""
        catalogue = Catalogue.from_folders([manifest_folder()])
        found = [catalogue.resolve(name).manifest for name in MODELS]
        models = tuple(manifest for manifest in found if manifest is not None)
        return Request(models, rows=self.counts, peers=self.has_peers, only=self.wanted)


def read_options(arguments: Sequence[str]) -> Options:
    """Read the command line. An error ends the process with code 2, like any usage error."""
    parser = argparse.ArgumentParser(
        "python -m kernel_muster.bench.families.common",
        description="Measure the small kernels of a decode step on a GPU against the floor of their bytes. "
        "muster bench small measures the same, as JSON too, for any model and target.",
    )
    parser.add_argument("part", nargs="*", help="part of a model, key or size; only matches are measured")
    parser.add_argument("--counts", type=_counts, default=COUNTS, metavar="N,...", help="sequences of a step")
    parser.add_argument("--no-peers", action="store_true", help="do not run torch's kernels")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a record as Markdown")
    read = parser.parse_args(arguments)
    return Options(tuple(read.part), tuple(read.counts), not read.no_peers, read.record)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(count) for count in text.split(","))
    if not all(1 <= count <= MOST_COUNT for count in counts):
        raise ValueError(f"{text!r}: expected numbers from 1 to {MOST_COUNT} with commas")
    return counts


def main(arguments: Sequence[str]) -> int:
    """Measure the selected parts, print a line for each, and write the record after every line."""
    from kernel_muster.api import open_registry

    options = read_options(arguments)
    if options.record is not None and not _can_hold(options.record):
        print(f"error: --record {options.record}: no file can be written there", file=sys.stderr)
        return 2
    try:
        kernels = open_registry("cuda", levers={}, local_plugins={floor.NAME: floor})
    except BootRefused as refused:
        print(f"{refused}\na measurement needs a GPU", file=sys.stderr)
        return 1
    rows: list[Row] = []
    for text, measured in lines(measure(FAMILY, options.request(), kernels, ROUNDS)):
        print(text, flush=True)
        rows += measured
        if options.record is not None:
            text = to_markdown(record_of(rows, kernels.target, options.command))
            options.record.write_text(text, encoding="utf-8")
    return 1 if any(row.note and row.role == "ours" for row in rows) else 0


def _can_hold(file: Path) -> bool:
    """Whether a record can be written there, checked before the measurement."""
    return file.parent.is_dir() and os.access(file if file.exists() else file.parent, os.W_OK) and not file.is_dir()


def lines(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Yield a line for each place, and its rows."""
    for (shape, size, _), group in groupby(rows, key=lambda row: (row.shape, row.size, row.rows)):
        measured = list(group)
        yield f"{shape:64} {size:26} {_figures(measured)}", measured


def _figures(measured: Sequence[Row]) -> str:
    ours = next(row for row in measured if row.role == "ours")
    if ours.us is None:
        return ours.note
    floors = {row.contestant: row.us for row in measured if row.role == "floor"}
    parts = [f"{ours.us:8.2f} us", *(f"{name} {us:.2f}" for name, us in floors.items() if us is not None)]
    parts += [f"x{ours.ratio_to_floor:.2f}"] if ours.ratio_to_floor is not None else []
    parts += [f"spread {ours.spread:.1%}"] if ours.spread is not None else []
    parts += [f"error {ours.relative_l2:.1e}"] if ours.relative_l2 is not None else []
    parts += [f"{row.contestant} {row.us:.2f}" for row in measured if row.role == "peer" and row.us is not None]
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
