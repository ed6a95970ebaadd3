"""The choice of tokens, and its random numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.models.memory.state import is_int
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen


@frozen
class Sampling:
    """Temperature 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token. One seed gives one text a prompt."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        # The ranges of the sampling kernel's types.
        least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        is_right = (
            _is_number(self.temperature)
            and (self.temperature == 0 or least <= self.temperature <= most)
            and is_int(self.top_k)
            and 0 <= self.top_k <= np.iinfo(np.int32).max
            and _is_number(self.top_p)
            and least <= self.top_p <= 1
            and is_int(self.seed)
            and self.seed >= 0
        )
        if not is_right:
            raise UsageError(
                f"{self}: expected a temperature from 0 on, top_k from 0 on, top_p above 0 and up to 1, all within "
                "FP32 and int32, and a seed from 0 on"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is chosen."""
        return self.temperature == 0

    def stream(self, prompt: int) -> "UniformStream":
        """Return the random numbers of one prompt, independent of its neighbours."""
        return UniformStream(self.seed, prompt)


def _is_number(value: object) -> bool:
    return is_int(value) or isinstance(value, (float, np.floating))


def check_uniform(values: Sequence[Any]) -> None:
    """UsageError unless all are numbers in [0, 1), also as FP32: a kernel on a device takes them as they are."""
    for at, value in enumerate(values):
        if not (_is_number(value) and 0 <= value < 1 and np.float32(value) < 1):
            raise UsageError(f"random number {value!r} at place {at}: expected FP32 from 0 on and below 1")


class UniformStream:
    """FP32 numbers in [0, 1), one a token."""

    def __init__(self, seed: int, prompt: int) -> None:
        self._random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, prompt])))

    def next(self) -> float:
        """Return the next number."""
        return float(self._random.random(dtype=np.float32))
