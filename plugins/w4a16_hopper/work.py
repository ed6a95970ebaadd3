"""The tile configuration and the stream-K schedule of the Hopper GEMM for a shape: the least estimated time.

The estimate is a sum over the work of one worker (block). Its figures were fitted to measurements, see the table.
"""

from collections.abc import Iterator
from functools import cache

from kernel_muster.plugins._cuda.launching import ceil_div
from kernel_muster.plugins.w4a16_hopper.layout import BLOCK_N, CHUNK_BYTES, CHUNK_K
from kernel_muster.registry.values import frozen


@frozen
class Cost:
    """Microseconds of a launch, a stage, a work unit, any split of a tile, and each part of a tile above two.

    ``gather`` is the time of the reduction in a cluster, None for a configuration without shared memory for it.
    """

    launch: float
    stage: float
    unit: float
    share: float
    part: float
    gather: float | None = None


@frozen
class TileConfig:
    """An entry point (gemm.cu): tokens of a tile, consumer warpgroups of 64 rows each, chunks in a stage, stages."""

    tokens: int
    warpgroups: int
    span: int
    stages: int
    cost: Cost

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return self.warpgroups * BLOCK_N

    @property
    def threads(self) -> int:
        """Threads of a block, with the producer warpgroup."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as gemm.cuh lays it out.

        Stages, double-buffered staging of outputs, partials of a cluster, mbarriers, alignment.
        """
        stage = self.span * (2 * CHUNK_K * self.tokens + self.warpgroups * CHUNK_BYTES)
        sums = 0 if self.cost.gather is None else 4 * self.rows * self.tokens
        return self.stages * stage + 2 * self.warpgroups * 32 * BLOCK_N * 2 + sums + self.stages * 16 + 16 + 1024

    def tiles(self, rows: int, features: int) -> int:
        """Return how many tiles cover M x N."""
        return ceil_div(features, self.rows) * ceil_div(rows, self.tokens)

    def even_tokens(self, rows: int) -> int:
        """Return the tokens of a tile, about equal for all tiles, so that TMA boxes hardly reach beyond x."""
        return ceil_div(rows, ceil_div(rows, self.tokens))

    def steps(self, depth: int) -> int:
        """Return the stages of K."""
        return ceil_div(depth, self.span * CHUNK_K)


# Costs: 2026-11-30, H200 (132 SMs), CUDA 13.0, cold L2, median of 5, fitted to 339 schedules at 56 sizes (N x K as in
# benchmarks/hopper_forms.py, 12288 x 2048 and 512 x 2048, M 32 to 512), then each within 12% to where choosing by them
# costs least: 0.2% on average, at most 4.5% (32 x 512 x 2048, which no GEMM serves). Three warpgroups read x less often
# and decode more at once; two divide small M better. More stages were slower, most at few tokens (20 against 10 at
# M=32: 6 to 15%). Configurations of 32 and 64 tokens with three warpgroups won by 0.1%. Again:
# python benchmarks/hopper_forms.py
# The time of a part at 96 tokens is newer, from 65 and 80 x 2048 x 4096 alone.
CONFIGS = {
    "gemm_t32": TileConfig(32, 2, 2, 6, Cost(2.77, 0.441, 0.589, 1.373, 0.115)),
    "gemm_t64": TileConfig(64, 2, 2, 7, Cost(2.99, 0.498, 0.927, 1.369, 0.257, 0.563)),
    "gemm_t96": TileConfig(96, 2, 1, 8, Cost(1.424, 0.311, 1.563, 2.197, 0.36)),
    "gemm_t128": TileConfig(128, 2, 1, 6, Cost(0.349, 0.391, 2.186, 2.597, 0.642)),
    "gemm_t128_r192": TileConfig(128, 3, 1, 7, Cost(0.0, 0.551, 2.1, 4.148, 0.279)),
    "gemm_t192": TileConfig(192, 2, 1, 7, Cost(0.0, 0.493, 3.366, 2.096, 0.502)),
    "gemm_t256": TileConfig(256, 2, 1, 5, Cost(0.0, 0.664, 3.14, 4.146, 0.927)),
}
_MOST_PARTS = 8
# Cluster size, and the share of the multiprocessors that such clusters can use: a cluster is inside one GPC, whose
# multiprocessors are not a multiple of four. H200, 64 blocks in fours at 64 x 2048 x 4096 (M x N x K)
# 8.2 us, 128 at 128 x 2048 x 4096 15.6.
_CLUSTERS = {2: 1.0, 4: 0.8}


@frozen
class Work:
    """A stream-K schedule: each of ``workers`` computes ``whole`` tiles alone, and an equal part of the other tiles.

    ``cluster`` blocks with one tile reduce it over DSMEM; otherwise partials go through global memory.
    """

    entry: str
    workers: int
    whole: int
    cluster: int = 1


@frozen
class Ranges:
    """The ranges of stages that workers split: one for all remaining tiles, or one for each tile.

    Each of the ``workers`` of a range has ``stages`` stages, and the first ``remainder`` of them one more.
    """

    workers: int
    stages: int
    remainder: int


def ranges_of(work: Work, rows: int, features: int, depth: int) -> Ranges:
    """Return the ranges of a schedule: one for each tile if all tiles have the same number of workers."""
    config = CONFIGS[work.entry]
    tiles, steps = config.tiles(rows, features), config.steps(depth)
    if work.whole == 0 and work.workers % tiles == 0:
        parts, units = work.workers // tiles, steps
    else:
        parts, units = work.workers, max(0, tiles - work.whole * work.workers) * steps
    return Ranges(parts, *divmod(units, parts))


@cache
def work_of(rows: int, features: int, depth: int, multiprocessors: int) -> Work:
    """Return configuration and schedule with the least estimated time for M, N, K on a number of multiprocessors."""
    every = [work for entry in CONFIGS for work in schedules_of(entry, rows, features, depth, multiprocessors)]
    return min(every, key=lambda work: estimated_us(work, rows, features, depth))


def schedules_of(entry: str, rows: int, features: int, depth: int, multiprocessors: int) -> Iterator[Work]:
    """Yield the schedules of a configuration: whole tiles, stream-K over all workers, or split-K of each tile."""
    config = CONFIGS[entry]
    tiles, steps = config.tiles(rows, features), config.steps(depth)
    if tiles > multiprocessors:
        yield Work(entry, multiprocessors, ceil_div(tiles, multiprocessors))
        yield Work(entry, multiprocessors, tiles // multiprocessors - 1)
        return
    yield Work(entry, min(multiprocessors, tiles * steps), 0)
    most = min(_MOST_PARTS, steps, multiprocessors // tiles)
    for parts in range(1, most + 1):
        yield Work(entry, tiles * parts, 0)
    if config.cost.gather is not None:
        for blocks, share in _CLUSTERS.items():
            if blocks <= steps and tiles * blocks <= share * multiprocessors:
                yield Work(entry, tiles * blocks, 0, blocks)


def estimated_us(work: Work, rows: int, features: int, depth: int) -> float:
    """Return the estimated time of a launch on an H200."""
    cost = CONFIGS[work.entry].cost
    each = (cost.launch, cost.stage, cost.unit, cost.share, cost.part, cost.gather or 0.0)
    return sum(us * count for us, count in zip(each, counts_of(work, rows, features, depth), strict=True))


def counts_of(work: Work, rows: int, features: int, depth: int) -> tuple[float, ...]:
    """Return how often each cost occurs for one worker.

    Launch, stages, work units, a split tile, its parts above two, and the reduction in a cluster.
    """
    config = CONFIGS[work.entry]
    tiles, steps = config.tiles(rows, features), config.steps(depth)
    alone = min(work.whole, ceil_div(tiles, work.workers))
    shared = max(0, tiles - work.whole * work.workers)
    stages = alone * steps + shared * steps / work.workers
    units_of_worker, parts = alone + ceil_div(shared, work.workers), 1
    if shared % work.workers:
        parts = ceil_div(work.workers, shared)
        units_of_worker += work.workers % shared > 0  # a range part that ends inside a tile starts another unit
    sharing = (0.0, 0.0, 1.0) if work.cluster > 1 else (float(parts > 1), float(max(0, parts - 2)), 0.0)
    return 1.0, stages, float(units_of_worker), *sharing
