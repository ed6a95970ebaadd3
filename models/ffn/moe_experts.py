"""The routed experts: weights NVFP4 ``(E, I, H)`` for gate and up, ``(E, H, I)`` for down.

Two paths give the same: pairwise (token by token, each reads its own experts) and grouped (slots sorted by expert, so
that each routed expert is read once). Slot ``m * T + t`` is choice t of token m; S = M * T.

A layer may own a range of the experts, as one of several ranks. Its ids count from the first one on, with -1 for
experts of others, and its result is its part of each token's sum.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

from kernel_muster.models.dims import MoeDims
from kernel_muster.models.ffn.moe_kernels import GROUPED, StepKernels, grouped_kernel
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.families import looked_up
from kernel_muster.models.layers.ffn import FFN_LEVER
from kernel_muster.models.policy.gemv import row_tiles
from kernel_muster.models.weights.layout import PlannedWeight
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle

_PAIR, _GROUP, _LOCAL = "experts.pairwise", "experts.grouped", "experts.local"
_DECODE, _GROUPED, _FUSED = "pairwise experts", "grouped experts", "experts of a step"
#: Tokens a pairwise tile, or a way to read each expert once.
Form = Literal[1, 2, 3, "grouped", "atomic"]
#: Returns results ``y (S, H)`` of ``slots (S,)`` to tokens, with weights ``(M, T)``, and adds further terms.
Combine = Callable[[Any, Any, Any], None]


def owned_range(moe: MoeDims, owned: range | None) -> range:
    """Return the experts that a layer owns, all by default. UsageError for an invalid range."""
    whole = range(moe.experts)
    if owned is None:
        return whole
    if owned.step != 1 or not owned or owned[0] not in whole or owned[-1] not in whole:
        raise UsageError(f"experts {owned}: expected a rising range that is not empty, within 0 to {moe.experts}")
    return owned


class Experts:
    """Handles and weights of both paths, for the experts that the layer owns.

    ``step`` are the pairwise kernels, and the step kernels that read the weights too but are launched elsewhere.
    """

    def __init__(
        self, ctx: LayerContext, hidden: int, moe: MoeDims, owned: range | None, step: StepKernels, is_atomic: bool
    ) -> None:  # fmt: skip
        kernels = ctx.kernels
        self.owned = owned_range(moe, owned)
        self._local_ids: AnyHandle | None = None
        if len(self.owned) < moe.experts:
            self._local_ids = kernels.kernel(
                "moe", "moe_local_ids", when="the layer owns a part of the experts", reached_by="every pass"
            )
        self._sort = kernels.kernel("moe", "moe_sort_by_expert", reached_by=GROUPED)
        self._gate_up = grouped_kernel(kernels, "gate_up", hidden)
        self._down = grouped_kernel(kernels, "down", moe.intermediate)
        self.atomic: AnyHandle | None = None
        if is_atomic:
            self.atomic = kernels.try_kernel(
                "moe_w4a16", "moe_w4a16_grouped_down_atomic_c4",
                when=f"{FFN_LEVER}=atomic_c4", requested_by=FFN_LEVER, reached_by=FFN_LEVER,
            )  # fmt: skip
        self._step = step
        self._moe, self._hidden, self._scratch = moe, hidden, ctx.scratch
        self._plan_weights(ctx)
        self._plan_scratch(ctx)

    @property
    def has_pairs(self) -> bool:
        """Whether experts in pairs were looked up."""
        return bool(self._step.pairs)

    def _plan_weights(self, ctx: LayerContext) -> None:
        moe, hidden, step = self._moe, self._hidden, self._step
        atomic = [] if self.atomic is None else [self.atomic]
        up_readers = {_DECODE: [pair[0] for pair in step.pairs.values()], _GROUPED: [self._gate_up]}
        down_readers = {_DECODE: [pair[1] for pair in step.pairs.values()], _GROUPED: [self._down, *atomic]}
        if step.fused is not None:
            up_readers[_FUSED], down_readers[_FUSED] = [step.fused[0]], [step.fused[1]]

        def plan(name: str, rows: int, columns: int, readers: Mapping[str, Iterable[AnyHandle]]) -> PlannedWeight:
            whole = WeightSpec(f"{ctx.label}.experts.{name}", (moe.experts, rows, columns), "nvfp4")
            if self._local_ids is None:
                return ctx.planner.plan(whole, readers)
            part = replace(whole, shape=(len(self.owned), rows, columns))
            return ctx.planner.plan(part, readers, _slice_of(ctx.planner.source.find(whole), self.owned))

        self.gate = plan("gate_proj", moe.intermediate, hidden, up_readers)
        self.up = plan("up_proj", moe.intermediate, hidden, up_readers)
        self.down = plan("down_proj", hidden, moe.intermediate, down_readers)

    def _plan_scratch(self, ctx: LayerContext) -> None:
        slots = ctx.max_rows * self._moe.top_k
        ctx.plan_scratch(_PAIR, "moe.act", 2 * 3 * self._moe.top_k * self._moe.intermediate, (0, 0))
        ctx.plan_scratch(_GROUP, "moe.slots", 4 * slots, (1, 4))
        ctx.plan_scratch(_GROUP, "moe.offsets", 4 * (len(self.owned) + 1), (1, 3))
        ctx.plan_scratch(_GROUP, "moe.work", 4 * 4 * len(self.owned), (1, 3))
        ctx.plan_scratch(_GROUP, "moe.act", 2 * slots * self._moe.intermediate, (2, 3))
        ctx.plan_scratch(_GROUP, "moe.sorted", 2 * slots * self._hidden, (3, 4))
        if self._local_ids is not None:
            ctx.plan_scratch(_LOCAL, "moe.local_ids", 4 * slots, (0, 4))

    def compute(self, x: Any, ids: Any, weights: Any, out: Any, form: Form, combine: Combine | None = None) -> None:
        """Compute ``out (M, H)`` in one form: by tiles of 1, 2 or 3 tokens, ``grouped`` or ``atomic``.

        The grouped form leaves its last step to ``combine``, if there is one. ``ids`` are those of all experts; of a
        range of experts ``out`` is the part of the sum that they have.
        """
        with ExitStack() as stack:
            if self._local_ids is not None:
                lease = self._scratch.lease("moe.local_ids", _LOCAL, ids.shape, "i32")
                local = stack.enter_context(lease)
                self._local_ids(ids=ids, first=self.owned.start, experts=len(self.owned), out=local)
                ids = local
            if isinstance(form, int):
                self._pairwise_tiles(x, ids, weights, out, form)
            else:
                self._grouped_rows(x, ids, weights, out, form == "atomic", combine)

    def _pairwise_tiles(self, x: Any, ids: Any, weights: Any, out: Any, widest: int) -> None:
        start = 0
        for size in row_tiles(x.shape[0], widest):
            rows = slice(start, start + size)
            pair = self._step.pair(size)
            if pair is None:
                raise UsageError(f"experts in pairs are not looked up here: {FFN_LEVER} asks for them")
            gate_up, down = pair
            shape = (size, self._moe.top_k, self._moe.intermediate)
            with self._scratch.lease("moe.act", _PAIR, shape) as act:
                w_gate, w_up = self.gate.copy_for(gate_up), self.up.copy_for(gate_up)
                gate_up(x=x[rows], ids=ids[rows], w_gate=w_gate, w_up=w_up, out=act)
                w_down = self.down.copy_for(down)
                down(h=act, ids=ids[rows], weights=weights[rows], w_down=w_down, out=out[rows])
            start += size

    def _grouped_rows(self, x: Any, ids: Any, weights: Any, out: Any, atomic: bool, combine: Combine | None) -> None:
        """Read each routed expert once. ``atomic`` sums in no fixed order."""
        moe, experts, slot_count = self._moe, len(self.owned), x.shape[0] * self._moe.top_k
        with ExitStack() as stack:

            def lease(buffer: str, shape: tuple[int, ...], dtype: str = "bf16") -> Any:
                return stack.enter_context(self._scratch.lease(buffer, _GROUP, shape, dtype))

            slots, offsets = lease("moe.slots", (slot_count,), "i32"), lease("moe.offsets", (experts + 1,), "i32")
            work = lease("moe.work", (experts, 4), "i32")
            self._sort(ids=ids, experts=experts, out_slots=slots, out_offsets=offsets, out_work=work)
            order = {"slots": slots, "offsets": offsets, "work": work}
            act = lease("moe.act", (slot_count, moe.intermediate))
            w_gate, w_up = self.gate.copy_for(self._gate_up), self.up.copy_for(self._gate_up)
            self._gate_up(x=x, w_gate=w_gate, w_up=w_up, **order, top_k=moe.top_k, out=act)
            if atomic:
                down = looked_up(self.atomic, "the atomic form")
                w_down = self.down.copy_for(down)
                down(h=act, w_down=w_down, **order, weights=weights, out=out)
                return
            y = lease("moe.sorted", (slot_count, self._hidden))
            self._down(h=act, w_down=self.down.copy_for(self._down), **order, out=y)
            if combine is not None:
                combine(y, slots, weights)
            else:
                unpermute = looked_up(self._step.unpermute, "results of grouped experts")
                unpermute(y=y, slots=slots, weights=weights, out=out)


def _slice_of(weight: Nvfp4Weight | None, owned: range) -> Nvfp4Weight | None:
    """Return some experts of a logical weight ``(E, N, K)``. None in a plan."""
    if weight is None:
        return None
    part = slice(owned.start, owned.stop)
    scales = weight.global_scale_decode[part]
    return Nvfp4Weight(weight.packed[part], weight.block_scale[part], scales, weight.layout)
