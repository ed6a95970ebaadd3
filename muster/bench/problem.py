"""Requests to a family, and its problems."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernel_muster.bench.contestants import Contestant
from kernel_muster.MODEL_toml.manifest import Manifest

#: ``(name, size...)``: a shape from the command's ``--shape`` or a model's dimensions.
Shape = tuple[Any, ...]


@dataclass(frozen=True)
class Request:
    """The command's request: the models or shapes, the row counts, and the peers."""

    models: tuple[Manifest, ...]
    shapes: tuple[Shape, ...] = ()  # given by --shape; they replace the models
    rows: tuple[int, ...] = ()
    peers: bool = True
    named_peers: tuple[str, ...] = ()  # if any, only peers with one of these in their name, slow ones too
    only: tuple[str, ...] = ()  # if any, only problems with one of these in their names

    def wants(self, contestant: Contestant) -> bool:
        """Whether a contestant shall run: our kernels always, and the requested peers."""
        if contestant.role != "peer":
            return True
        named = any(name.lower() in contestant.name.lower() for name in self.named_peers)
        return self.peers and (named if self.named_peers else not contestant.is_slow)

    def selects(self, family: str, problem: "Problem") -> bool:
        """Whether a problem shall be measured: by the names of its shape, size and kernels."""
        ours = [one.name for one in problem.contestants if one.role == "ours"]
        text = " ".join((family, problem.shape, problem.size, *ours)).lower()
        return not self.only or any(part.lower() in text for part in self.only)


@dataclass(frozen=True)
class Problem:
    """One shape at one row count, with its contestants.

    ``error(out)`` returns an entry's relative error (NaN counts as infinite). A result above ``largest_error`` is not
    timed. ``floor`` names the contestant that all are compared with.
    """

    shape: str  # with its owner: "qwen3.6-27b attn.qkv"
    size: str  # "14336 x 5120"
    rows: int
    contestants: tuple[Contestant, ...]
    error: Callable[[Any], float] | None = None
    largest_error: float = 0.0
    floor: str = "read"
