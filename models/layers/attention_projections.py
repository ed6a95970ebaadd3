"""The projections of full attention around its mixer: Q with its gate, K, V, and the gated output.

Activations are BF16 ``(M, features)``. Each arm cuts rows into tiles of its own size.
"""

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from kernel_muster.models.dims import AttentionDims, ModelDims
from kernel_muster.models.layers.attention_weights import AttentionLinears, fused_tile, projection_shapes
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.families import (
    Tiles,
    batch_tiers,
    bf16_kernels,
    dual_tiers,
    exact_tiers,
    fused_or_parts,
    looked_up,
)
from kernel_muster.models.layers.linear import Linear, Nvfp4Linear
from kernel_muster.models.layers.tiles import may_take_wide, tile_kernels
from kernel_muster.models.memory.memory import copy_rows
from kernel_muster.models.policy.attention import (
    QKV_TILE,
    QkvArm,
    QkvEdges,
    bf16_edges,
    cuts_tiles,
    qkv_arm,
    qkv_edges,
    tiers_reach_wide,
)
from kernel_muster.models.policy.gemv import WIDE_TIER, row_tiles
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.projection import hopper_from
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.values import frozen

GATED = "attention is gated"
_NOT_GATED = "attention is not gated"
_NVFP4, _BF16 = "attention weights are NVFP4, stored or requantised", "attention weights stay BF16"
_TILE, _WIDE, _GATE = "qkv.tile", "qkv.wide", "output.gate"
_Run = Callable[[Linear, Any, Any], None]


@frozen
class QkvRows:
    """The projections of M rows, each BF16 ``(M, features)`` without gaps; gate is None if ungated.

    Four arrays in place of one with rows ``[Q | gate | K | V]``: a tile's kernels write directly to their rows, without
    a later scatter.
    """

    q: Any
    gate: Any | None
    k: Any
    v: Any

    def tile(self, rows: slice) -> "QkvRows":
        """Return the views of some rows."""
        return QkvRows(self.q[rows], None if self.gate is None else self.gate[rows], self.k[rows], self.v[rows])


class AttentionProjections:
    """Handles, weights and arms of one layer's projections. Every lookup is made here.

    ``requantises``: MUSTER_FP4_PROJ_DECODE applies to this layer's BF16 weights. ``fewest_rows`` is the least M.
    """

    def __init__(
        self, ctx: LayerContext, model: ModelDims, dims: AttentionDims, requantises: bool = True, fewest_rows: int = 1
    ) -> None:  # fmt: skip
        kernels, asked = ctx.kernels, str(ctx.levers["MUSTER_QKV_ARM"])
        stored = ctx.stored("q_proj", dims.quant)
        quantize = None
        if stored == "bf16" and requantises and ctx.levers.flag("MUSTER_FP4_PROJ_DECODE"):
            quantize = kernels.try_kernel(
                "quantize_nvfp4", "quantize_bf16_to_nvfp4",
                when="BF16 attention weights are requantised", requested_by="MUSTER_FP4_PROJ_DECODE",
                reached_by="the load of weights",
            )  # fmt: skip
        self._qg: dict[int, AnyHandle] = {}
        self._dual: dict[int, AnyHandle] = {}
        self._qgkv: dict[int, AnyHandle] = {}  # all of a tile in one launch
        if stored == "nvfp4" or quantize is not None:
            shapes = projection_shapes(model.hidden, dims)
            has_wide = tiers_reach_wide(ctx.levers) or may_take_wide(kernels, shapes, ("prefill", "verify"))
            tiers = {**exact_tiers(kernels, _NVFP4), **batch_tiers(kernels, _NVFP4, has_wide)}
            tiles = tile_kernels(kernels, shapes, _NVFP4, fp4="w4a4_gemm_mfast")
            if dims.gated:
                self._tiles_in_one(kernels)
            elif cuts_tiles(fewest_rows, asked, _edges(ctx.levers, shapes[-1], tiles, has_wide)):
                self._dual = dual_tiers(kernels, f"{_NOT_GATED}, {_NVFP4}", reached_by="qkv_arm")
            q_readers, kv_readers = ([*own.values(), *self._qgkv.values()] for own in (self._qg, self._dual))
            self.linears = AttentionLinears.nvfp4(
                ctx, model.hidden, dims, tiers, tiles, q_readers, kv_readers, quantize
            )
            qkv = (self.linears.q, self.linears.k, self.linears.v)
            self._qgkv = {m: one for m, one in self._qgkv.items() if all(w.weight.serves(one) for w in qkv)}
        else:
            self.linears = AttentionLinears.bf16(ctx, model.hidden, dims, bf16_kernels(kernels, _BF16))
        if dims.gated:
            several = "qkv_arm: wide, tiers and own, or BF16 weights"
            self._split_qg = kernels.kernel("ssm_preprocess", "deinterleave_qg", when=GATED, reached_by=several)
            one, many = ("residual_add", "sigmoid_gate_mul"), ("residual_add", "sigmoid_gate_mul_batched")
            self._gate_one = kernels.kernel(*one, when=GATED, reached_by="prefill or verify of 1 row")
            self._gate_rows = kernels.kernel(*many, when=GATED, reached_by="prefill or verify of more rows")
        self.dims = dims
        self._levers = ctx.levers
        #: The value of MUSTER_QKV_ARM. A comparison may set another one on the same build, for later recordings.
        self.asked = asked
        self._scratch = ctx.scratch
        self.used: Counter[str] = Counter()  # arms, and launches for two projections
        self._plan_scratch(ctx)

    def _tiles_in_one(self, kernels: Lookups) -> None:
        """Look up the one launch for all projections of a tile, then that of Q with its gate, and that of K and V."""
        for rows, tail in ((1, ""), (2, "_batch2"), (3, "_batch3")):
            fused, *parts = (("w4a16_gemv", f"w4a16_gemv_{what}{tail}") for what in ("qgkv", "qg", "dual"))
            by = f"qkv_arm: {'1 row' if rows == 1 else f'{rows} rows'}, or a tile of that"
            found = fused_or_parts(kernels, (fused,), parts, when=f"{GATED}, {_NVFP4}", reached_by=by)
            if found.whole is not None:
                self._qgkv[rows] = found.whole[0]
                continue
            for handles, part in zip((self._qg, self._dual), found.parts, strict=True):
                handles[rows] = looked_up(part, f"a tile of {rows} rows")

    def _plan_scratch(self, ctx: LayerContext) -> None:
        """Only rows that stay fused need scratch: a tile of 3, or all of a wider arm."""
        for user, rows, step in ((_TILE, QKV_TILE, 0), (_WIDE, ctx.max_rows, 1)):
            ctx.plan_scratch(user, "attn.fused", 2 * rows * (self.dims.q_rows + 2 * self.dims.kv_dim), (step, step))
        ctx.plan_scratch(_GATE, "attn.gated", 2 * ctx.max_rows * self.dims.q_dim, (2, 2))

    def arm(self, rows: int, phase: Phase) -> QkvArm:
        """Return the arm of the QKV and the output projection; a comparison may have set another one."""
        linears = self.linears.each
        has_tiers = all(linear.covers(rows) for linear in linears)
        return qkv_arm(rows, phase, self.asked, has_tiers, self._edges())

    def _edges(self) -> QkvEdges:
        """Return the edges of these weights; Q, K and V in NVFP4 count as one."""
        linears = self.linears
        if not isinstance(linears.o, Nvfp4Linear):
            return bf16_edges(self._levers, linears.o.has_batch)
        features = sum(linear.weight.spec.shape[0] for linear in (linears.q, linears.k, linears.v))
        has_wide = isinstance(linears.q, Nvfp4Linear) and WIDE_TIER in linears.q.tiers
        return _edges(self._levers, (features, linears.q.weight.spec.shape[1]), linears.o.tiles, has_wide)

    def qkv(self, x: Any, phase: Phase, arm: QkvArm | None = None) -> QkvRows:
        """Project normalised rows ``x (M, H)``, tile by tile. Each tile writes its own rows of the result."""
        chosen = self.arm(x.shape[0], phase) if arm is None else arm
        dims = self.dims
        gate = new_rows(x, dims.q_dim) if dims.gated else None
        found = QkvRows(new_rows(x, dims.q_dim), gate, new_rows(x, dims.kv_dim), new_rows(x, dims.kv_dim))
        self.used[chosen] += 1
        if chosen in ("wide", "own") and self.linears.fused is not None:
            self._project_fused(x, found, phase)
            return found
        sizes = _tiles(chosen, x.shape[0])
        tiles = [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
        run, is_exact = _runner(chosen, phase), chosen in ("single", "fused", "tiled", "per_seq")
        for rows in tiles:
            if is_exact and self._project_all(x[rows], found.tile(rows)):
                continue
            self._project_q(x[rows], found.tile(rows), run, is_exact)
            self._project_kv(x[rows], found.k[rows], found.v[rows], run, is_exact)
        return found

    def key_value(self, x: Any, phase: Phase) -> tuple[Any, Any]:
        """Project rows ``x (M, H)`` to keys and values ``(M, kv_dim)`` alone."""
        k, v = new_rows(x, self.dims.kv_dim), new_rows(x, self.dims.kv_dim)
        self.linears.k.forward(x, k, phase)
        self.linears.v.forward(x, v, phase)
        return k, v

    def output(self, attended: Any, gate: Any | None, phase: Phase, arm: QkvArm | None = None) -> Any:
        """Return ``o_proj(attended * sigmoid(gate))`` of ``(M, Q)``; gate is None if absent or already applied."""
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

    def _project_fused(self, x: Any, into: QkvRows, phase: Phase) -> None:
        """Project Q, K and V with one GEMM over their common copy, and split the result."""
        q_rows, kv_dim = self.dims.q_rows, self.dims.kv_dim
        with self._scratch.lease("attn.fused", _user(x), (x.shape[0], q_rows + 2 * kv_dim)) as fused:
            fused_tile(self.linears).gemm(x, fused, phase)
            self._split(fused[:, :q_rows], into)
            copy_rows(into.k, fused[:, q_rows : q_rows + kv_dim])
            copy_rows(into.v, fused[:, q_rows + kv_dim :])

    def _project_all(self, x: Any, into: QkvRows) -> bool:
        """Project a tile in one launch. Without such a kernel, return False and do nothing."""
        handle = self._qgkv.get(x.shape[0])
        if handle is None:
            return False
        w, w_a, w_b = (linear.weight.copy_for(handle) for linear in (self.linears.q, self.linears.k, self.linears.v))
        outputs = {"out_q": into.q, "out_gate": into.gate, "out_a": into.k, "out_b": into.v}
        handle(x=x, w=w, w_a=w_a, w_b=w_b, head_dim=self.dims.head_dim, **outputs)
        self.used[f"qgkv{x.shape[0]}"] += 1
        return True

    def _project_q(self, x: Any, into: QkvRows, run: _Run, is_exact: bool) -> None:
        """Project a tile's queries. One row uses the kernel of n = 1 in every arm."""
        handle = self._qg.get(x.shape[0]) if is_exact else None
        if handle is not None:
            w = self.linears.q.weight.copy_for(handle)
            handle(x=x, w=w, head_dim=self.dims.head_dim, out_q=into.q, out_gate=into.gate)
            self.used[f"qg{x.shape[0]}"] += 1
        elif into.gate is None:
            run(self.linears.q, x, into.q)
        else:
            with self._scratch.lease("attn.fused", _user(x), (x.shape[0], self.dims.q_rows)) as fused:
                run(self.linears.q, x, fused)
                self._split(fused, into)

    def _split(self, qg: Any, into: QkvRows) -> None:
        """Split rows that alternate by head into query and gate."""
        if into.gate is None:
            copy_rows(into.q, qg)
        else:
            self._split_qg(qg=qg, head_dim=self.dims.head_dim, out_q=into.q, out_gate=into.gate)

    def _project_kv(self, x: Any, k: Any, v: Any, run: _Run, is_exact: bool) -> None:
        handle = self._dual.get(x.shape[0]) if is_exact else None
        if handle is not None:
            w_a, w_b = self.linears.k.weight.copy_for(handle), self.linears.v.weight.copy_for(handle)
            handle(x=x, w_a=w_a, w_b=w_b, out_a=k, out_b=v)
            self.used[f"dual{x.shape[0]}"] += 1
        else:
            run(self.linears.k, x, k)
            run(self.linears.v, x, v)


def _edges(levers: Levers, together: tuple[int, int], tiles: Tiles, has_wide: bool) -> QkvEdges:
    """Return the edges of NVFP4 projections, by the shape ``(N, K)`` of Q, K and V together."""
    return qkv_edges(levers, hopper_from(levers, *together, has_wide) if "hopper" in tiles else 0)


def _user(x: Any) -> str:
    return _WIDE if x.shape[0] > QKV_TILE else _TILE


def _tiles(arm: QkvArm, rows: int) -> tuple[int, ...]:
    if arm == "per_seq":
        return row_tiles(rows, 1)
    return row_tiles(rows, max(rows, 1) if arm in ("wide", "tiers", "own") else QKV_TILE)


def _runner(arm: QkvArm, phase: Phase) -> _Run:
    """Return how an arm runs one projection over one of its tiles."""
    if arm == "wide":
        return lambda linear, x, out: linear.gemm(x, out, phase)
    if arm == "own":
        return lambda linear, x, out: linear.forward(x, out, phase)
    return lambda linear, x, out: linear.gemv(x, out)
