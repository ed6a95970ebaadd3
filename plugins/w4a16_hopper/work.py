"""Which form of the Hopper GEMM serves a shape, and how its work is shared: the least estimated time.

The estimate is a sum over what one worker does. Its figures were fitted to measurements, see the table.
"""

from collections.abc import Iterator
from functools import cache

from kernel_muster.plugins._cuda.launching import ceil_div
from kernel_muster.plugins.w4a16_hopper.layout import BLOCK_N, CHUNK_BYTES, CHUNK_K
from kernel_muster.registry.values import frozen


@frozen
class Cost:
    """Microseconds: of a launch, a stage, a tile or part of one, sharing at all, and each part of a tile above two.

    ``gather`` is what sharing takes in a cluster, None for a form that has no place for the sums.
    """

    launch: float
    stage: float
    piece: float
    share: float
    part: float
    gather: float | None = None


@frozen
class Form:
    """One entry point (gemm.cu): tokens of a tile, consumer warpgroups of 64 rows each, chunks a stage, stages."""

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
        """Threads of a block: the producer's warpgroup is one more."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as gemm.cuh lays it out.

        Ring, staging of results in two places, sums of a cluster, barriers, alignment.
        """
        stage = self.span * (2 * CHUNK_K * self.tokens + self.warpgroups * CHUNK_BYTES)
        sums = 0 if self.cost.gather is None else 4 * self.rows * self.tokens
        return self.stages * stage + 2 * self.warpgroups * 32 * BLOCK_N * 2 + sums + self.stages * 16 + 16 + 1024

    def tiles(self, rows: int, features: int) -> int:
        """Return how many tiles cover M x N."""
        return ceil_div(features, self.rows) * ceil_div(rows, self.tokens)

    def even_tokens(self, rows: int) -> int:
        """Return the tokens of a tile, the same for all tiles as far as they can be: boxes hardly reach beyond x."""
        return ceil_div(rows, ceil_div(rows, self.tokens))

    def steps(self, depth: int) -> int:
        """Return how many stages K takes."""
        return ceil_div(depth, self.span * CHUNK_K)


# Costs: 2026-11-30, H200 (132 SMs), CUDA 13.0, cold L2, median of 5, fitted to 339 ways at 56 sizes (N x K as in
# benchmarks/hopper_forms.py, 12288 x 2048 and 512 x 2048, M 32 to 512), then each within 12% to where choosing by them
# loses least: 0.2% on average, at most 4.5% (32 x 512 x 2048, which no GEMM serves). Three warpgroups read x less often
# and decode more at once; two divide few rows better. More stages were slower, most at few tokens (20 against 10 at
# M=32: 6 to 15%). Forms of 32 and 64 tokens with three warpgroups won by 0.1%. Again: python benchmarks/hopper_forms.py
# What a part takes at 96 tokens is newer, from 65 and 80 x 2048 x 4096 alone.
FORMS = {
    "gemm_t32": Form(32, 2, 2, 6, Cost(2.77, 0.441, 0.589, 1.373, 0.115)),
    "gemm_t64": Form(64, 2, 2, 7, Cost(2.99, 0.498, 0.927, 1.369, 0.257, 0.563)),
    "gemm_t96": Form(96, 2, 1, 8, Cost(1.424, 0.311, 1.563, 2.197, 0.36)),
    "gemm_t128": Form(128, 2, 1, 6, Cost(0.349, 0.391, 2.186, 2.597, 0.642)),
    "gemm_t128_r192": Form(128, 3, 1, 7, Cost(0.0, 0.551, 2.1, 4.148, 0.279)),
    "gemm_t192": Form(192, 2, 1, 7, Cost(0.0, 0.493, 3.366, 2.096, 0.502)),
    "gemm_t256": Form(256, 2, 1, 5, Cost(0.0, 0.664, 3.14, 4.146, 0.927)),
}
_MOST_PARTS = 8
# Blocks of a cluster, and the share of the multiprocessors that clusters of so many reach: one lies inside a part of
# the device, whose multiprocessors are no multiple of four. H200, 64 blocks in fours at 64 x 2048 x 4096 (M x N x K)
# 8.2 us, 128 at 128 x 2048 x 4096 15.6.
_CLUSTERS = {2: 1.0, 4: 0.8}


@frozen
class Work:
    """Who computes what: each of ``workers`` takes ``whole`` tiles alone, and an equal share of what is left.

    ``cluster`` blocks that share a tile add it up over shared memory; else the device's memory is between them.
    """

    entry: str
    workers: int
    whole: int
    cluster: int = 1


@frozen
class Lines:
    """What workers share: one line of all stages that are left, or one for each tile.

    Each of the ``parts`` of a line has ``each`` stages, and the first ``rest`` of them one more.
    """

    parts: int
    each: int
    rest: int


def lines_of(work: Work, rows: int, features: int, depth: int) -> Lines:
    """Return the lines of a work: a tile's own where each tile has as many workers."""
    form = FORMS[work.entry]
    tiles, steps = form.tiles(rows, features), form.steps(depth)
    if work.whole == 0 and work.workers % tiles == 0:
        parts, units = work.workers // tiles, steps
    else:
        parts, units = work.workers, max(0, tiles - work.whole * work.workers) * steps
    return Lines(parts, *divmod(units, parts))


@cache
def work_of(rows: int, features: int, depth: int, multiprocessors: int) -> Work:
    """Return form and shares for M, N, K on so many multiprocessors: those of the least estimated time."""
    every = [work for entry in FORMS for work in ways(entry, rows, features, depth, multiprocessors)]
    return min(every, key=lambda work: estimated_us(work, rows, features, depth))


def ways(entry: str, rows: int, features: int, depth: int, multiprocessors: int) -> Iterator[Work]:
    """Yield the ways to share one form's tiles: not at all, evenly over all workers, or each tile in equal parts."""
    form = FORMS[entry]
    tiles, steps = form.tiles(rows, features), form.steps(depth)
    if tiles > multiprocessors:
        yield Work(entry, multiprocessors, ceil_div(tiles, multiprocessors))
        yield Work(entry, multiprocessors, tiles // multiprocessors - 1)
        return
    yield Work(entry, min(multiprocessors, tiles * steps), 0)
    most = min(_MOST_PARTS, steps, multiprocessors // tiles)
    for parts in range(1, most + 1):
        yield Work(entry, tiles * parts, 0)
    if form.cost.gather is not None:
        for blocks, share in _CLUSTERS.items():
            if blocks <= steps and tiles * blocks <= share * multiprocessors:
                yield Work(entry, tiles * blocks, 0, blocks)


def estimated_us(work: Work, rows: int, features: int, depth: int) -> float:
    """Return about how long a launch takes on an H200."""
    cost = FORMS[work.entry].cost
    each = (cost.launch, cost.stage, cost.piece, cost.share, cost.part, cost.gather or 0.0)
    return sum(us * count for us, count in zip(each, counts_of(work, rows, features, depth), strict=True))


def counts_of(work: Work, rows: int, features: int, depth: int) -> tuple[float, ...]:
    """Return how often each cost occurs to one worker.

    Launch, stages, pieces, sharing, parts of a tile above two, and sharing in a cluster.
    """
    form = FORMS[work.entry]
    tiles, steps = form.tiles(rows, features), form.steps(depth)
    alone = min(work.whole, ceil_div(tiles, work.workers))
    shared = max(0, tiles - work.whole * work.workers)
    stages = alone * steps + shared * steps / work.workers
    pieces, parts = alone + ceil_div(shared, work.workers), 1
    if shared % work.workers:
        parts = ceil_div(work.workers, shared)
        pieces += work.workers % shared > 0  # a share that ends inside a tile begins another
    sharing = (0.0, 0.0, 1.0) if work.cluster > 1 else (float(parts > 1), float(max(0, parts - 2)), 0.0)
    return 1.0, stages, float(pieces), *sharing
