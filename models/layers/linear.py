"""One projection ``out = x w^T``: x BF16 ``(M, K)``, w logical ``(N, K)``, out BF16 ``(M, N)``, given by the caller.

Policy selects the arm by M, and ``used`` counts each arm taken. Every kernel accumulates in FP32 and rounds once. M
rows of a GEMV are bit-identical to M times one row; a tile GEMM may differ from it in the last bit.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.families import Bf16Kernels, Tiers, Tiles
from kernel_muster.models.policy.bf16 import bf16_arm
from kernel_muster.models.policy.gemv import WIDEST_TIER, chunk_tier, gemv_chunks, gemv_tier, row_tiles
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.projection import covers_rows, projection_arm
from kernel_muster.models.policy.tile import GemmShape, choose_tile, reachable_tiles
from kernel_muster.models.weights.layout import PlannedWeight
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle

DECODE, TILE, HOPPER = "decode GEMV", "tile GEMM", "Hopper GEMM"


class Nvfp4Linear:
    """A projection with NVFP4 weights: GEMV tiers for few rows, GEMMs for more.

    The plan builds the copies for all reachable row counts: no transposed one if the Hopper GEMM serves. ``tiles_if``
    is the condition of the GEMM copies in a plan that cannot evaluate it.
    """

    def __init__(
        self, ctx: LayerContext, spec: WeightSpec, tiers: Tiers, tiles: Tiles, fused: Iterable[AnyHandle] = (),
        value: Any = None, tiles_if: str = "",
    ) -> None:  # fmt: skip
        there = [name for name, handle in tiles.items() if handle]
        n, k = spec.shape
        reached = reachable_tiles(n, k, there, ctx.levers)
        readers = {DECODE: [*tiers.values(), *fused]}
        for reason, names in ((TILE, reached - {"hopper"}), (HOPPER, reached & {"hopper"})):
            readers[reason] = [tiles[name] for name in tiles if name in names]
        conditions = {TILE: tiles_if, HOPPER: tiles_if}
        self.weight: PlannedWeight = ctx.planner.plan(spec, readers, value, conditions=conditions)
        self.tiers = {rows: handle for rows, handle in tiers.items() if self.weight.serves(handle)}
        self.tiles = {name: handle for name, handle in tiles.items() if self.weight.serves(handle)}
        self._looked_up = dict(tiers)  # with missing ones, which raise with their reason
        self.used: Counter[str] = Counter()
        self.levers = ctx.levers

    def has_tier(self, rows: int) -> bool:
        """Whether one GEMV launch serves M rows, of at most 16."""
        return gemv_tier(rows, self.tiers) is not None

    def covers(self, rows: int) -> bool:
        """Whether GEMVs serve M rows: one tier, the wide one, or chunks of 16."""
        return covers_rows(rows, self.tiers)

    def prefers_gemv(self, rows: int, phase: Phase) -> bool:
        """Whether policy leaves M rows to the GEMV tiers."""
        shape = GemmShape(rows, *self.weight.spec.shape)
        return projection_arm(shape, phase, self.tiers, self.tiles, self.levers) == "gemv"

    def forward(self, x: Any, out: Any, phase: Phase) -> None:
        """Project through the policy's arm: a tier, chunks of tiers, or a GEMM."""
        if self.prefers_gemv(x.shape[0], phase):
            self.gemv(x, out)
        else:
            self.gemm(x, out, phase)

    def gemv(self, x: Any, out: Any) -> None:
        """Project through GEMV tiers: in one launch if one covers all rows, else in chunks.

        NullKernelError if no available tier takes so few rows, UsageError if none was looked up.
        """
        start = 0
        for size in gemv_chunks(x.shape[0], self.tiers):
            tier = chunk_tier(size, self.tiers) or size
            handle = self._looked_up.get(tier)
            if handle is None:
                raise UsageError(f"{self.weight.spec.name}: no GEMV is looked up for {size} rows")
            handle(x=x[start : start + size], w=self.weight.copy_for(handle), out=out[start : start + size])
            self.used[f"gemv{tier}"] += 1
            start += size

    def gemm(self, x: Any, out: Any, phase: Phase) -> None:
        """Project all rows with one GEMM. Without one, through the GEMV tiers."""
        if x.shape[0] == 0:
            return
        if not self.tiles:  # a target without tile GEMMs still prefills
            self.gemv(x, out)
            return
        name = choose_tile(GemmShape(x.shape[0], *self.weight.spec.shape), phase, self.tiles, self.levers)
        handle = self.tiles[name]
        handle(x=x, w=self.weight.copy_for(handle), out=out)
        self.used[name] += 1


class Bf16Linear:
    """A projection with BF16 weights. ``plain`` are kernels launched elsewhere that read its rows directly."""

    def __init__(
        self, ctx: LayerContext, spec: WeightSpec, kernels: Bf16Kernels, value: Any = None,
        plain: Iterable[AnyHandle] = (),
    ) -> None:  # fmt: skip
        readers = {DECODE: [kernels.single, kernels.batchm], "GEMM": [kernels.gemm]}
        self.weight: PlannedWeight = ctx.planner.plan(spec, readers, value, {DECODE: plain})
        self.used: Counter[str] = Counter()
        self._kernels, self._levers = kernels, ctx.levers
        self.has_batch = self.weight.serves(kernels.batchm)  # a GEMV of 2 to 16 rows

    def has_tier(self, rows: int) -> bool:
        """Whether one GEMV launch serves M rows."""
        return rows <= 1 or (self.has_batch and rows <= WIDEST_TIER)

    def covers(self, rows: int) -> bool:
        """Whether GEMVs serve M rows, in chunks of 16."""
        return self.has_batch or rows <= 1

    def prefers_gemv(self, rows: int, phase: Phase) -> bool:
        """Whether policy leaves M rows to the GEMV."""
        return bf16_arm(rows, self.has_batch, self._levers) == "gemv"

    def forward(self, x: Any, out: Any, phase: Phase) -> None:
        """Project through the policy's arm."""
        if self.prefers_gemv(x.shape[0], phase):
            self.gemv(x, out)
        else:
            self.gemm(x, out, phase)

    def gemv(self, x: Any, out: Any) -> None:
        """Project through the GEMV, at most 16 rows in each launch. Several rows without such a kernel use the GEMM."""
        if not self.covers(x.shape[0]):
            self.gemm(x, out, "decode")
            return
        start = 0
        for size in row_tiles(x.shape[0], WIDEST_TIER):
            rows = slice(start, start + size)
            arm, handle = ("gemv", self._kernels.single) if size == 1 else ("batchm", self._kernels.batchm)
            self._launch(handle, arm, x[rows], out[rows])
            start += size

    def gemm(self, x: Any, out: Any, phase: Phase) -> None:
        """Project all rows with one GEMM."""
        if x.shape[0]:
            self._launch(self._kernels.gemm, "gemm", x, out)

    def _launch(self, handle: AnyHandle, arm: str, x: Any, out: Any) -> None:
        handle(x=x, w=self.weight.copy_for(handle), out=out)
        self.used[arm] += 1


Linear = Nvfp4Linear | Bf16Linear
