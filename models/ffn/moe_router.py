"""The router: scores every expert for every token, and chooses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kernel_muster.models.dims import MoeDims
from kernel_muster.models.layers.context import LayerContext

_USER, _FP32 = "router", "MUSTER_FP32_ROUTING"


class Router:
    """x BF16 ``(M, H)`` -> ids i32 ``(M, T)`` and weights f32 ``(M, T)`` that sum to 1.

    Logits are BF16, or FP32 with MUSTER_FP32_ROUTING. One kernel scores every row count: another accumulation order
    would flip near ties between decode and prefill.
    """

    def __init__(self, ctx: LayerContext, hidden: int, moe: MoeDims) -> None:
        kernels = ctx.kernels
        by = "rows that the two launches of a step do not take"
        if moe.router == "sigmoid":
            self._choose = kernels.kernel("moe", "moe_topk_sigmoid", when="the router is a sigmoid", reached_by=by)
        else:
            self._choose = kernels.kernel("moe", "moe_topk_softmax", when="the router is a softmax", reached_by=by)
        self.is_fp32 = ctx.levers.flag(_FP32)
        if self.is_fp32:
            gemm = kernels.try_kernel(
                "moe", "moe_router_logits_f32", when=f"{_FP32} is on", requested_by=_FP32, reached_by=_FP32
            )
        else:
            gemm = kernels.kernel("gemm", "dense_gemm_bf16", when=f"{_FP32} is off", reached_by="every router")
        self._logits, self._moe, self._scratch = gemm, moe, ctx.scratch
        self.weight = ctx.planner.plan(ctx.spec("router", moe.experts, hidden, "bf16"), {"router": [gemm]})
        ctx.plan_scratch(_USER, "moe.logits", 4 * ctx.max_rows * moe.experts, (0, 1))

    @contextmanager
    def scored(self, x: Any) -> Iterator[Any]:
        """Lend the logits ``(M, E)`` of every expert for each row of x."""
        dtype = "f32" if self.is_fp32 else "bf16"
        with self._scratch.lease("moe.logits", _USER, (x.shape[0], self._moe.experts), dtype) as logits:
            self._logits(x=x, w=self.weight.copy_for(self._logits), out=logits)
            yield logits

    def route(self, x: Any, ids: Any, weights: Any) -> None:
        """Choose top_k experts for each row of x."""
        with self.scored(x) as logits:
            self._choose(logits=logits, top_k=self._moe.top_k, out_ids=ids, out_weights=weights)
