"""A model at full size from a quantised checkpoint, judged position by position by transformers on the same weights.

    python benchmarks/full_size/run.py MODEL [--formats compressed-tensors,modelopt] [--new 16] [--json FILE]
        [--reduced] [--dflash DRAFTER]

Writes a seeded checkpoint, loads it with ``open_checkpoint``, decodes, and compares the logits of each generated token
with transformers' model of the dequantised weights. The reference runs in FP32. The bound is transformers' own cost of
BF16: its BF16 run is compared with the same reference, and our mean KL may be at most MARGIN times as large. Both round
the same values to the same width in another order.

The second format is loaded and decoded too. It has the same weights, so the same reference applies.
"""

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kernel_muster as km
import numpy as np
import torch
from checkpoint import FORMATS, Writer, config_of
from kernel_muster.MODEL_toml import load_manifest, manifest_folder
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.checkpoints import CheckpointWeights, open_checkpoint
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.drafter import drafter_from_dims
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.proposers.dflash import DflashProposer
from kernel_muster.models.proposers.mtp import MtpProposer
from kernel_muster.models.reduced import reduced
from kernel_muster.models.weights.random_weights import RandomWeights
from reference import Streamed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import header

MARGIN = 1.5
PAGE = 64
SINGLE = (1, 7, 64, 300, 1024, 4096)
TOGETHER = (24, 40)
MOST_DRAFTS, MOST_DRAFTED = 32, 16


class Judged:
    """Distances of logits from the reference, over all positions of a run."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.same: list[bool] = []
        self.gap_of_others: list[float] = []  # reference's logit gap where the choice differs

    def add(self, reference: torch.Tensor, other: torch.Tensor) -> None:
        """Compare logits ``(T, V)``."""
        true, got = reference.double().log_softmax(-1), other.double().log_softmax(-1)
        self.kl += (true.exp() * (true - got)).sum(-1).tolist()
        mine, theirs = reference.argmax(-1), other.argmax(-1)
        self.same += (mine == theirs).tolist()
        at = torch.arange(len(mine), device=reference.device)
        gap = (reference[at, mine] - reference[at, theirs])[mine != theirs]
        self.gap_of_others += gap.tolist()

    def row(self) -> dict[str, float]:
        """Return the figures of a table."""
        kl = np.array(self.kl)
        return {
            "positions": len(kl), "mean_kl": float(kl.mean()), "p99_kl": float(np.quantile(kl, 0.99)),
            "largest_kl": float(kl.max()), "same_choice": float(np.mean(self.same)),
            "largest_gap_of_another_choice": max(self.gap_of_others, default=0.0),
        }  # fmt: skip


def prompts_of(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    """Return seeded prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def load(name: str, folder: Path, target: str, is_reduced: bool) -> tuple[Any, Any, dict[str, float]]:
    """Boot a model and build it from a folder. Return it with the boot's levers and the cost of loading."""
    start = time.perf_counter()
    for file in folder.glob("*.safetensors"):  # a plain read, which also brings the files into the page cache
        file.read_bytes()
    read_s = time.perf_counter() - start
    with km.boot(name, target=target, levers={}) as boot:
        dims = model_dims(boot.manifest)
        start = time.perf_counter()
        weights = CheckpointWeights(open_checkpoint(folder))
        model = build_from_dims(reduced(dims) if is_reduced else dims, boot.kernels, weights)
        model.memory.wait()
        load_s = time.perf_counter() - start
    for line in weights.report().lines():
        print(line, flush=True)
    cost = {
        "read_s": read_s, "load_s": load_s, "device_gib": model.memory.used_bytes() / 2**30,
        "peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip
    return model, boot.levers, cost


def decode(model: Any, prompts: Sequence[Sequence[int]], new: int, proposer_of: Any = None) -> Any:
    """Return tokens of all prompts together, with their logits where no ``proposer_of(sizes)`` drafts."""
    longest = max(map(len, prompts)) + new + MOST_DRAFTS + 1
    sizes = StateSizes(len(prompts), len(prompts) * -(-longest // PAGE), PAGE)
    with DecodeEngine(model, sizes, -(-longest // PAGE) * PAGE) as engine:
        proposer = proposer_of and proposer_of(sizes)
        return engine.generate([list(one) for one in prompts], new, keep_logits=proposer is None, proposer=proposer)


def proposers(model: Any, levers: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the proposers: the MTP head of the checkpoint, and a block-diffusion drafter with random weights."""
    found: dict[str, Any] = {}
    if model.dims.mtp_layers:
        found["mtp"] = lambda sizes: MtpProposer(model, levers, 3, sizes)
    if options.dflash:
        with km.boot(options.dflash, target=options.target, levers={}) as boot:
            dims = model_dims(boot.manifest)
            weights = RandomWeights(seed=2, plain_norms=("norm", "norm.weight"))
            drafter = drafter_from_dims(reduced(dims) if options.reduced else dims, boot.kernels, weights, model)
        found["dflash"] = lambda sizes: DflashProposer(drafter, boot.levers, sizes)
    return found


def tensor(rows: Sequence[Any], device: str) -> torch.Tensor:
    """Return BF16 logits of one prompt as FP32."""
    return torch.from_numpy(np.stack(rows).astype(np.float32)).to(device)


def groups(vocab: int) -> list[tuple[str, list[list[int]], bool]]:
    """Return runs: a label, their prompts, and whether their prompts have one length."""
    runs = [(f"1 x {length}", prompts_of([length], vocab, length), True) for length in SINGLE]
    mixed = prompts_of([length for length in TOGETHER for _ in range(8)], vocab, 99)
    return [*runs, ("4 together", [*mixed[:2], *mixed[8:10]], False), ("16 together", mixed, False)]


def by_length(prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return the prompts' numbers by their length: the reference takes those of one length at once."""
    found: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(len(prompt), []).append(index)
    return found


def judge(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write, load, decode and compare. Return the record."""
    device = "cpu" if options.target == "cpu" else "cuda"
    manifest, _ = load_manifest(manifest_folder() / options.model / "MODEL.toml")
    if manifest is None:
        raise SystemExit(f"no shipped manifest has the name {options.model}")
    dims = reduced(model_dims(manifest)) if options.reduced else model_dims(manifest)
    record: dict[str, Any] = {"model": options.model, "formats": {}, "runs": []}
    ours, peer, tokens = Judged(), Judged(), {}
    for number, format in enumerate(options.formats.split(",")):
        place = folder / format
        start = time.perf_counter()
        Writer(dims, place, format, options.seed, device).write()
        write_s = time.perf_counter() - start
        size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
        print(f"{format}: {size / 2**30:.1f} GiB written in {write_s:.0f} s", flush=True)
        model, levers, cost = load(options.model, place, options.target, options.reduced)
        print(f"loaded: {cost}", flush=True)
        record["formats"][format] = {"gib": size / 2**30, "write_s": write_s, **cost}
        by = proposers(model, levers, options) if number == 0 else {}
        reference = Streamed(place, config_of(dims), device) if number == 0 else None
        for label, prompts, _ in groups(dims.vocab):
            run = decode(model, prompts, options.new)
            if reference is None:
                record["formats"][format].setdefault("same_tokens", {})[label] = run.tokens == tokens[label]
                continue
            tokens[label] = run.tokens
            here, there = Judged(), Judged()
            for group in by_length(prompts).values():
                ids = [[*prompts[i], *run.tokens[i][:-1]] for i in group]
                exact = reference.logits(ids, options.new, torch.float32)
                narrow = reference.logits(ids, options.new, torch.bfloat16)
                for at, index in enumerate(group):
                    for one, whole in ((here, ours), (there, peer)):
                        got = tensor(run.logits[index], device) if one is here else narrow[at]
                        one.add(exact[at], got)
                        whole.add(exact[at], got)
            record["runs"].append({"run": label, "ours": here.row(), "transformers BF16": there.row()})
            print(json.dumps(record["runs"][-1]), flush=True)
            if len(prompts) < MOST_DRAFTED:
                same = {name: decode(model, prompts, options.new, one).tokens == run.tokens for name, one in by.items()}
                record["runs"][-1]["same_tokens_with_drafts"] = same
                print(f"drafts: {same}", flush=True)
        del model, by
        shutil.rmtree(place)
    record |= {"ours": ours.row(), "transformers BF16": peer.row(), "margin": MARGIN}
    record["passed"] = record["ours"]["mean_kl"] <= MARGIN * record["transformers BF16"]["mean_kl"]
    return record


def table(record: dict[str, Any]) -> str:
    """Return the runs as a Markdown table."""
    lines = [
        "| run | positions | mean KL, ours | transformers | same choice, ours | transformers | drafts: same |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in (*record["runs"], {"run": "all", **{k: record[k] for k in ("ours", "transformers BF16")}}):
        mine, other = row["ours"], row["transformers BF16"]
        drafts = row.get("same_tokens_with_drafts") or {}
        same = ", ".join(f"{name} {'yes' if is_same else 'no'}" for name, is_same in drafts.items()) or "-"
        lines.append(
            f"| {row['run']} | {mine['positions']} | {mine['mean_kl']:.2e} | {other['mean_kl']:.2e} | "
            f"{mine['same_choice']:.1%} | {other['same_choice']:.1%} | {same} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Judge and print. Exit code 1 if the result exceeds the bound."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--reduced", action="store_true", help="a few narrow layers, for a machine without a GPU")
    parser.add_argument("--dflash", help="the manifest of a block-diffusion drafter of this model")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        record = judge(options, Path(folder))
    record["header"] = header(f"python benchmarks/full_size/run.py {' '.join(sys.argv[1:])}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{record['header']}\n\n{table(record)}\n\n{'PASSED' if record['passed'] else 'FAILED'}")
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
