"""The weights that both arms read: from a checkpoint, or random from a seed, so that every kernel's work shows."""

from pathlib import Path

from kernel_muster.models.random_weights import RandomWeights
from kernel_muster.models.weights import WeightSource
from kernel_muster.registry.errors import UsageError

#: Norms that multiply by the weight itself are put around one, as trained ones are: around zero they would silence
#: whatever stands before them. In a delta net they do so in every model.
_PLAIN = (".gdn.norm",)
_ALL = ("norm", "norm.weight")


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


def weights_text(folder: Path | None, seed: int) -> str:
    """Say where weights come from."""
    return f"random from seed {seed}" if folder is None else f"the checkpoint in {folder}"


def drafter_weights_of(folder: Path | None, seed: int, *, is_zero_centred: bool) -> WeightSource:
    """Return the source of a drafter. Its layers are called like the target's: random ones come from the next seed."""
    return weights_of(folder, seed + 1, is_zero_centred=is_zero_centred, option="--drafter-weights")
