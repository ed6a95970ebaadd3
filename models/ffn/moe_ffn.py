"""The MoE FFN: router, routed experts, and a shared expert for every token."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from kernel_muster.models.dims import MoeDims
from kernel_muster.models.ffn.moe_experts import Combine, Experts, Form, owned_range
from kernel_muster.models.ffn.moe_fused import FusedExperts
from kernel_muster.models.ffn.moe_kernels import SHARED, StepKernels
from kernel_muster.models.ffn.moe_router import Router
from kernel_muster.models.ffn.swiglu import nvfp4_swiglu
from kernel_muster.models.layers.context import LayerContext, needed, new_rows
from kernel_muster.models.layers.families import (
    GEMM_SWIGLU,
    batch_tiers,
    exact_tiers,
    looked_up,
    swiglu_tiers,
)
from kernel_muster.models.layers.ffn import forced_arm
from kernel_muster.models.layers.tiles import may_take_wide, tile_kernels
from kernel_muster.models.policy.ffn import MOE_ARMS, FfnArm, moe_arm
from kernel_muster.models.policy.gemv import row_tiles
from kernel_muster.models.policy.moe import FUSED_ROWS, moe_grouped_decode
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.launch.tape import on_side_stream

_USER = "moe"
# Arms that run router, experts and shared expert tile by tile. The others route and share over all rows at once.
_WHOLE_TILES: dict[FfnArm, int] = {"single": 1, "k2": 2, "k3": 3}
# Arms with two launches for a step's rows, if the kernels exist and the rows are few.
_FUSED_ARMS: tuple[FfnArm, ...] = (*_WHOLE_TILES, "batched")
_FORMS: dict[FfnArm, Form] = {"single": 1, "k2": 2, "k3": 3, "token_major": 1, "batched": 3, "atomic_c4": "atomic"}


class SharedExpert:
    """``out += sigmoid(x . gate) * swiglu(x)``: x, out BF16 ``(M, H)``, gate BF16 ``(H,)``."""

    def __init__(
        self, ctx: LayerContext, hidden: int, intermediate: int, step: StepKernels
    ) -> None:  # fmt: skip
        kernels = ctx.kernels
        silu_mul = kernels.kernel("moe", "moe_silu_mul", when=SHARED, reached_by=GEMM_SWIGLU)
        shapes = (intermediate, hidden), (hidden, intermediate)
        has_wide = may_take_wide(kernels, shapes)
        tiers = {**exact_tiers(kernels, SHARED), **batch_tiers(kernels, SHARED, has_wide)}
        fused, duals = swiglu_tiers(kernels, SHARED)
        tiles = tile_kernels(kernels, shapes, SHARED)
        self._gate_add, self._combine = step.gate_add, step.combine
        sizes = (hidden, intermediate)
        self.swiglu = nvfp4_swiglu(ctx, "shared_expert.", sizes, tiers, duals, tiles, silu_mul, fused, step.fused)
        self.gate = ctx.array("shared_expert_gate", hidden)
        self._scratch = ctx.scratch
        ctx.plan_scratch(_USER, "moe.shared", 2 * ctx.max_rows * hidden, (0, 6))

    @contextmanager
    def on_side_stream(self, x: Any, out: Any, phase: Phase) -> Iterator[Combine | None]:
        """Compute the shared expert on the side stream while the block fills ``out``. Then add it, gated.

        The block may call the yielded function as its last step: one launch combines the experts and adds.
        """
        with self._scratch.lease("moe.shared", _USER, x.shape) as shared:
            with on_side_stream() as side:
                self.swiglu.run(x, shared, "auto", phase)
            is_added = False
            added = {"x": x, "gate_weight": needed(self.gate, "shared_expert_gate"), "shared": shared, "out": out}

            def combine(y: Any, slots: Any, weights: Any) -> None:
                nonlocal is_added
                side.join()
                looked_up(self._combine, "results and shared expert")(y=y, slots=slots, weights=weights, **added)
                is_added = True

            try:
                yield combine if self._combine else None
            finally:  # later work may use the same buffers after a failure
                side.join()
            if not is_added:
                looked_up(self._gate_add, "the shared expert")(**added)


class MoeFfn:
    """BF16 rows ``(M, H)`` through top_k of E experts, weighted, plus the shared expert.

    With ``owned``, a range of the experts, it returns its part of the sum, rounded to BF16. The parts of all ranges add
    up to the whole. The owner of the first expert adds the shared expert. Every part routes over all experts, so all
    make the same choice.
    """

    is_none = False
    is_dense = False

    def __init__(self, ctx: LayerContext, hidden: int, moe: MoeDims, owned: range | None = None) -> None:
        self.router = Router(ctx, hidden, moe)
        mine = owned_range(moe, owned)
        is_whole, has_shared = len(mine) == moe.experts, moe.shared_intermediate > 0 and mine.start == 0
        forced = forced_arm(ctx, MOE_ARMS)
        is_grouped = moe_grouped_decode(1, ctx.levers, ctx.arch)
        step = StepKernels(
            ctx.kernels, moe, is_whole=is_whole, has_shared=has_shared, is_grouped=is_grouped, forced=forced
        )
        self.experts = Experts(ctx, hidden, moe, owned, step, forced == "atomic_c4")
        self.shared = SharedExpert(ctx, hidden, moe.shared_intermediate, step) if has_shared else None
        self.fused: FusedExperts | None = None
        if step.fused is not None and self.shared is not None:
            glu, gate = self.shared.swiglu, self.shared.gate
            self.fused = FusedExperts(ctx, moe, step.fused, self.router, self.experts, glu, gate)
        self._fused_rows = FUSED_ROWS if self.fused is not None and self.fused.is_available else 0
        self.arms: tuple[FfnArm, ...] = tuple(filter(self._is_there, MOE_ARMS))
        self._forced = forced if forced in self.arms else None
        self._levers, self._arch, self._moe, self._scratch = ctx.levers, ctx.arch, moe, ctx.scratch
        self.used: Counter[str] = Counter()
        ctx.plan_scratch(_USER, "moe.ids", 4 * ctx.max_rows * moe.top_k, (0, 6))
        ctx.plan_scratch(_USER, "moe.weights", 4 * ctx.max_rows * moe.top_k, (0, 6))

    def _is_there(self, arm: FfnArm) -> bool:
        """Whether the kernels of an arm were looked up. Batched rows may be too many for a step's two launches."""
        if arm == "atomic_c4":
            return bool(self.experts.atomic)
        has_pairs = self.experts.has_pairs
        return has_pairs or arm in ("grouped", "prefill") or (arm in _FUSED_ARMS and self._fused_rows > 0)

    @property
    def fp32_routing_active(self) -> bool:
        """Whether router logits stay in FP32."""
        return self.router.is_fp32

    def moe_grouped_decode_ok(self, rows: int) -> bool:
        """Whether decode of these rows is grouped."""
        return moe_grouped_decode(rows, self._levers, self._arch, fused_rows=self._fused_rows)

    def can_forward_km(self, rows: int) -> bool:
        """Return False: the batched GEMVs are for one dense FFN."""
        return False

    def arm(self, rows: int, phase: Phase) -> FfnArm:
        """Return the forced arm, or the one for these rows."""
        return self._forced or moe_arm(rows, phase, self.moe_grouped_decode_ok(rows), self._fused_rows)

    def forward(self, x: Any, phase: Phase, arm: FfnArm | None = None) -> Any:
        """Return the FFN of x through an arm. UsageError for an arm that experts lack."""
        chosen = self.arm(x.shape[0], phase) if arm is None else arm
        if chosen not in self.arms:
            raise UsageError(f"an MoE FFN has no arm {chosen!r} here; it has {', '.join(self.arms)}")
        out = new_rows(x, x.shape[1])
        start = 0
        for size in row_tiles(x.shape[0], _WHOLE_TILES.get(chosen, max(x.shape[0], 1))):
            self._pass(x[start : start + size], out[start : start + size], chosen, phase)
            start += size
        self.used[chosen] += 1
        return out

    def _pass(self, x: Any, out: Any, arm: FfnArm, phase: Phase) -> None:
        shape = (x.shape[0], self._moe.top_k)
        with (
            self._scratch.lease("moe.ids", _USER, shape, "i32") as ids,
            self._scratch.lease("moe.weights", _USER, shape, "f32") as weights,
        ):
            if arm in _FUSED_ARMS and self.fused is not None and x.shape[0] <= self._fused_rows:
                self.fused.compute(x, ids, weights, out)
                return
            shared = nullcontext() if self.shared is None else self.shared.on_side_stream(x, out, phase)
            with shared as combine:
                self.router.route(x, ids, weights)
                self.experts.compute(x, ids, weights, out, _FORMS.get(arm, "grouped"), combine)
