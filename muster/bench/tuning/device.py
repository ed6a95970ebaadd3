"""The source of times on a GPU: all arms of a shape and row count are set up, judged, and timed in turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kernel_muster.bench.contestants import Contestant, Entry, Launch, copied, launch_of, poisoned
from kernel_muster.bench.data.nvfp4 import DenseData, make_dense_data
from kernel_muster.bench.families.gemv import LARGEST_ERROR
from kernel_muster.bench.peers.peers import dense_peers
from kernel_muster.bench.problem import Problem
from kernel_muster.bench.race import Row, free_memory, race
from kernel_muster.bench.timing import Timer, copies_of
from kernel_muster.bench.tuning.source import (
    CUBLAS,
    GEMV,
    HOPPER,
    LEAST_OF_HEAD,
    MOST_CHUNKED,
    TILES_OF_3,
    Timing,
)
from kernel_muster.models.policy.gemv import TIERS, WIDE_TIER, chunk_tier, gemv_chunks, row_tiles
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

#: The rows up to which tiles of 3 are a contestant.
MOST_TILED = 16
_TILES = "w4a16"
# Of a slot, the twin that dispatch prefers comes first.
_TILE_KEYS = {
    "t": ("w4a16_gemm_t_p3", "w4a16_gemm_t"),
    "k64": ("w4a16_gemm_t_k64_p3", "w4a16_gemm_t_k64"),
    "k64_n64": ("w4a16_gemm_t_k64_n64_p3",),
    "m128": ("w4a16_gemm_t_m128",),
}
_CUBLAS_NAME = "cuBLAS bf16"


def find_tiers(kernels: Lookups) -> dict[int, Handle]:
    """Return the GEMV tiers that the target has."""
    names = {rows: "w4a16_gemv" if rows == 1 else f"w4a16_gemv_batch{rows}" for rows in (*TIERS, WIDE_TIER)}
    found = {rows: kernels.try_kernel("w4a16_gemv", name) for rows, name in names.items()}
    return {rows: handle for rows, handle in found.items() if isinstance(handle, Handle)}


def find_gemms(kernels: Lookups) -> dict[str, Handle]:
    """Return the GEMMs that the target has, by arm."""
    found = {arm: kernels.first_of(*((_TILES, name) for name in names)) for arm, names in _TILE_KEYS.items()}
    if kernels.target.arch == parse_arch("sm_90a"):
        found[HOPPER] = kernels.try_kernel("w4a16_hopper", "w4a16_hopper_gemm")
    return {arm: handle for arm, handle in found.items() if isinstance(handle, Handle)}


@dataclass
class _Copies:
    """Cold copies of one weight, made once in each layout."""

    data: DenseData
    made: dict[str | None, list[Any]] = field(default_factory=dict)

    def of(self, handle: Handle) -> list[Any]:
        """Return the copies that a kernel reads."""
        if handle.weight_layout not in self.made:
            first = handle.prepare_weight(self.data.weight)
            more = copies_of(self.data.weight_bytes) - 1
            self.made[handle.weight_layout] = [first, *(_copied(first) for _ in range(more))]
        return self.made[handle.weight_layout]


def _copied(weight: Any) -> Any:
    """Return a weight elsewhere: one array of bytes, or the logical weight's two."""
    if hasattr(weight, "data"):
        return copied(weight)
    from dataclasses import replace

    return replace(weight, packed=weight.packed.copy(), block_scale=weight.block_scale.copy())


class DeviceSource:
    """Measures on the current device; each arm over cold copies of the weight in its layout."""

    def __init__(
        self, kernels: Lookups, rounds: int, *, peers: bool = True, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._tiers, self._gemms = find_tiers(kernels), find_gemms(kernels)
        self._rounds, self._peers, self._say = rounds, peers, say
        self.kernels: dict[str, str] = {}
        self.problems: list[str] = []
        self._timer = Timer()

    def timings(self, features: int, depth: int, rows: Sequence[int]) -> Iterator[Timing]:
        """Yield the times at one shape, row count by row count."""
        data = make_dense_data(features, depth, max(rows))
        copies = _Copies(data)
        for count in rows:
            self._say(f"{features} x {depth}, {count} rows")
            problem = Problem(
                f"{features}x{depth}", f"{features} x {depth}", count, tuple(self._contestants(data, copies, count)),
                partial(data.error, rows=count), LARGEST_ERROR, floor="",
            )  # fmt: skip
            yield self._timing(features, depth, count, list(race(self._timer, "tune", problem, self._rounds)))
        del copies
        free_memory()

    def _timing(self, features: int, depth: int, rows: int, raced: Sequence[Row]) -> Timing:
        us: dict[str, float] = {}
        spread: dict[str, float] = {}
        for row in raced:
            arm = CUBLAS if row.contestant == _CUBLAS_NAME else row.contestant
            if row.us is not None and row.spread is not None:
                us[arm], spread[arm] = row.us, row.spread
            elif row.role == "ours":
                self.problems.append(f"{arm} at {features} x {depth}, {rows} rows: {row.note}")
        return Timing(features, depth, rows, us, spread)

    def _contestants(self, data: DenseData, copies: _Copies, rows: int) -> Iterator[Contestant]:
        is_head = data.features >= LEAST_OF_HEAD
        tiers = [tier for tier in self._tiers if not (is_head and tier == WIDE_TIER)]
        if tiers and rows <= (WIDE_TIER if WIDE_TIER in tiers else MOST_CHUNKED):
            yield self._gemv(GEMV, gemv_chunks(rows, tiers), data, copies, rows)
        if {1, 2, 3} <= set(tiers) and rows <= MOST_TILED and not is_head:
            yield self._gemv(TILES_OF_3, row_tiles(rows), data, copies, rows)
        for arm, handle in self._gemms.items():
            if arm == HOPPER or (rows > MOST_TILED and not is_head):
                yield self._contestant(arm, ((slice(0, rows), handle),), data, copies, rows)
        if self._peers:
            yield from (peer for peer in dense_peers(data, rows) if peer.name == _CUBLAS_NAME)

    def _gemv(self, arm: str, chunks: Sequence[int], data: DenseData, copies: _Copies, rows: int) -> Contestant:
        parts: list[tuple[slice, Handle]] = []
        start = 0
        for size in chunks:
            parts.append((slice(start, start + size), self._tiers[chunk_tier(size, self._tiers) or size]))
            start += size
        return self._contestant(arm, tuple(parts), data, copies, rows)

    def _contestant(
        self, arm: str, parts: tuple[tuple[slice, Handle], ...], data: DenseData, copies: _Copies, rows: int
    ) -> Contestant:
        handles = tuple(dict.fromkeys(handle for _, handle in parts))
        self.kernels.update({str(handle.key): handle.spec.backend.source_sha256 for handle in handles})

        def make(stream: Any) -> Entry:
            out = poisoned((rows, data.features))

            def given(part: slice, handle: Handle, number: int) -> dict[str, Any]:
                return {"x": data.x[part], "w": copies.of(handle)[number], "out": out[part]}

            # One workspace for all of them, as the launches of a decode step have: it is warm.
            scratch = _workspace(max(handle.scratch_bytes(**given(part, handle, 0)) for part, handle in parts))

            def launch(part: slice, handle: Handle, number: int) -> Launch:
                return launch_of(handle, stream, scratch=scratch, **given(part, handle, number))

            launches = tuple(
                _in_turn([launch(part, handle, number) for part, handle in parts])
                for number in range(copies_of(data.weight_bytes))
            )
            return Entry(launches, out, data.weight_bytes * len(parts), 2.0 * rows * data.features * data.depth)

        return Contestant(arm, "ours", make, handles)


def _workspace(size_bytes: int) -> Any:
    """Return device memory, or None where none is needed."""
    import cupy

    return cupy.empty(size_bytes, cupy.uint8) if size_bytes else None


def _in_turn(launches: Sequence[Launch]) -> Launch:
    """Return one launch that enqueues several."""
    if len(launches) == 1:
        return launches[0]

    def launch() -> None:
        for one in launches:
            one()

    return launch
