"""Decode at full size with random weights: step time, tokens a second, and the share of the step's byte floor.

    python benchmarks/decode.py [--models A,B] [--rows 1,4,8,16,32] [--tokens 64] [--layers N] [--arms] [--json FILE]

Greedy, prompts of 16 tokens that differ, through the engine's recorded steps. A step's floor is its necessary reads
(weights once, the experts reached by random routing, states, keys and values) over the bandwidth of a read kernel in
the same process. ``--arms`` compares the arms of the QKV and output projections instead, with all copies of the
kernels and without transposed ones.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import kernel_muster as km
from kernel_muster.bench import contestants, plugin
from kernel_muster.bench.timing import Timer
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.decode.floor import step_bytes
from kernel_muster.models.layers.attention import Attention
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.weights.random_weights import RandomWeights
from record import header

PROMPT, PAGE = 16, 64
READ_BYTES = 1 << 30
TRANSPOSED = tuple(
    f"w4a16::w4a16_gemm_t{twin}" for twin in ("", "_p3", "_k64", "_k64_p3", "_k64_n64_p3", "_m128")
)  # fmt: skip
_PORTABLE = {"MUSTER_W4A16_ARM": "tile"}
#: Builds of the comparison: label, levers, keys removed on purpose, and the arms.
BUILDS: tuple[tuple[str, dict[str, str], Sequence[str], Sequence[str]], ...] = (
    ("", {}, (), ("auto", "tiled", "per_seq", "wide")),
    (", portable tiles", _PORTABLE, (), ("wide",)),
    (", no transposed copy", {**_PORTABLE, "MUSTER_DISABLE": ",".join(TRANSPOSED)}, TRANSPOSED, ("wide",)),
)
KEPT = (", BF16 kept", {"MUSTER_FP4_PROJ_DECODE": "0"}, (), ("auto", "per_seq"))


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    arms: str
    sequences: int
    step_us: float
    spread: float
    floor_us: float
    launches: int

    @property
    def tokens_s(self) -> float:
        """Tokens a second of all sequences."""
        return self.sequences * 1e6 / self.step_us

    @property
    def share(self) -> float:
        """Share of the byte floor."""
        return self.floor_us / self.step_us


def bandwidth() -> float:
    """Return bytes a microsecond of a read kernel."""
    kernels = km.open_registry("cuda", levers={}, local_plugins={plugin.NAME: plugin})
    timer = Timer()
    entry = contestants.read_kernel(kernels, READ_BYTES).make(timer.stream)
    graph = timer.capture(entry.launches, 1)
    count = len(entry.launches)
    return READ_BYTES * count / statistics.median(timer.once(graph) for _ in range(9))


def build(name: str, levers: Mapping[str, str], layers: int, allow: Sequence[str] = ()) -> Model:
    """Boot, and build a model with random weights on the device. With a number, only its first layers."""
    with km.boot(name, target="cuda", levers=levers, stage="loaded", dangerously_allow_unresolved=allow) as boot:
        dims = model_dims(boot.manifest)
        if layers:
            dims = replace(dims, layer_kinds=dims.layer_kinds[:layers], mtp_layers=0)
        return build_from_dims(dims, boot.kernels, RandomWeights(1))


def measure(model: Model, arms: str, rows: Sequence[int], tokens: int, bytes_us: float) -> Iterator[Row]:
    """Decode with each number of sequences."""
    most = PROMPT + tokens
    pages = -(-most // PAGE) * max(rows)
    with DecodeEngine(model, StateSizes(max(rows), pages, PAGE), -(-most // PAGE) * PAGE) as engine:
        for count in rows:
            prompts = [[(17 * row + at) % model.dims.vocab for at in range(PROMPT)] for row in range(count)]
            engine.generate(prompts, 4)
            # The first steps fill the queue. The last one drains it.
            taken = [1e6 * step for step in engine.generate(prompts, tokens).step_s[2:-1]]
            middle = statistics.median(taken)
            low, _, high = statistics.quantiles(taken, n=4)
            floor = step_bytes(model, count, PROMPT + tokens // 2).total / bytes_us
            yield Row(
                model.dims.name,
                arms,
                count,
                middle,
                (high - low) / 2 / middle,
                floor,
                engine.captured_step(count).launches,
            )


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    lines = [
        "| model | arms | sequences | step us | spread | tok/s | tok/s a sequence | floor us | of floor | launches |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row.model} | {row.arms} | {row.sequences} | {row.step_us:.0f} | {row.spread:.1%} | {row.tokens_s:.0f} | "
        f"{row.tokens_s / row.sequences:.1f} | {row.floor_us:.0f} | {row.share:.0%} | {row.launches} |"
        for row in rows
    ]
    return "\n".join(lines)


def to_json(head: str, rows: Sequence[Row]) -> str:
    """Return the rows as a document."""
    listed = [{**asdict(row), "tokens_s": row.tokens_s, "share": row.share} for row in rows]
    return json.dumps({"header": head.splitlines(), "rows": listed}, indent=1) + "\n"


def runs(options: argparse.Namespace, counts: Sequence[int], bytes_us: float) -> Iterator[Row]:
    """Run the requested measurements."""
    for name in options.models.split(","):
        if not options.arms:
            yield from measure(build(name, {}, options.layers), "auto", counts, options.tokens, bytes_us)
            continue
        for label, levers, absent, arms in (*BUILDS, *([KEPT] if name.startswith("ornith") else [])):
            model = build(name, levers, options.layers, absent)
            for arm in arms:
                for layer in model.layers:
                    if isinstance(layer.mixer, Attention):
                        layer.mixer.asked = arm
                yield from measure(model, f"{arm}{label}", counts, options.tokens, bytes_us)


def device_line() -> str:
    """Name the device and its driver."""
    import cupy
    from kernel_muster.registry.hardware.target import read_devices

    device = read_devices()[0]
    return f"device: {device.name}, driver {device.driver}, CuPy {cupy.__version__}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="qwen3.6-35b-a3b,qwen3.6-27b")
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--arms", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = [int(count) for count in options.rows.split(",")]
    bytes_us = bandwidth()
    given = f"--models {options.models} --rows {options.rows} --tokens {options.tokens}"
    given += f" --layers {options.layers}" * bool(options.layers) + " --arms" * options.arms
    head = f"{header(f'python benchmarks/decode.py {given}')}\n{device_line()}\nread kernel: {bytes_us / 1e6:.2f} TB/s"
    found: list[Row] = []
    for row in runs(options, counts, bytes_us):
        found.append(row)
        print(f"{row.model} {row.arms} {row.sequences}: {row.step_us:.0f} us, {row.share:.0%}", flush=True)
        if options.json:  # after each row: an interrupted run keeps its results
            options.json.write_text(to_json(head, found))
    print(f"{head}\n\n{table(found)}")


if __name__ == "__main__":
    main()
