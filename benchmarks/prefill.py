"""Prompts at full size with random weights: time to the first token, and prompt tokens a second.

    python benchmarks/prefill.py [--models A,B] [--prompts 128,512,1024,4096] [--layers N] [--repeats 5] [--json FILE]

One sequence, through the engine's recorded passes of up to 1024 rows. Medians over the repeats. The time excludes
recording and includes sampling of the first token.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from decode import PAGE, build, device_line
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model
from record import header


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    prompt: int
    first_token_ms: float
    spread: float

    @property
    def tokens_s(self) -> float:
        """Prompt tokens a second."""
        return 1e3 * self.prompt / self.first_token_ms


def measure(model: Model, prompts: Sequence[int], repeats: int) -> Iterator[Row]:
    """Read prompts of each length."""
    room = -(-(max(prompts) + 1) // PAGE)
    with DecodeEngine(model, StateSizes(1, room, PAGE), room * PAGE) as engine:
        for length in prompts:
            ids = [(31 * at + at // 7) % model.dims.vocab for at in range(length)]
            engine.generate([ids], 1)  # records the passes
            taken = [1e3 * engine.generate([ids], 1).prefill_s for _ in range(repeats)]
            middle = statistics.median(taken)
            yield Row(model.dims.name, length, middle, (max(taken) - min(taken)) / 2 / middle)


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    lines = ["| model | prompt | first token ms | spread | tokens a second |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row.model} | {row.prompt} | {row.first_token_ms:.2f} | {row.spread:.1%} | {row.tokens_s:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="qwen3.6-35b-a3b,qwen3.6-27b")
    parser.add_argument("--prompts", default="128,512,1024,4096")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prompts = [int(length) for length in options.prompts.split(",")]
    given = f"--models {options.models} --prompts {options.prompts} --repeats {options.repeats}"
    given += f" --layers {options.layers}" * bool(options.layers)
    head = f"{header(f'python benchmarks/prefill.py {given}')}\n{device_line()}"
    found: list[Row] = []
    for name in options.models.split(","):
        for row in measure(build(name, {}, options.layers), prompts, options.repeats):
            found.append(row)
            print(f"{row.model} {row.prompt}: {row.first_token_ms:.2f} ms, {row.tokens_s:.0f} tokens/s", flush=True)
            if options.json:  # after each row: an interrupted run keeps its results
                listed = [{**asdict(one), "tokens_s": one.tokens_s} for one in found]
                options.json.write_text(json.dumps({"header": head.splitlines(), "rows": listed}, indent=1) + "\n")
    print(f"{head}\n\n{table(found)}")


if __name__ == "__main__":
    main()
