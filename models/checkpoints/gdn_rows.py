"""Row orders of the gated delta net's input projections.

Our ``qkvz_proj`` groups rows per key head ``[q | k | v of its value heads | z of them]``, as in_proj_qkvz does; our
``ba_proj`` is ``[beta of all value heads | alpha of all]``. Permuting rows is exact in every format.
"""

import numpy as np
from kernel_muster.MODEL_toml.hf.config import CONFIG_NAME
from kernel_muster.MODEL_toml.hf.fields import KEYS
from kernel_muster.MODEL_toml.wording import shown
from kernel_muster.models.checkpoints.checkpoint import Checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError
from kernel_muster.registry.values import frozen
from numpy.typing import NDArray

Rows = NDArray[np.intp]
_SIZES = ("key_heads", "key_dim", "value_heads", "value_dim")
_MOST = 1 << 20


@frozen
class GdnHeads:
    """Heads and their sizes."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    def grouped(self) -> Rows:
        """Return where each row of qkvz grouped per key head lies in ``[q all | k all | v all | z all]``."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        starts = (0, keys, 2 * keys, 2 * keys + values)
        sizes = (keys, keys, values, values)
        parts = [start + np.arange(size).reshape(self.key_heads, -1) for start, size in zip(starts, sizes, strict=True)]
        return np.concatenate(parts, axis=1).ravel()

    def ungrouped_ba(self) -> Rows:
        """Return where each row of ``[b all | a all]`` lies in in_proj_ba, which groups ``[b | a]`` per key head."""
        each = self.value_heads // self.key_heads
        groups = np.arange(2 * self.value_heads).reshape(self.key_heads, 2, each)
        return np.concatenate([groups[:, 0].ravel(), groups[:, 1].ravel()])


def gdn_heads(checkpoint: Checkpoint) -> GdnHeads:
    """Read the sizes from a checkpoint's config; CheckpointError if they are missing or make no sense."""
    file = checkpoint.folder / CONFIG_NAME
    sizes = {}
    for name in _SIZES:
        keys = KEYS[f"gdn.{name}"]
        value = checkpoint.hf.get(*keys)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
            raise CheckpointError(file, None, f"{keys[0]} as a positive integer", shown(value))
        sizes[name] = value
    heads = GdnHeads(**sizes)
    if heads.value_heads % heads.key_heads:
        wanted = f"linear_num_value_heads as a multiple of the {heads.key_heads} key heads"
        raise CheckpointError(file, None, wanted, str(heads.value_heads))
    return heads
