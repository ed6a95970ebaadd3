"""SwiGLU ``down(silu(gate x) * up x)``: the arithmetic shared by the dense FFN and the shared expert.

x and out are BF16 ``(M, H)``; gate, up and their product are rounded to BF16 ``(M, I)``, also where one launch makes
all three. Every dot product is FP32.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.families import Bf16Kernels, Tiers, Tiles
from kernel_muster.models.layers.linear import Bf16Linear, Linear, Nvfp4Linear
from kernel_muster.models.policy.gemv import gemv_tier
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.selection.handles import AnyHandle

# exact: one launch for gate and up, at most 3 rows; gemv: tiers; gemm: one GEMM over all rows; auto: by policy.
How = Literal["exact", "gemv", "gemm", "auto"]
_USER = "swiglu"


class SwiGlu:
    """Three projections and the activation between them. Without ``duals`` gate and up are launched one by one.

    ``fused`` are kernels of gate, up and activation in one, by the most rows that they serve.
    """

    def __init__(
        self, ctx: LayerContext, gate: Linear, up: Linear, down: Linear, duals: Mapping[int, AnyHandle],
        activation: AnyHandle, fused: Mapping[int, AnyHandle] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._scratch, self._duals, self._activation = ctx.scratch, duals, activation
        self._fused = {rows: handle for rows, handle in fused.items() if gate.weight.serves(handle)}
        self.gate, self.up, self.down = gate, up, down
        self.hidden, self.intermediate = down.weight.spec.shape
        self.used: Counter[str] = Counter()  # launches for gate and up
        size = 2 * ctx.max_rows * self.intermediate
        ctx.plan_scratch(_USER, "ffn.gate", size, (0, 1))
        ctx.plan_scratch(_USER, "ffn.up", size, (0, 1))
        ctx.plan_scratch(_USER, "ffn.act", size, (1, 2))

    def run(self, x: Any, out: Any, how: How, phase: Phase) -> None:
        """Compute ``out`` for all rows of x."""
        shape = (x.shape[0], self.intermediate)
        how = ("exact" if shape[0] <= 3 else "auto") if how == "auto" else how
        with self._scratch.lease("ffn.act", _USER, shape) as act:
            self._activated(x, act, how, phase)
            _project(self.down, act, out, how, phase)

    def covers(self, rows: int) -> bool:
        """Whether one tier of each projection serves these rows."""
        return all(linear.has_tier(rows) for linear in (self.gate, self.up, self.down))

    def prefers_gemv(self, rows: int, phase: Phase) -> bool:
        """Whether policy leaves these rows to one GEMV tier in each projection."""
        linears = (self.gate, self.up, self.down)
        return self.covers(rows) and all(linear.prefers_gemv(rows, phase) for linear in linears)

    def _activated(self, x: Any, act: Any, how: How, phase: Phase) -> None:
        """Compute ``act = silu(gate x) * up x``, in one launch where a kernel does it for these rows."""
        rows = x.shape[0]
        by_gemv = how in ("exact", "gemv") or (how == "auto" and self.prefers_gemv(rows, phase))
        tier = gemv_tier(rows, self._fused) if by_gemv else None
        if tier is not None:
            fused = self._fused[tier]
            fused(x=x, w_gate=self.gate.weight.copy_for(fused), w_up=self.up.weight.copy_for(fused), out=act)
            self.used[f"dual_silu{tier}"] += 1
            return
        with (
            self._scratch.lease("ffn.gate", _USER, act.shape) as gate,
            self._scratch.lease("ffn.up", _USER, act.shape) as up,
        ):
            self._gate_up(x, gate, up, how, phase)
            self._activation(gate=gate, up=up, out=act)

    def _gate_up(self, x: Any, gate: Any, up: Any, how: How, phase: Phase) -> None:
        dual = self._duals.get(x.shape[0]) if how == "exact" else None
        if dual is None:
            _project(self.gate, x, gate, how, phase)
            _project(self.up, x, up, how, phase)
            return
        w_a, w_b = self.gate.weight.copy_for(dual), self.up.weight.copy_for(dual)
        dual(x=x, w_a=w_a, w_b=w_b, out_a=gate, out_b=up)
        self.used[f"dual{x.shape[0]}"] += 1


def _project(linear: Linear, x: Any, out: Any, how: How, phase: Phase) -> None:
    if how == "auto":
        linear.forward(x, out, phase)
    elif how == "gemm":
        linear.gemm(x, out, phase)
    else:
        linear.gemv(x, out)


def nvfp4_swiglu(
    ctx: LayerContext, prefix: str, sizes: tuple[int, int], tiers: Tiers, duals: Tiers, tiles: Tiles,
    activation: AnyHandle, fused: Tiers = MappingProxyType({}), others: tuple[AnyHandle, AnyHandle] | None = None,
) -> SwiGlu:  # fmt: skip
    """Make one with NVFP4 weights ``<prefix>gate_proj``, ``up_proj`` ``(I, H)`` and ``down_proj`` ``(H, I)``.

    ``others`` read them too, but are launched elsewhere: a kernel of gate and up, and one of down.
    """
    hidden, intermediate = sizes
    up_reader, down_reader = ([], []) if others is None else ([others[0]], [others[1]])
    readers = [*duals.values(), *fused.values(), *up_reader]
    gate, up = (
        Nvfp4Linear(ctx, ctx.spec(f"{prefix}{name}", intermediate, hidden, "nvfp4"), tiers, tiles, readers)
        for name in ("gate_proj", "up_proj")
    )
    down = Nvfp4Linear(ctx, ctx.spec(f"{prefix}down_proj", hidden, intermediate, "nvfp4"), tiers, tiles, down_reader)
    return SwiGlu(ctx, gate, up, down, duals, activation, fused)


def bf16_swiglu(ctx: LayerContext, sizes: tuple[int, int], kernels: Bf16Kernels, activation: AnyHandle) -> SwiGlu:
    """Make one with BF16 weights."""
    hidden, intermediate = sizes
    gate = Bf16Linear(ctx, ctx.spec("gate_proj", intermediate, hidden, "bf16"), kernels)
    up = Bf16Linear(ctx, ctx.spec("up_proj", intermediate, hidden, "bf16"), kernels)
    down = Bf16Linear(ctx, ctx.spec("down_proj", hidden, intermediate, "bf16"), kernels)
    return SwiGlu(ctx, gate, up, down, {}, activation)
