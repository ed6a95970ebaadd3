"""The experts of a step of a few rows: router's choice, chosen experts and shared expert in two launches."""

from contextlib import ExitStack
from typing import Any

from kernel_muster.models.dims import MoeDims
from kernel_muster.models.ffn.moe_experts import Experts
from kernel_muster.models.ffn.moe_router import Router
from kernel_muster.models.ffn.swiglu import SwiGlu
from kernel_muster.models.layers.context import LayerContext, needed
from kernel_muster.models.policy.moe import FUSED_ROWS
from kernel_muster.registry.selection.handles import AnyHandle

_USER = "experts.fused"


class FusedExperts:
    """Both launches, on the weights of the layer's router, experts and shared expert ``swiglu``."""

    def __init__(
        self, ctx: LayerContext, moe: MoeDims, kernels: tuple[AnyHandle, AnyHandle], router: Router, experts: Experts,
        swiglu: SwiGlu, gate: Any | None,
    ) -> None:  # fmt: skip
        self._gate_up, self._down = kernels
        self._router, self._experts, self._swiglu, self._gate = router, experts, swiglu, gate
        self._moe, self._scratch = moe, ctx.scratch
        up = (experts.gate, experts.up, swiglu.gate.weight, swiglu.up.weight)
        down = (experts.down, swiglu.down.weight)
        self.is_available = all(w.serves(self._gate_up) for w in up) and all(w.serves(self._down) for w in down)
        ctx.plan_scratch(_USER, "moe.act", 2 * FUSED_ROWS * moe.top_k * moe.intermediate, (1, 1))
        ctx.plan_scratch(_USER, "moe.shared_act", 2 * FUSED_ROWS * moe.shared_intermediate, (0, 1))
        ctx.plan_scratch(_USER, "moe.gate", 4 * FUSED_ROWS, (0, 1))

    def compute(self, x: Any, ids: Any, weights: Any, out: Any) -> None:
        """Fill ``out (M, H)``; ids i32 and weights f32 ``(M, T)`` take the router's choice."""
        rows, moe, experts, swiglu = x.shape[0], self._moe, self._experts, self._swiglu
        gate_up, down = self._gate_up, self._down
        with ExitStack() as stack:

            def lease(buffer: str, shape: tuple[int, ...], dtype: str = "bf16") -> Any:
                return stack.enter_context(self._scratch.lease(buffer, _USER, shape, dtype))

            act = lease("moe.act", (rows, moe.top_k, moe.intermediate))
            shared, gate = lease("moe.shared_act", (rows, moe.shared_intermediate)), lease("moe.gate", (rows,), "f32")
            with self._router.scored(x) as logits:
                gate_up(
                    x=x,
                    logits=logits,
                    w_gate=experts.gate.copy_for(gate_up),
                    w_up=experts.up.copy_for(gate_up),
                    shared_gate=swiglu.gate.weight.copy_for(gate_up),
                    shared_up=swiglu.up.weight.copy_for(gate_up),
                    gate_weight=needed(self._gate, "shared_expert_gate"),
                    out_ids=ids,
                    out_weights=weights,
                    out=act,
                    out_shared=shared,
                    out_gate=gate,
                )
            w_down, shared_down = experts.down.copy_for(down), swiglu.down.weight.copy_for(down)
            routed = {"h": act, "ids": ids, "weights": weights, "w_down": w_down}
            down(**routed, h_shared=shared, gate=gate, shared_down=shared_down, out=out)
