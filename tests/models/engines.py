"""Sizes and prompts of the decode engines under test."""

from collections.abc import Callable

from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model

Make = Callable[..., Model]
SIZES = StateSizes(4, 64, 4)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9]]
NEW = 12
