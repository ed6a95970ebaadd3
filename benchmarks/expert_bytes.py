"""Count the bytes that the grouped experts read from memory, with ncu: each routed expert once, or more often?

    python benchmarks/expert_bytes.py [--rows 8,16,32,64] [--shape 256x8x2048x512]

One pass for each row count, caches flushed before each kernel. ``weights`` are the bytes of that routing's distinct
experts in the kernels' layout. The rest is activations, ids, and repeated reads.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from record import header

_METRIC = "dram__bytes_read.sum"
_KERNELS = ("grouped_gate_up", "grouped_down")


def launch(shape: str, rows: list[int]) -> list[dict[str, int]]:
    """Run one grouped pass for each row count. Return the bytes of its experts' weights."""
    import cupy
    import kernel_muster as km
    from kernel_muster.bench import plugin
    from kernel_muster.bench.data.experts import make_moe_data
    from kernel_muster.bench.families.moe import Block, parse_shape

    _, *sizes = parse_shape(shape)
    data = make_moe_data(*sizes)
    kernels = km.open_registry("cuda", local_plugins={plugin.NAME: plugin})
    block, expected = Block(kernels, data), []
    for count in rows:
        routing = data.routings(count)[0]
        out = cupy.empty((count, data.hidden), data.x.dtype)
        for one in block.grouped(count, routing, 0, out, "", lambda handle, given: handle.prepare(**given)):
            one()
        cupy.cuda.Device().synchronize()
        prepared = {name: block.copies[0][name].data.nbytes / data.experts for name in ("gate", "up", "down")}
        gate_up = round(routing.distinct * (prepared["gate"] + prepared["up"]))
        expected.append({"rows": count, "distinct": routing.distinct, "grouped_gate_up": gate_up,
                         "grouped_down": round(routing.distinct * prepared["down"])})  # fmt: skip
    return expected


def counted(command: list[str], log: Path) -> list[tuple[str, float]]:
    """Run a command under ncu. Return the kernels in order, with their read bytes."""
    ncu = ["ncu", "--csv", "--log-file", str(log), "--metrics", _METRIC, "--clock-control", "none",
           "-k", f"regex:{'|'.join(_KERNELS)}", "--print-units", "base"]  # fmt: skip
    subprocess.run([*ncu, *command], check=True)
    lines = [line for line in log.read_text().splitlines() if line.startswith('"')]
    return [(row["Kernel Name"], float(row["Metric Value"].replace(",", ""))) for row in csv.DictReader(lines)]


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,16,32,64")
    parser.add_argument("--shape", default="256x8x2048x512")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)  # under ncu: launch, and write expected bytes
    options = parser.parse_args()
    if options.launch is not None:
        options.launch.write_text(json.dumps(launch(options.shape, [int(rows) for rows in options.rows.split(",")])))
        return
    with tempfile.TemporaryDirectory() as folder:
        expected, log = Path(folder) / "expected.json", Path(folder) / "ncu.csv"
        given = [sys.executable, __file__, "--rows", options.rows, "--shape", options.shape]
        kernels = counted([*given, "--launch", str(expected)], log)
        passes = json.loads(expected.read_text())
    if len(kernels) != len(passes) * len(_KERNELS):
        sys.exit(f"ncu saw {len(kernels)} kernels, expected {len(passes) * len(_KERNELS)}")
    print(header(f"python benchmarks/expert_bytes.py --rows {options.rows} --shape {options.shape}"))
    print(
        "\n| n | distinct experts | kernel | weights, bytes | read, bytes | read / weights |\n|--:|--:|---|--:|--:|--:|"
    )
    for at, (name, size) in enumerate(kernels):
        one = passes[at // len(_KERNELS)]
        part = next(kernel for kernel in _KERNELS if kernel in name)
        print(f"| {one['rows']} | {one['distinct']} | {part} | {one[part]} | {size:.0f} | {size / one[part]:.3f} |")


if __name__ == "__main__":
    main()
