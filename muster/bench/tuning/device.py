"""The source of times on a GPU: all arms of a shape and row count are set up, judged, and timed in turn."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from kernel_muster.bench.contestants import Contestant, Entry, Launch, copied, launch_of, poisoned
from kernel_muster.bench.data.nvfp4 import DenseData, bf16_values, make_dense_data
from kernel_muster.bench.families.gemv import LARGEST_ERROR
from kernel_muster.bench.peers.peers import dense_peers
from kernel_muster.bench.problem import Problem
from kernel_muster.bench.race import Row, free_memory, race
from kernel_muster.bench.timing import Timer, copies_of
from kernel_muster.bench.tuning.source import (
    BF16_GEMM,
    BF16_GEMV,
    BF16_TILES_OF_3,
    CUBLAS,
    GEMV,
    HOPPER,
    LEAST_OF_HEAD,
    MOST_CHUNKED,
    TILES_OF_3,
    Timing,
)
from kernel_muster.models.policy.gemv import TIERS, WIDE_TIER, WIDEST_TIER, chunk_tier, gemv_chunks, row_tiles
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

#: Largest row count with tiles of 3 as a contestant.
MOST_TILED = 16
_TILES = "w4a16"
# In a slot, the twin preferred by dispatch comes first.
_TILE_KEYS = {
    "t": ("w4a16_gemm_t_p3", "w4a16_gemm_t"),
    "k64": ("w4a16_gemm_t_k64_p3", "w4a16_gemm_t_k64"),
    "k64_n64": ("w4a16_gemm_t_k64_n64_p3",),
    "m128": ("w4a16_gemm_t_m128",),
}
#: The kernels of a BF16 projection: one row, up to 16, any number.
_DENSE = ("dense_gemv_bf16", "dense_gemv_bf16_batchm", "dense_gemm_bf16")
_CUBLAS_NAME = "cuBLAS bf16"


def find_tiers(kernels: Lookups) -> dict[int, Handle]:
    """Return the target's GEMV tiers."""
    names = {rows: "w4a16_gemv" if rows == 1 else f"w4a16_gemv_batch{rows}" for rows in (*TIERS, WIDE_TIER)}
    found = {rows: kernels.try_kernel("w4a16_gemv", name) for rows, name in names.items()}
    return {rows: handle for rows, handle in found.items() if isinstance(handle, Handle)}


def find_gemms(kernels: Lookups) -> dict[str, Handle]:
    """Return the target's GEMMs, by arm."""
    found = {arm: kernels.first_of(*((_TILES, name) for name in names)) for arm, names in _TILE_KEYS.items()}
    if kernels.target.arch == parse_arch("sm_90a"):
        found[HOPPER] = kernels.try_kernel("w4a16_hopper", "w4a16_hopper_gemm")
    return {arm: handle for arm, handle in found.items() if isinstance(handle, Handle)}


def find_dense(kernels: Lookups) -> dict[str, Handle]:
    """Return the target's kernels of BF16 projections, by function."""
    found = {name: kernels.try_kernel("gemm" if "gemm" in name else "gemv", name) for name in _DENSE}
    return {name: handle for name, handle in found.items() if isinstance(handle, Handle)}


@dataclass
class _Copies:
    """Cold copies of one logical weight, made once in each layout."""

    weight: Nvfp4Weight | Bf16Weight
    size_bytes: int
    made: dict[str | None, list[Any]] = field(default_factory=dict)

    def of(self, handle: Handle) -> list[Any]:
        """Return the copies in a kernel's layout."""
        if handle.weight_layout not in self.made:
            first = handle.prepare_weight(self.weight)
            more = copies_of(self.size_bytes) - 1
            self.made[handle.weight_layout] = [first, *(copied(first) for _ in range(more))]
        return self.made[handle.weight_layout]


_Parts = tuple[tuple[slice, Handle], ...]


class DeviceSource:
    """Measures on the current device. Each arm over cold copies of the weight in its layout.

    Each shape's weight is measured as NVFP4 and as BF16, an LM head's as NVFP4 only, ``only_bf16`` as BF16 only.
    """

    def __init__(
        self, kernels: Lookups, rounds: int, *, peers: bool = True, only_bf16: Collection[tuple[int, int]] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self._tiers, self._gemms, self._dense = find_tiers(kernels), find_gemms(kernels), find_dense(kernels)
        self._rounds, self._peers, self._only_bf16, self._say = rounds, peers, frozenset(only_bf16), say
        self.kernels: dict[str, str] = {}
        self.problems: list[str] = []
        self._timer = Timer()

    def timings(self, features: int, depth: int, rows: Sequence[int]) -> Iterator[Timing]:
        """Yield the times at one shape, row count by row count."""
        data = make_dense_data(features, depth, max(rows))
        sources: list[Callable[[int], Iterator[Contestant]]] = []
        if (features, depth) not in self._only_bf16:
            sources.append(partial(self._contestants, data, _Copies(data.weight, data.weight_bytes)))
        if features < LEAST_OF_HEAD and self._dense:
            values = Bf16Weight(bf16_values(data.weight, _cupy()))
            sources.append(partial(self._bf16_contestants, data, _Copies(values, 2 * features * depth)))
        for count in rows:
            self._say(f"{features} x {depth}, {count} rows")
            contestants = tuple(one for source in sources for one in source(count))
            if not contestants:
                continue
            problem = Problem(
                f"{features}x{depth}", f"{features} x {depth}", count, (*contestants, *self._cublas(data, count)),
                partial(data.error, rows=count), LARGEST_ERROR, floor="",
            )  # fmt: skip
            yield self._timing(features, depth, count, list(race(self._timer, "tune", problem, self._rounds)))
        del sources
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

    def _cublas(self, data: DenseData, rows: int) -> Iterator[Contestant]:
        if self._peers:
            yield from (peer for peer in dense_peers(data, rows) if peer.name == _CUBLAS_NAME)

    def _contestants(self, data: DenseData, copies: _Copies, rows: int) -> Iterator[Contestant]:
        is_head = data.features >= LEAST_OF_HEAD
        tiers = [tier for tier in self._tiers if not (is_head and tier == WIDE_TIER)]
        if tiers and rows <= (WIDE_TIER if WIDE_TIER in tiers else MOST_CHUNKED):
            yield self._contestant(GEMV, self._parts(gemv_chunks(rows, tiers)), data, copies, rows)
        if {1, 2, 3} <= set(tiers) and rows <= MOST_TILED and not is_head:
            yield self._contestant(TILES_OF_3, self._parts(row_tiles(rows)), data, copies, rows)
        for arm, handle in self._gemms.items():
            if arm == HOPPER or (rows > MOST_TILED and not is_head):
                yield self._contestant(arm, ((slice(0, rows), handle),), data, copies, rows)

    def _parts(self, sizes: Sequence[int]) -> _Parts:
        return _cut(sizes, {size: self._tiers[chunk_tier(size, self._tiers) or size] for size in sizes})

    def _bf16_contestants(self, data: DenseData, copies: _Copies, rows: int) -> Iterator[Contestant]:
        one, several, gemm = (self._dense.get(name) for name in _DENSE)
        if one is not None and several is not None:
            handles = {1: one} | dict.fromkeys(range(2, WIDEST_TIER + 1), several)
            if rows <= MOST_CHUNKED:
                parts = _cut(row_tiles(rows, WIDEST_TIER), handles)
                yield self._contestant(BF16_GEMV, parts, data, copies, rows)
            if rows <= MOST_TILED:
                yield self._contestant(BF16_TILES_OF_3, _cut(row_tiles(rows), handles), data, copies, rows)
        if gemm is not None and rows > MOST_TILED:  # up to this number it launches the GEMV
            yield self._contestant(BF16_GEMM, ((slice(0, rows), gemm),), data, copies, rows)

    def _contestant(self, arm: str, parts: _Parts, data: DenseData, copies: _Copies, rows: int) -> Contestant:
        handles = tuple(dict.fromkeys(handle for _, handle in parts))
        self.kernels.update({str(handle.key): handle.source_sha256 for handle in handles})

        def make(stream: Any) -> Entry:
            out = poisoned((rows, data.features))

            def given(part: slice, handle: Handle, number: int) -> dict[str, Any]:
                return {"x": data.x[part], "w": copies.of(handle)[number], "out": out[part]}

            # One workspace for all of them, warm as among the launches of a decode step.
            scratch = _workspace(max(handle.scratch_bytes(**given(part, handle, 0)) for part, handle in parts))

            def launch(part: slice, handle: Handle, number: int) -> Launch:
                return launch_of(handle, stream, scratch=scratch, **given(part, handle, number))

            launches = tuple(
                _in_turn([launch(part, handle, number) for part, handle in parts])
                for number in range(copies_of(copies.size_bytes))
            )
            return Entry(launches, out, copies.size_bytes * len(parts), 2.0 * rows * data.features * data.depth)

        return Contestant(arm, "ours", make, handles)


def _cut(sizes: Sequence[int], handles: Mapping[int, Handle]) -> _Parts:
    """Split rows into tiles, each with the kernel of its size."""
    ends = list(accumulate(sizes))
    return tuple((slice(end - size, end), handles[size]) for size, end in zip(sizes, ends, strict=True))


def _cupy() -> Any:
    import cupy

    return cupy


def _workspace(size_bytes: int) -> Any:
    """Return device memory, or None if none is needed."""
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
