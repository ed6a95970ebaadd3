"""The weights that both arms read: from a checkpoint, or random from a seed, so that every kernel's work shows."""

import re
from collections.abc import Iterable
from pathlib import Path

from kernel_muster.models.weights.random_weights import RandomWeights
from kernel_muster.models.weights.source import WeightSource
from kernel_muster.registry.errors import UsageError

#: Norms that multiply by the weight itself are put around one, as trained ones are: around zero they would silence
#: whatever stands before them. In a delta net they do so in every model.
_PLAIN = (".gdn.norm",)
_ALL = ("norm", "norm.weight")
_NUMBER = re.compile(r"\d+")


def weights_of(
    folder: Path | None, seed: int, *, is_zero_centred: bool, option: str = "--weights"
) -> WeightSource:  # fmt: skip
    """Return the source of an arm, the same for the same arguments; UsageError if the checkpoint cannot be read."""
    if folder is None:
        return RandomWeights(seed, plain_norms=_PLAIN if is_zero_centred else _ALL)
    from kernel_muster.models.checkpoints import CheckpointWeights, open_checkpoint

    if not folder.is_dir():
        raise UsageError(f"{option}: {folder} is no folder")
    return CheckpointWeights(open_checkpoint(folder))


def unread_tensors(weights: WeightSource) -> tuple[str, ...]:
    """Name the tensors of a checkpoint that a builder asked for nothing of; none where it asked for nothing at all.

    Such a builder reads the checkpoint in a way of its own.
    """
    report = getattr(weights, "report", None)  # random weights have none
    found = report() if report is not None else None
    return tuple(found.unused) if found is not None and found.used else ()


def folded_names(names: Iterable[str], most: int) -> list[str]:
    """Return names of tensors, those that differ in numbers alone as one, up to so many."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    lines = [f"{key} ({len(group)})" if len(group) > 1 else group[0] for key, group in groups.items()]
    return lines if len(lines) <= most + 1 else [*lines[:most], f"... ({len(lines) - most} more: --format json)"]


def weights_text(folder: Path | None, seed: int) -> str:
    """Say where weights come from."""
    return f"random from seed {seed}" if folder is None else f"the checkpoint in {folder}"


def drafter_weights_of(folder: Path | None, seed: int, *, is_zero_centred: bool) -> WeightSource:
    """Return the source of a drafter. Its layers are called like the target's: random ones come from the next seed."""
    return weights_of(folder, seed + 1, is_zero_centred=is_zero_centred, option="--drafter-weights")
