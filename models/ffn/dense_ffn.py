"""The dense FFN: one SwiGLU for all tokens."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from kernel_muster.models.ffn.activation import activation_kernel
from kernel_muster.models.ffn.swiglu import How, SwiGlu, bf16_swiglu, nvfp4_swiglu
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.families import (
    GEMM_SWIGLU,
    Tiers,
    bf16_kernels,
    chunk_tiers,
    dual_tiers,
    exact_tiers,
    swiglu_tiers,
)
from kernel_muster.models.layers.ffn import forced_arm
from kernel_muster.models.layers.tiles import tile_kernels
from kernel_muster.models.policy.ffn import BATCHED_ROWS, DENSE_ARMS, KM_ROWS, FfnArm, dense_alias, dense_arm
from kernel_muster.models.policy.gemv import WIDEST_TIER, row_tiles
from kernel_muster.models.policy.phase import PHASES, Phase

_NVFP4, _BF16 = "FFN weights are NVFP4", "FFN weights are BF16"
# Rows of a tile in each arm (0: no tiles), and the kernel of a tile.
_ARMS: dict[FfnArm, tuple[int, How]] = {
    "single": (1, "exact"),
    "k2": (2, "exact"),
    "k3": (3, "exact"),
    "km": (KM_ROWS[-1], "gemv"),
    "batched": (WIDEST_TIER, "gemv"),
    "prefill": (0, "gemm"),
}


class DenseFfn:
    """``down(silu(gate x) * up x)`` for BF16 rows ``(M, H)``. Weights NVFP4, or BF16 in an unquantised model.

    ``fewest_rows`` is the least M of a pass: above 16 no GEMV is looked up, unless MUSTER_FFN_ARM requests one.
    ``phases`` are those of its passes.
    """

    is_none = False
    is_dense = True
    fp32_routing_active = False

    def __init__(
        self, ctx: LayerContext, hidden: int, intermediate: int, quant: str, activation: str = "silu",
        fewest_rows: int = 1, phases: Collection[Phase] = PHASES,
    ) -> None:  # fmt: skip
        quant = ctx.stored("gate_proj", quant)
        self._activation, self._phases = activation, phases
        self.arms: tuple[FfnArm, ...] = tuple(arm for arm in DENSE_ARMS if arm != "km" or quant == "nvfp4")
        self._forced = forced_arm(ctx, self.arms)
        self._has_few = fewest_rows <= WIDEST_TIER or self._forced not in (None, "prefill")
        make = self._nvfp4 if quant == "nvfp4" else self._bf16
        self.swiglu = make(ctx, hidden, intermediate)
        self.used: Counter[str] = Counter()

    def _nvfp4(self, ctx: LayerContext, hidden: int, intermediate: int) -> SwiGlu:
        kernels = ctx.kernels
        tiers: Tiers = {}
        fused: Tiers = {}
        duals: Tiers = {}
        if self._has_few:
            tiers = {**exact_tiers(kernels, _NVFP4), **chunk_tiers(kernels, _NVFP4)}
            if self._activation == "silu":
                fused, duals = swiglu_tiers(kernels, _NVFP4)
            else:
                duals = dual_tiers(kernels, _NVFP4, reached_by="dense_arm")
        shapes = (intermediate, hidden), (hidden, intermediate)
        tiles = tile_kernels(kernels, shapes, _NVFP4, fp4="w4a4_gemm", phases=self._phases)
        silu_mul = activation_kernel(kernels, self._activation, reached_by=GEMM_SWIGLU)
        return nvfp4_swiglu(ctx, "", (hidden, intermediate), tiers, duals, tiles, silu_mul, fused)

    def _bf16(self, ctx: LayerContext, hidden: int, intermediate: int) -> SwiGlu:
        dense = bf16_kernels(ctx.kernels, _BF16)
        silu_mul = activation_kernel(ctx.kernels, self._activation)
        return bf16_swiglu(ctx, (hidden, intermediate), dense, silu_mul)

    def moe_grouped_decode_ok(self, rows: int) -> bool:
        """Return False: there are no experts."""
        return False

    def can_forward_km(self, rows: int) -> bool:
        """Whether 4 to 8 rows have a batched GEMV tier for every projection, on NVFP4 weights."""
        return rows in KM_ROWS and "km" in self.arms and self.swiglu.covers(rows)

    def arm(self, rows: int, phase: Phase) -> FfnArm:
        """Return the forced arm, or the one for these rows."""
        if self._forced:
            return dense_alias(self._forced)
        has_batched = rows in BATCHED_ROWS and self.swiglu.prefers_gemv(rows, phase)
        return dense_arm(rows, phase, self.can_forward_km(rows), has_batched)

    def forward(self, x: Any, phase: Phase, arm: FfnArm | None = None) -> Any:
        """Return the FFN of x through an arm. Every arm serves every number of rows, in its own tiles."""
        rows = x.shape[0]
        chosen = self.arm(rows, phase) if arm is None else dense_alias(arm)
        widest, how = _ARMS[chosen]
        out = new_rows(x, self.swiglu.hidden)
        start = 0
        for size in row_tiles(rows, widest or max(rows, 1)):
            self.swiglu.run(x[start : start + size], out[start : start + size], how, phase)
            start += size
        self.used[chosen] += 1
        return out
