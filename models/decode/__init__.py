"""Decode as a loop of replays: one recorded step for each captured batch size, a CUDA graph on a device."""

from kernel_muster.models.decode.engine import DecodeEngine
from kernel_muster.models.decode.sampling import Sampling

__all__ = ["DecodeEngine", "Sampling"]
