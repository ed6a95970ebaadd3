"""How experts' kernels split K, and the arguments that all of them take."""

from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.contract.arrays import ArrayView, view_of
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.values import frozen

MAX_ON_AN_AXIS = 65535  # of a grid's second axis


@frozen
class Split:
    """A split of K (experts.cuh): at most ``slices`` split-K slices, in an entry point for one K or for any."""

    name: str
    slices: int

    def teams(self, warps: int) -> int:
        """Return the teams of a block, each with its own tile."""
        return warps // min(self.slices, warps)


_ANY = Split("any", 8)
_DOWN = ((512, Split("to_512", 1)), (1024, Split("to_1024", 2)))
_STATIC = {"gate_up": {2048: Split("k2048", 8)}, "down": {512: Split("k512", 1)}}
#: By projection, as FOR_EACH_GATE_UP and FOR_EACH_DOWN of experts.cuh.
SPLITS = {
    "gate_up": (*_STATIC["gate_up"].values(), _ANY),
    "down": (*_STATIC["down"].values(), *(split for _, split in _DOWN), _ANY),
}


def split_of(projection: str, depth: int) -> Split:
    """Return the split of ``gate_up`` or ``down`` for depth K, never a function of the rows.

    The slices of one K are the same for every kernel: 1 up to 512, 2 up to 1024, else 8.
    """
    if depth in _STATIC[projection]:
        return _STATIC[projection][depth]
    return next((split for most, split in _DOWN if projection == "down" and depth <= most), _ANY)


def weights_of(bound: Bound, *names: str) -> tuple[ArrayView, ...]:
    """Return the data of some experts' weights, then their global scales."""
    weights = [bound.arguments[name] for name in names]
    return (*(view_of(w.data) for w in weights), *(view_of(w.global_scale_decode) for w in weights))


def entries_of(kernel: str, projection: str, pointers: int, integers: int) -> tuple[EntryPoint, ...]:
    """Return one entry point for each split of K of a projection."""
    types = ("ptr",) * pointers + ("i32",) * integers
    return tuple(EntryPoint(f"{kernel}_{split.name}", types) for split in SPLITS[projection])
