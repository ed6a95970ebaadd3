"""The weights of both arms: from a checkpoint, or random from a seed, scaled so that every kernel's work shows."""

import re
from collections.abc import Iterable
from pathlib import Path

from kernel_muster.models.weights.random_weights import RandomWeights
from kernel_muster.models.weights.source import WeightSource
from kernel_muster.registry.errors import UsageError

#: Norms that multiply by the weight itself lie around one, like trained ones: around zero they would silence their
#: input. In a delta net they do so in every model.
_PLAIN = (".gdn.norm",)
_ALL = ("norm", "norm.weight")
_NUMBER = re.compile(r"\d+")


def weights_of(
    folder: Path | None, seed: int, *, is_zero_centred: bool, option: str = "--weights"
) -> WeightSource:  # fmt: skip
    """Return the source of an arm, the same for the same arguments. UsageError if the checkpoint cannot be read."""
    if folder is None:
        return RandomWeights(seed, plain_norms=_PLAIN if is_zero_centred else _ALL)
    from kernel_muster.models.checkpoints import CheckpointWeights, open_checkpoint

    if not folder.is_dir():
        raise UsageError(f"{option}: {folder} is no folder")
    return CheckpointWeights(open_checkpoint(folder))


def unread_tensors(weights: WeightSource) -> tuple[str, ...]:
    """Name the tensors of a checkpoint that a builder did not read. None for a builder that read no tensor at all.

    Such a builder reads the checkpoint in another way.
    """
    report = getattr(weights, "report", None)  # random weights have none
    found = report() if report is not None else None
    return tuple(found.unused) if found is not None and found.used else ()


def folded_names(names: Iterable[str], most: int) -> list[str]:
    """Return names of tensors, with names that differ only in numbers folded, up to ``most``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    lines = [f"{key} ({len(group)})" if len(group) > 1 else group[0] for key, group in groups.items()]
    return lines if len(lines) <= most + 1 else [*lines[:most], f"... ({len(lines) - most} more: --format json)"]


def weights_text(folder: Path | None, seed: int) -> str:
    """Return the origin of the weights."""
    return f"random from seed {seed}" if folder is None else f"the checkpoint in {folder}"


def drafter_weights_of(folder: Path | None, seed: int, *, is_zero_centred: bool) -> WeightSource:
    """Return the source of a drafter. Its layers share names with the target's: random ones use the next seed."""
    return weights_of(folder, seed + 1, is_zero_centred=is_zero_centred, option="--drafter-weights")
