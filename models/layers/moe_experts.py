"""The routed experts: weights NVFP4 ``(E, I, H)`` for gate and up, ``(E, H, I)`` for down.

Two paths give the same: pairwise (token by token, each reads its own experts) and grouped (slots sorted by expert, so
that each routed expert is read once). Slot ``m * T + t`` is choice t of token m; S = M * T.
"""

from contextlib import ExitStack
from typing import Any

from kernel_muster.models.dims import MoeDims
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.policy.gemv import row_tiles
from kernel_muster.models.policy.moe import takes_k64
from kernel_muster.models.weights import WeightSpec

_PAIR, _GROUP = "experts.pairwise", "experts.grouped"
_DECODE, _GROUPED = "pairwise experts", "grouped experts"


class Experts:
    """Handles and weights of both paths."""

    def __init__(self, ctx: LayerContext, hidden: int, moe: MoeDims) -> None:
        kernels = ctx.kernels
        pair_up = kernels.kernel("moe_fused_batch2", "moe_fused_batch2_gate_up")
        pair_down = kernels.kernel("moe_fused_batch2", "moe_fused_batch2_down")
        three_up = kernels.kernel("moe_fused_batch3", "moe_fused_batch3_gate_up")
        three_down = kernels.kernel("moe_fused_batch3", "moe_fused_batch3_down")
        self._pairwise = {1: (pair_up, pair_down), 2: (pair_up, pair_down), 3: (three_up, three_down)}
        self._sort = kernels.kernel("moe", "moe_sort_by_expert")
        gate_up = kernels.kernel("moe_w4a16", "moe_w4a16_grouped_gate_up")
        down = kernels.kernel("moe_w4a16", "moe_w4a16_grouped_down")
        gate_up_k64 = kernels.try_kernel("moe_w4a16", "moe_w4a16_grouped_gate_up_k64")
        down_k64 = kernels.try_kernel("moe_w4a16", "moe_w4a16_grouped_down_k64")
        self._unpermute = kernels.kernel("moe", "moe_unpermute_reduce_indexed")
        self.atomic = kernels.try_kernel("moe_w4a16", "moe_w4a16_grouped_down_atomic_c4")
        self._gate_up = gate_up_k64 if takes_k64(hidden, bool(gate_up_k64)) else gate_up
        self._down = down_k64 if takes_k64(moe.intermediate, bool(down_k64)) else down
        self._moe, self._hidden, self._scratch = moe, hidden, ctx.scratch
        self._plan_weights(ctx)
        self._plan_scratch(ctx)

    def _plan_weights(self, ctx: LayerContext) -> None:
        moe, hidden = self._moe, self._hidden
        up_readers = {_DECODE: [pair[0] for pair in self._pairwise.values()], _GROUPED: [self._gate_up]}
        down_readers = {_DECODE: [pair[1] for pair in self._pairwise.values()], _GROUPED: [self._down, self.atomic]}

        def spec(name: str, rows: int, columns: int) -> WeightSpec:
            return WeightSpec(f"{ctx.label}.experts.{name}", (moe.experts, rows, columns), "nvfp4")

        self.gate = ctx.planner.plan(spec("gate_proj", moe.intermediate, hidden), up_readers)
        self.up = ctx.planner.plan(spec("up_proj", moe.intermediate, hidden), up_readers)
        self.down = ctx.planner.plan(spec("down_proj", hidden, moe.intermediate), down_readers)

    def _plan_scratch(self, ctx: LayerContext) -> None:
        slots = ctx.max_rows * self._moe.top_k
        ctx.plan_scratch(_PAIR, "moe.act", 2 * 3 * self._moe.top_k * self._moe.intermediate, (0, 0))
        ctx.plan_scratch(_GROUP, "moe.slots", 4 * slots, (1, 4))
        ctx.plan_scratch(_GROUP, "moe.offsets", 4 * (self._moe.experts + 1), (1, 3))
        ctx.plan_scratch(_GROUP, "moe.act", 2 * slots * self._moe.intermediate, (2, 3))
        ctx.plan_scratch(_GROUP, "moe.sorted", 2 * slots * self._hidden, (3, 4))
        ctx.plan_scratch(_GROUP, "moe.sum", 4 * ctx.max_rows * self._hidden, (3, 4))

    def pairwise(self, x: Any, ids: Any, weights: Any, out: Any, widest: int) -> None:
        """Compute ``out (M, H)`` in tiles of at most ``widest`` (1, 2 or 3) tokens."""
        start = 0
        for size in row_tiles(x.shape[0], widest):
            rows = slice(start, start + size)
            gate_up, down = self._pairwise[size]
            shape = (size, self._moe.top_k, self._moe.intermediate)
            with self._scratch.lease("moe.act", _PAIR, shape) as act:
                w_gate, w_up = self.gate.copy_for(gate_up), self.up.copy_for(gate_up)
                gate_up(x=x[rows], ids=ids[rows], w_gate=w_gate, w_up=w_up, out=act)
                w_down = self.down.copy_for(down)
                down(h=act, ids=ids[rows], weights=weights[rows], w_down=w_down, out=out[rows])
            start += size

    def grouped(self, x: Any, ids: Any, weights: Any, out: Any, atomic: bool = False) -> None:
        """Compute ``out (M, H)`` with each routed expert read once; ``atomic`` sums in no fixed order."""
        moe, slot_count = self._moe, x.shape[0] * self._moe.top_k
        with ExitStack() as stack:

            def lease(buffer: str, shape: tuple[int, ...], dtype: str = "bf16") -> Any:
                return stack.enter_context(self._scratch.lease(buffer, _GROUP, shape, dtype))

            slots, offsets = lease("moe.slots", (slot_count,), "i32"), lease("moe.offsets", (moe.experts + 1,), "i32")
            self._sort(ids=ids, experts=moe.experts, out_slots=slots, out_offsets=offsets)
            act = lease("moe.act", (slot_count, moe.intermediate))
            w_gate, w_up = self.gate.copy_for(self._gate_up), self.up.copy_for(self._gate_up)
            self._gate_up(x=x, w_gate=w_gate, w_up=w_up, slots=slots, offsets=offsets, top_k=moe.top_k, out=act)
            if atomic:
                total = lease("moe.sum", out.shape, "f32")
                total[...] = 0
                w_down = self.down.copy_for(self.atomic)
                self.atomic(h=act, w_down=w_down, slots=slots, offsets=offsets, weights=weights, out=total)
                out[...] = total
                return
            y = lease("moe.sorted", (slot_count, self._hidden))
            self._down(h=act, w_down=self.down.copy_for(self._down), slots=slots, offsets=offsets, out=y)
            self._unpermute(y=y, slots=slots, weights=weights, out=out)
