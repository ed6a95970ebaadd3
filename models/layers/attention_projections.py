"""The projections of full attention around its mixer: Q with its gate, K, V, and the gated output.

Activations are BF16 ``(M, features)``. The rows of all arms are cut into tiles that share one piece of scratch.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from kernel_muster.models.dims import AttentionDims, ModelDims
from kernel_muster.models.layers.attention_weights import AttentionLinears, fused_tile
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.families import batch_tiers, bf16_kernels, dual_tiers, exact_tiers, tile_kernels
from kernel_muster.models.layers.linear import Linear, Nvfp4Linear
from kernel_muster.models.policy.attention import QKV_TILE, QkvArm, qkv_arm
from kernel_muster.models.policy.gemv import gemv_tier, row_tiles
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.handles import AnyHandle
from kernel_muster.registry.values import frozen

_GATED, _NVFP4 = "attention is gated", "attention weights are NVFP4, stored or requantised"
_TILE, _WIDE, _GATE = "qkv.tile", "qkv.wide", "output.gate"
_Run = Callable[[Linear, Any, Any], None]


@frozen
class QkvRows:
    """Rows ``[Q | gate | K | V]`` of the projections, BF16, and views of their parts; gate is None if ungated."""

    rows: Any
    q: Any
    gate: Any | None
    k: Any
    v: Any


class AttentionProjections:
    """Handles, weights and arms of one layer's projections; every lookup is made here.

    ``requantises`` says whether MUSTER_FP4_PROJ_DECODE means this layer's BF16 weights.
    """

    def __init__(self, ctx: LayerContext, model: ModelDims, dims: AttentionDims, requantises: bool = True) -> None:
        kernels = ctx.kernels
        dense = bf16_kernels(kernels)
        stored = ctx.stored("q_proj", dims.quant)
        quantize = None
        if stored == "bf16" and requantises and ctx.levers.flag("MUSTER_FP4_PROJ_DECODE"):
            quantize = kernels.try_kernel(
                "quantize_nvfp4", "quantize_bf16_to_nvfp4",
                when="BF16 attention weights are requantised", requested_by="MUSTER_FP4_PROJ_DECODE",
            )  # fmt: skip
        self._qg: dict[int, AnyHandle] = {}
        self._dual: dict[int, AnyHandle] = {}
        if stored == "nvfp4" or quantize is not None:
            tiers = {**exact_tiers(kernels, _NVFP4), **batch_tiers(kernels, _NVFP4)}
            self._dual = dual_tiers(kernels, _NVFP4)
            if dims.gated:
                self._qg = {
                    1: kernels.kernel("w4a16_gemv", "w4a16_gemv_qg", when=f"{_GATED}, {_NVFP4}"),
                    2: kernels.kernel("w4a16_gemv", "w4a16_gemv_qg_batch2", when=f"{_GATED}, {_NVFP4}"),
                    3: kernels.kernel("w4a16_gemv", "w4a16_gemv_qg_batch3", when=f"{_GATED}, {_NVFP4}"),
                }
            tiles = tile_kernels(kernels, _NVFP4)
            # An FP4 x FP4 tile that nobody ships: manifests declare it. It gets an arm when one is measured.
            self.fp4_tile = kernels.try_kernel("w4a4", "w4a4_gemm_mfast", when=_NVFP4)
            self.linears = AttentionLinears.nvfp4(ctx, model.hidden, dims, tiers, tiles, self._qg, self._dual, quantize)
        else:
            self.linears = AttentionLinears.bf16(ctx, model.hidden, dims, dense)
        if dims.gated:
            self._split_qg = kernels.kernel("ssm_preprocess", "deinterleave_qg", when=_GATED)
            self._gate_one = kernels.kernel("residual_add", "sigmoid_gate_mul", when=_GATED)
            self._gate_rows = kernels.kernel("residual_add", "sigmoid_gate_mul_batched", when=_GATED)
        self.dims = dims
        self._levers = ctx.levers
        self._scratch = ctx.scratch
        self.used: Counter[str] = Counter()  # arms, and launches that serve two projections
        self._plan_scratch(ctx)

    def _plan_scratch(self, ctx: LayerContext) -> None:
        """Q and its gate need tile * 2 * q_dim, K and V tile * 2 * kv_dim; an arm's tile is 3 rows, or all of them."""
        for user, rows, step in ((_TILE, QKV_TILE, 0), (_WIDE, ctx.max_rows, 1)):
            ctx.plan_scratch(user, "attn.q", 4 * rows * self.dims.q_dim, (step, step))
            ctx.plan_scratch(user, "attn.kv", 4 * rows * self.dims.kv_dim, (step, step))
            ctx.plan_scratch(user, "attn.fused", 2 * rows * (self.dims.q_rows + 2 * self.dims.kv_dim), (step, step))
        ctx.plan_scratch(_GATE, "attn.gated", 2 * ctx.max_rows * self.dims.q_dim, (2, 2))

    def arm(self, rows: int, phase: Phase) -> QkvArm:
        """Return the arm of both the QKV and the output projection."""
        levers, linears = self._levers, self.linears.each
        has_tiers = all(isinstance(w, Nvfp4Linear) and gemv_tier(rows, w.tiers) is not None for w in linears)
        has_hopper = isinstance(self.linears.o, Nvfp4Linear) and "hopper" in self.linears.o.tiles
        wide_from = int(levers["MUSTER_W4A16_HOPPER_FROM"] or 0) if has_hopper else 0
        return qkv_arm(
            rows, phase, str(levers["MUSTER_QKV_ARM"]), has_tiers, int(levers["MUSTER_QKV_TIER_ROWS"] or 0), wide_from
        )

    def qkv(self, x: Any, phase: Phase, arm: QkvArm | None = None) -> QkvRows:
        """Project normalised rows ``x (M, H)``, tile by tile through one piece of scratch, scattered to rows."""
        chosen = self.arm(x.shape[0], phase) if arm is None else arm
        found = self._empty_rows(x)
        self.used[chosen] += 1
        start = 0
        for size in _tiles(chosen, x.shape[0]):
            self._project_tile(x[start : start + size], found.rows[start : start + size], chosen, phase)
            start += size
        return found

    def key_value(self, x: Any, phase: Phase) -> tuple[Any, Any]:
        """Project rows ``x (M, H)`` to keys and values ``(M, kv_dim)`` alone."""
        k, v = new_rows(x, self.dims.kv_dim), new_rows(x, self.dims.kv_dim)
        self.linears.k.forward(x, k, phase)
        self.linears.v.forward(x, v, phase)
        return k, v

    def output(self, attended: Any, gate: Any | None, phase: Phase, arm: QkvArm | None = None) -> Any:
        """Return ``o_proj(attended * sigmoid(gate))`` of ``(M, Q)``; gate is None if attention is not gated."""
        chosen = self.arm(attended.shape[0], phase) if arm is None else arm
        out = new_rows(attended, self.linears.o.weight.spec.shape[0])
        if gate is None:
            self._output(attended, out, chosen, phase)
            return out
        with self._scratch.lease("attn.gated", _GATE, attended.shape) as gated:
            multiply = self._gate_one if attended.shape[0] == 1 else self._gate_rows
            multiply(x=attended, gate=gate, out=gated)
            self._output(gated, out, chosen, phase)
        return out

    def _output(self, x: Any, out: Any, arm: QkvArm, phase: Phase) -> None:
        start = 0
        run = _runner(arm, phase)
        for size in _tiles(arm, x.shape[0]):
            run(self.linears.o, x[start : start + size], out[start : start + size])
            start += size

    def _empty_rows(self, x: Any) -> QkvRows:
        q_dim, kv_dim, q_rows = self.dims.q_dim, self.dims.kv_dim, self.dims.q_rows
        return self._views(new_rows(x, q_rows + 2 * kv_dim), q_dim, q_rows, kv_dim)

    def _views(self, rows: Any, q_dim: int, q_rows: int, kv_dim: int) -> QkvRows:
        gate = rows[:, q_dim:q_rows] if self.dims.gated else None
        k, v = rows[:, q_rows : q_rows + kv_dim], rows[:, q_rows + kv_dim :]
        return QkvRows(rows, rows[:, :q_dim], gate, k, v)

    def _project_tile(self, x: Any, rows: Any, arm: QkvArm, phase: Phase) -> None:
        size, dims = x.shape[0], self.dims
        user = _WIDE if size > QKV_TILE else _TILE
        into = self._views(rows, dims.q_dim, dims.q_rows, dims.kv_dim)
        if arm == "wide" and self.linears.fused is not None:
            self._project_fused(x, into, user, phase)
            return
        with (
            self._scratch.lease("attn.q", user, (2, size, dims.q_dim)) as q,
            self._scratch.lease("attn.kv", user, (2, size, dims.kv_dim)) as kv,
        ):
            run = _runner(arm, phase)
            is_exact = arm in ("single", "fused", "tiled", "per_seq")
            self._project_q(x, q[0], q[1], run, is_exact, user)
            self._project_kv(x, kv[0], kv[1], run, is_exact)
            scatter(into, q[0], q[1], kv[0], kv[1])

    def _project_fused(self, x: Any, into: QkvRows, user: str, phase: Phase) -> None:
        """Project Q, K and V with one GEMM over a copy that holds all their rows."""
        columns = self.dims.q_rows + 2 * self.dims.kv_dim
        with self._scratch.lease("attn.fused", user, (x.shape[0], columns)) as fused:
            fused_tile(self.linears).gemm(x, fused, phase)
            into.k[...] = fused[:, self.dims.q_rows : self.dims.q_rows + self.dims.kv_dim]
            into.v[...] = fused[:, self.dims.q_rows + self.dims.kv_dim :]
            if into.gate is None:
                into.q[...] = fused[:, : self.dims.q_rows]
            else:
                self._split(fused[:, : self.dims.q_rows], into.q, into.gate)

    def _project_q(self, x: Any, q: Any, gate: Any, run: _Run, is_exact: bool, user: str) -> None:
        handle = self._qg.get(x.shape[0]) if is_exact else None
        if handle is not None:
            w = self.linears.q.weight.copy_for(handle)
            handle(x=x, w=w, head_dim=self.dims.head_dim, out_q=q, out_gate=gate)
            self.used[f"qg{x.shape[0]}"] += 1
        elif not self.dims.gated:
            run(self.linears.q, x, q)
        else:
            with self._scratch.lease("attn.fused", user, (x.shape[0], self.dims.q_rows)) as fused:
                run(self.linears.q, x, fused)
                self._split(fused, q, gate)

    def _split(self, qg: Any, q: Any, gate: Any) -> None:
        """Split rows that alternate by head into query and gate."""
        self._split_qg(qg=qg, head_dim=self.dims.head_dim, out_q=q, out_gate=gate)

    def _project_kv(self, x: Any, k: Any, v: Any, run: _Run, is_exact: bool) -> None:
        handle = self._dual.get(x.shape[0]) if is_exact else None
        if handle is not None:
            w_a, w_b = self.linears.k.weight.copy_for(handle), self.linears.v.weight.copy_for(handle)
            handle(x=x, w_a=w_a, w_b=w_b, out_a=k, out_b=v)
            self.used[f"dual{x.shape[0]}"] += 1
        else:
            run(self.linears.k, x, k)
            run(self.linears.v, x, v)


def scatter(into: QkvRows, q: Any, gate: Any, k: Any, v: Any) -> None:
    """Copy one tile's contiguous results to its rows ``[Q | gate | K | V]``."""
    into.q[...], into.k[...], into.v[...] = q, k, v
    if into.gate is not None:
        into.gate[...] = gate


def _tiles(arm: QkvArm, rows: int) -> tuple[int, ...]:
    if arm == "per_seq":
        return row_tiles(rows, 1)
    return row_tiles(rows, max(rows, 1) if arm in ("wide", "tiers") else QKV_TILE)


def _runner(arm: QkvArm, phase: Phase) -> _Run:
    """Return how an arm runs one projection over one of its tiles."""
    if arm == "wide":
        return lambda linear, x, out: linear.gemm(x, out, phase)
    return lambda linear, x, out: linear.gemv(x, out)
