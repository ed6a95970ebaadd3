"""Checkpoints: a Hugging Face-style folder of safetensors, read lazily, refused when unsure."""

from kernel_muster.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from kernel_muster.models.checkpoints.errors import CheckpointError, UnsupportedQuantError
from kernel_muster.models.checkpoints.fusing import fuse, fuse_problem
from kernel_muster.models.checkpoints.modules import LogicalWeights
from kernel_muster.models.checkpoints.source import CheckpointWeights, WeightReport

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWeights",
    "LogicalWeights",
    "UnsupportedQuantError",
    "WeightReport",
    "fuse",
    "fuse_problem",
    "open_checkpoint",
]
