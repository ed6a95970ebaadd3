"""Load a checkpoint of NVFP4 weights and decode with it: token ids in, token ids out.

    python decode.py FOLDER [--target cuda] [--ids 1,2,3]... [--tokens 32] [--drafts 3]
        [--temperature 0.7 --top-k 20 --top-p 0.8 --seed 0]

Each ``--ids`` is a prompt. ``--small`` is for a checkpoint of small_checkpoint.py.
"""

import argparse
import sys
from pathlib import Path

import kernel_muster as km
from kernel_muster.audit.render.text import render_text
from kernel_muster.cli.remedies import fitted
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.checkpoints import CheckpointWeights, open_checkpoint
from kernel_muster.models.decode import DecodeEngine, Sampling
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.proposers.mtp import MtpProposer
from kernel_muster.models.reduced import reduced
from kernel_muster.registry.levers import Levers

PAGE = 16


def load(folder: Path, target: str | None, *, is_small: bool) -> tuple[Model, Levers]:
    """Boot the model of a folder's config.json, and build it with the folder's weights."""
    model = "qwen3.6-27b" if is_small else str(folder)
    with km.boot(model, target=target) as boot:
        weights = CheckpointWeights(open_checkpoint(folder))
        if is_small:
            built = build_from_dims(reduced(model_dims(boot.manifest)), boot.kernels, weights)
        else:
            built = km.build_model(boot.manifest, boot.kernels, weights)
    for line in weights.report().lines():
        print(line, file=sys.stderr)
    return built, boot.levers


def decode(
    model: Model, levers: Levers, prompts: list[list[int]], tokens: int, sampling: Sampling, drafts: int = 0
) -> list[list[int]]:
    """Return the new tokens of each prompt."""
    longest = max(map(len, prompts)) + tokens + drafts + 1
    sizes = StateSizes(sequences=len(prompts), pages=len(prompts) * -(-longest // PAGE), page_size=PAGE)
    with DecodeEngine(model, sizes, max_context=longest) as engine:
        proposer = MtpProposer(model, levers, drafts, sizes) if drafts else None
        return engine.generate(prompts, tokens, sampling, proposer=proposer).tokens


def main(arguments: list[str]) -> int:
    """Read the arguments, load, decode, and print the ids of each prompt on a line."""
    parser = argparse.ArgumentParser(description="Load a checkpoint and decode with it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", help="cuda, cuda:<n> or cpu; default: the GPU")
    parser.add_argument("--ids", action="append", help="a prompt: token ids with commas; repeatable")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each prompt")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of the MTP head in each step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="for a checkpoint of small_checkpoint.py")
    given = parser.parse_args(arguments)
    try:
        prompts = [[int(one) for one in text.split(",")] for text in given.ids or ["1,2,3"]]
    except ValueError:
        parser.error("--ids: expected numbers with commas")
    if given.drafts and given.temperature:
        parser.error("--drafts: drafts are accepted by the greedy choice only, leave --temperature out")
    try:
        sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed)
        model, levers = load(given.folder, given.target, is_small=given.small)
        found = decode(model, levers, prompts, given.tokens, sampling, given.drafts)
    except km.BootRefused as refused:
        print(render_text(fitted(refused.report, "decode")))  # without a GPU, the remedies for a decode
        return 1
    except km.UsageError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 2
    for row in found:
        print(*row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
