"""Records: what was measured, on what, with what, when and by which command; as JSON, and as a Markdown table."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from kernel_muster._version import __version__
from kernel_muster.bench.contestants import PEER_PACKAGES, installed
from kernel_muster.bench.gemv import Row
from kernel_muster.registry.target import Target

SCHEMA = "kernel-muster/bench"
VERSION = "1.0"
METHOD = (
    "CUDA graph replays over copies that exceed the L2 (>= 320 MiB), plain launches, all contestants of a shape in "
    "turn; median of the rounds; correctness (relative L2 error against float64) first. read = a kernel that only "
    "reads the NVFP4 weight's bytes, timed in the same call."
)


def record_of(rows: Sequence[Row], target: Target, command: str, set_hash: str) -> dict[str, Any]:
    """Return a record as plain data."""
    device = target.device
    packages = ("cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy", *PEER_PACKAGES)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": command,
        "device": device.name if device else "",
        "driver_cuda": device.driver if device else "",
        "arch": str(target.arch or "cpu"),
        "muster_version": __version__,
        "kernels_sha256": set_hash,
        "packages": {name: found for name in packages if (found := installed(name)) is not None},
        "method": METHOD,
        "rows": [_plain(row) for row in rows],
    }


def _plain(row: Row) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.as_dict().items()}


def to_json(record: dict[str, Any]) -> str:
    """Return a record as JSON, one row a line, so that a change of one shows as one."""
    head = {key: value for key, value in record.items() if key != "rows"}
    lines = ",\n  ".join(json.dumps(row) for row in record["rows"])
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'


def to_markdown(record: dict[str, Any]) -> str:
    """Return a record as Markdown: a head, then a table with a line for each shape and row count."""
    packages = ", ".join(f"{name} {number}" for name, number in record["packages"].items())
    head = [
        f"- date: {record['date']}",
        f"- device: {record['device']} ({record['arch']}), driver for CUDA {record['driver_cuda']}",
        f"- command: `{record['command']}`",
        f"- kernel-muster {record['muster_version']}, kernels `{record['kernels_sha256'][:16]}`; {packages}",
        f"- method: {record['method']}",
        "",
    ]
    return "\n".join((*head, *_table(record["rows"]))) + "\n"


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    peers = [name for name in dict.fromkeys(_label(row) for row in rows) if name not in ("read", "ours")]
    lines = [
        "| shape | N x K | M | read us | ours us | spread | ours / read | GB/s | error | "
        + "".join(f"{name} us | " for name in peers),
        "|---|---|--:|--:|--:|--:|--:|--:|--:|" + "--:|" * len(peers),
    ]
    groups: dict[tuple[str, int, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        place = (row["shape"], row["features"], row["depth"], row["rows"])
        groups.setdefault(place, {})[_label(row)] = row
    for (shape, features, depth, count), found in groups.items():
        our, read = found.get("ours", {}), found.get("read", {})
        cells = [
            shape, f"{features} x {depth}", str(count), _us(read), _us(our), _number(our, "spread", "{:.1%}"),
            _number(our, "ratio_to_read", "{:.2f}"), _number(our, "gb_per_s", "{:.0f}"),
            _number(our, "relative_l2", "{:.1e}"), *(_us(found.get(name, {})) for name in peers),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    notes = {f"{row['contestant']}: {row['note']}" for row in rows if row["note"]}
    return lines + [""] + [f"- {note}" for note in sorted(notes)]


def _label(row: dict[str, Any]) -> str:
    return "ours" if "::" in row["contestant"] else row["contestant"]


def _us(row: dict[str, Any]) -> str:
    return _number(row, "us", "{:.2f}")


def _number(row: dict[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return "-" if value is None else form.format(value)
