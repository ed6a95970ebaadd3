"""The result of a measurement of arms."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: Names of arms in tables. GEMV: one tier, above 16 rows the wide one or chunks of 16. Tiles of 3: batch3, batch2, one.
GEMV, TILES_OF_3, HOPPER, CUBLAS = "gemv", "tiles3", "hopper", "cublas_bf16"
#: The arms of weights that stay BF16, at the same points: the GEMV in launches of 16 rows, in tiles of 3, and the GEMM.
BF16_GEMV, BF16_TILES_OF_3, BF16_GEMM = "bf16_gemv", "bf16_tiles3", "bf16_gemm"
BF16_ARMS = (BF16_GEMV, BF16_TILES_OF_3, BF16_GEMM)
#: Largest row count with a GEMV in chunks of 16 as a contestant; the wide one competes at all its row counts.
MOST_CHUNKED = 64
#: This many features mean an LM head: chunks of 16 rows and the Hopper GEMM are all its arms.
LEAST_OF_HEAD = 1 << 16
#: Tile GEMMs, by the slots of ``models.policy.tile``.
TILE_ARMS = ("t", "k64", "k64_n64", "m128")


@dataclass(frozen=True)
class Timing:
    """Microseconds and spread of each arm at one shape and row count. An absent arm has none."""

    features: int
    depth: int
    rows: int
    us: Mapping[str, float]
    spread: Mapping[str, float]


class Source(Protocol):
    """Measures arms, in turn, on one device."""

    @property
    def kernels(self) -> Mapping[str, str]:
        """Keys of the arms' kernels, with the digests of their sources."""

    @property
    def problems(self) -> Sequence[str]:
        """Failures so far: an arm of ours that failed, or gave a wrong result."""

    def timings(self, features: int, depth: int, rows: Sequence[int]) -> Iterator[Timing]:
        """Yield the times at one shape, row count by row count."""
