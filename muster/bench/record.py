"""Records: results with device, software, date and command; as JSON, and as a Markdown table."""

import hashlib
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kernel_muster._version import __version__
from kernel_muster.bench.contestants import installed
from kernel_muster.bench.peers.peers import PACKAGES
from kernel_muster.bench.race import Row
from kernel_muster.registry.hardware.target import Target

SCHEMA = "kernel-muster/bench"
#: 2.0: rows of any family, with a role and a size text; 1.0 had only the GEMV's.
VERSION = "2.0"
METHOD = (
    "CUDA graph replays over copies that exceed the L2 (>= 320 MiB), plain launches, all contestants of a shape in "
    "turn; median of the rounds; correctness (relative L2 error against float64) first. read = a kernel that only "
    "reads the same bytes, timed in the same call."
)
#: Differences of method if the small kernels are among the rows.
_SMALL = (
    " small: at most 40 copies of all arguments, so that what is smaller than 8 MiB is partly found in L2, as in a "
    "step; move = a kernel that reads the same bytes and writes as many back as ours writes; empty = a launch that "
    "does nothing; ours is judged up to 16 MiB of arguments, of peers only FlashInfer's kernels are, against FP32."
)
_TOOLS = ("cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy")
_Group = list[dict[str, Any]]


def record_of(rows: Sequence[Row], target: Target, command: str) -> dict[str, Any]:
    """Return a record as plain data."""
    device = target.device
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": command,
        "device": device.name if device else "",
        "driver_cuda": device.driver if device else "",
        "arch": str(target.arch or "cpu"),
        "muster_version": __version__,
        "kernels_sha256": _digest(rows),
        "packages": {name: number for name in (*_TOOLS, *PACKAGES) if (number := installed(name)) is not None},
        "method": METHOD + (_SMALL if any(row.family == "small" for row in rows) else ""),
        "rows": [_plain(row) for row in rows],
    }


def _digest(rows: Sequence[Row]) -> str:
    """Return one digest over the sources of all measured kernels of this project."""
    sources = sorted({row.source_sha256 for row in rows if row.source_sha256})
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def _plain(row: Row) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.as_dict().items()}


def to_json(record: dict[str, Any]) -> str:
    """Return a record as JSON, one row in each line, so a diff shows single rows."""
    head = {key: value for key, value in record.items() if key != "rows"}
    lines = ",\n  ".join(json.dumps(row) for row in record["rows"])
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'


def to_markdown(record: dict[str, Any]) -> str:
    """Return a record as Markdown: a head, then a table for each family."""
    packages = ", ".join(f"{name} {number}" for name, number in record["packages"].items())
    lines = [
        f"- date: {record['date']}",
        f"- device: {record['device']} ({record['arch']}), driver for CUDA {record['driver_cuda']}",
        f"- command: `{record['command']}`",
        f"- kernel-muster {record['muster_version']}, kernels `{record['kernels_sha256'][:16]}`; {packages}",
        f"- method: {record['method']}",
    ]
    families = list(dict.fromkeys(row["family"] for row in record["rows"]))
    for name in families:
        lines += ["", *([f"## {name}", ""] if len(families) > 1 else [])]
        lines += _table([row for row in record["rows"] if row["family"] == name])
    return "\n".join(lines) + "\n"


def _table(rows: _Group) -> list[str]:
    """Return a line for each of our kernels at each shape and row count, with the floor and the peers."""
    floors = list(dict.fromkeys(row["contestant"] for row in rows if row["role"] == "floor"))
    peers = list(dict.fromkeys(row["contestant"] for row in rows if row["role"] == "peer"))
    is_one = _share_a_column(rows, peers)
    others = [f"{name} us" for name in (*floors, *(["peer"] if is_one else peers))]
    own = ["us", "spread", "/ floor", "GB/s", "TFLOP/s", "error"]
    lines = ["| " + " | ".join(["shape", "size", "M", "kernel", *own, *others]) + " |"]
    lines.append("|---|---|--:|---|" + "--:|" * (len(own) + len(others)))
    groups: dict[tuple[str, str, int], _Group] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["size"], row["rows"]), []).append(row)
    for place, group in groups.items():
        named = {row["contestant"]: row for row in group}
        beside = [_number(named.get(name, {}), "us", "{:.2f}") for name in floors]
        beside += [_one_column(group)] if is_one else [_number(named.get(name, {}), "us", "{:.2f}") for name in peers]
        for row in group:
            if row["role"] == "ours":
                lines.append("| " + " | ".join([*map(str, place), *_cells(row), *beside]) + " |")
    notes = sorted({f"{row['contestant']}: {' '.join(row['note'].split())}" for row in rows if row["note"]})
    for name in peers:
        errors = [row["relative_l2"] for row in rows if row["contestant"] == name and row["us"] and row["relative_l2"]]
        notes += [f"{name}: relative L2 error up to {max(errors):.1e}"] if errors else []
    return [*lines, *([""] if notes else []), *(f"- {note}" for note in notes)]


def _share_a_column(rows: _Group, peers: list[str]) -> bool:
    """Whether several peers share a column: if none of them has a result at every place."""
    places = {(row["shape"], row["size"], row["rows"]) for row in rows}
    stands = [{(row["shape"], row["size"], row["rows"]) for row in rows if row["contestant"] == one} for one in peers]
    return len(peers) > 1 and places not in stands


def _one_column(group: _Group) -> str:
    timed = [row for row in group if row["role"] == "peer" and row["us"] is not None]
    return ", ".join(f"{_number(row, 'us', '{:.2f}')} ({row['contestant']})" for row in timed) or "-"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["contestant"].rpartition("::")[2],
        _number(row, "us", "{:.2f}"),
        _number(row, "spread", "{:.1%}"),
        _number(row, "ratio_to_floor", "{:.2f}"),
        _number(row, "gb_per_s", "{:.0f}"),
        _number(row, "tflop_per_s", "{:.1f}"),
        _number(row, "relative_l2", "{:.1e}"),
    ]


def _number(row: dict[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else form.format(value)
