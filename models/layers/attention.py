"""Full attention: norms, projections, rotary positions, paged cache and paged attention.

Activations are BF16 ``(M, features)``. Keys and values lie in the caller's cache. Softmax and sums are FP32, see the
contracts. With GEMV projections, a row of a verify pass is bit-identical to the decode step of its prefix, and so is a
row of a prefill with row-by-row attention. Attention in tiles of rows rounds its weights to BF16.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.models.dims import AttentionDims, ModelDims
from kernel_muster.models.layers.attention_projections import AttentionProjections, QkvRows
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.families import is_of, looked_up
from kernel_muster.models.layers.norm import RmsNorm
from kernel_muster.models.layers.rotary import PAGED_GATED, NormTurnAppend, Rotary, plain_positions
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import KvCache
from kernel_muster.models.policy.attention import MMA_HEAD_DIMS, PREFILL_MMA_ROWS, PrefillArm, prefill_arm
from kernel_muster.registry.selection.handles import AnyHandle

__all__ = ["Attention", "BlockAttention", "QkvRows"]


class HeadAttention(AttentionProjections):
    """Norms, heads and each row's own context, kernel by kernel.

    ``rotary``, ``_append`` and ``_decode`` are looked up by the classes on top.
    """

    rotary: Rotary
    _append: AnyHandle | None
    _decode: AnyHandle | None

    def __init__(
        self, ctx: LayerContext, model: ModelDims, dims: AttentionDims, requantises: bool = True, fewest_rows: int = 1
    ) -> None:  # fmt: skip
        kernels = ctx.kernels
        rms_norm = kernels.kernel("norm", "rms_norm", reached_by="every pass")
        rms_norm_residual = kernels.kernel("norm", "rms_norm_residual", reached_by="every pass")
        super().__init__(ctx, model, dims, requantises, fewest_rows)

        def norm(weight: Any) -> RmsNorm:
            return RmsNorm(rms_norm, rms_norm_residual, weight, model.rms_eps, model.norm_weight_offset)

        self.input_norm = norm(ctx.array("input_norm", model.hidden))
        self.post_norm = norm(ctx.array("post_norm", model.hidden))
        self._q_weight = ctx.array("q_norm", dims.head_dim) if dims.qk_norm else None
        self._k_weight = ctx.array("k_norm", dims.head_dim) if dims.qk_norm else None
        self._q_norm = norm(self._q_weight) if dims.qk_norm else None
        self._k_norm = norm(self._k_weight) if dims.qk_norm else None
        self.scale = dims.head_dim**-0.5

    def attend_each(self, q: Any, cache: KvCache, block_table: Any, context_lens: Any) -> Any:
        """Attend with each row ``q (M, Hq, D)`` to a context of its own."""
        attended = np.empty_like(q)
        looked_up(self._decode, "attention at decode")(
            q=q, k_cache=cache.k, v_cache=cache.v, block_table=block_table, context_lens=context_lens,
            scale=self.scale, out=attended,
        )  # fmt: skip
        return attended

    def append(self, cache: KvCache, k: Any, v: Any, slots: Any) -> None:
        """Put keys ``(M, Hk, D)`` and values ``(M, kv_dim)`` into their slots."""
        append = looked_up(self._append, "keys and values")
        append(k=k, v=v.reshape(k.shape), slots=slots, k_cache=cache.k, v_cache=cache.v)

    def queries(self, q: Any) -> Any:
        """Return projected queries ``(M, q_dim)`` as heads ``(M, Hq, D)``, normalised if the model does that."""
        return self._heads(q, self._q_norm)

    def keys(self, k: Any) -> Any:
        """Return projected keys ``(M, kv_dim)`` as heads ``(M, Hk, D)``, normalised if the model does that."""
        return self._heads(k, self._k_norm)

    def _heads(self, rows: Any, norm: RmsNorm | None) -> Any:
        by_head = (rows.shape[0], rows.shape[1] // self.dims.head_dim, self.dims.head_dim)
        if norm is None:
            return rows.reshape(by_head)
        flat = rows.reshape(-1, self.dims.head_dim)
        heads = np.empty_like(flat)
        norm.forward(flat, heads)
        return heads.reshape(by_head)


class BlockAttention(HeadAttention):
    """Attention of rows with one context each, as in a drafter's block of ``fewest_rows`` rows."""

    def __init__(self, ctx: LayerContext, model: ModelDims, dims: AttentionDims, fewest_rows: int = 1) -> None:
        super().__init__(ctx, model, dims, fewest_rows=fewest_rows)
        self.rotary = Rotary(ctx, dims.rope)
        self._append = ctx.kernels.kernel("kv_cache", "kv_cache_append", reached_by="every pass")
        self._decode = ctx.kernels.kernel("paged_decode", "paged_decode_attn", reached_by="every pass")


class Attention(HeadAttention):
    """One layer's mixer, with all its lookups here or in its parts."""

    def __init__(self, ctx: LayerContext, model: ModelDims, dims: AttentionDims, requantises: bool = True) -> None:
        kernels = ctx.kernels
        super().__init__(ctx, model, dims, requantises)
        self._residual_add: AnyHandle | None = None
        if not model.has_ffn:
            self._residual_add = kernels.kernel(
                "residual_add", "bf16_residual_add", when="there is no FFN", reached_by="every pass"
            )
        self._together = NormTurnAppend(ctx, model, dims, self._q_weight, self._k_weight)
        self.rotary = Rotary(ctx, dims.rope, self._together)
        self._append, self._decode = self._together.append, self._together.decode
        self._is_decode_gated = self._decode is not None and is_of(self._decode, PAGED_GATED)
        by_row = kernels.kernel("prefill_paged", "prefill_paged_attn", reached_by="prefill_arm: few rows, and verify")
        self._prefill: dict[PrefillArm, AnyHandle] = {"rows": by_row}
        if dims.head_dim in MMA_HEAD_DIMS and not ctx.levers.flag("MUSTER_NO_PREFILL_MMA"):
            self._prefill["mma"] = kernels.try_kernel(
                "prefill_paged", "prefill_paged_attn_mma", reached_by=f"prefill_arm: {PREFILL_MMA_ROWS.value} rows on",
                when="heads have 128 or 256 values, MUSTER_NO_PREFILL_MMA is off",
            )  # fmt: skip

    def forward(self, x: Any, batch: Batch, cache: KvCache) -> Any:
        """Return the mixed rows ``(M, H)`` of normalised rows x, and store their keys and values in the cache."""
        rows = self.qkv(x, batch.phase)
        attended, gate = self._attend(rows, batch, cache)
        return self.output(attended.reshape(x.shape[0], self.dims.q_dim), gate, batch.phase)

    def _attend(self, rows: QkvRows, batch: Batch, cache: KvCache) -> tuple[Any, Any | None]:
        """Return attended heads ``(M, Hq, D)``, and the gate unless already applied. Store the tokens in the cache."""
        batch = replace(batch, positions=plain_positions(batch.positions))
        gate, is_decode = rows.gate, batch.phase == "decode"
        attended = np.empty_like(rows.q).reshape(rows.q.shape[0], self.dims.q_heads, self.dims.head_dim)
        if gate is not None and self._together.attends(batch):
            q, k, v = self._by_head(rows)
            self._together.attend(q, k, v, gate.reshape(q.shape), batch, cache, attended)
            return attended, None
        q = self._placed(rows, batch, cache)
        if is_decode and gate is not None and self._is_decode_gated:
            looked_up(self._decode, "attention at decode")(
                q=q, k_cache=cache.k, v_cache=cache.v, block_table=batch.block_table, context_lens=batch.context_lens,
                gate=gate.reshape(q.shape), scale=self.scale, out=attended,
            )  # fmt: skip
            return attended, None
        if is_decode:
            return self.attend_each(q, cache, batch.block_table, batch.context_lens), gate
        self._prefill[self.prefill_arm(batch)](
            q=q, k_cache=cache.k, v_cache=cache.v, block_table=batch.block_table, cu_rows=batch.cu_rows,
            context_lens=batch.context_lens, scale=self.scale, out=attended,
        )  # fmt: skip
        return attended, gate

    def _by_head(self, rows: QkvRows) -> tuple[Any, ...]:
        """Return projected queries, keys and values as heads ``(M, H, D)``."""
        dims = self.dims
        heads = (dims.q_heads, dims.kv_heads, dims.kv_heads)
        parts = zip((rows.q, rows.k, rows.v), heads, strict=True)
        return tuple(part.reshape(part.shape[0], count, dims.head_dim) for part, count in parts)

    def _placed(self, rows: QkvRows, batch: Batch, cache: KvCache) -> Any:
        """Return the queries ``(M, Hq, D)`` of attention, and store keys and values in the cache."""
        if self._together.serves(batch.positions):
            q, k, v = self._by_head(rows)
            self._together.forward(q, k, v, batch, cache)
            return q
        q, k = self.queries(rows.q), self.keys(rows.k)
        self.rotary.turn(q, k, batch.positions)
        self.append(cache, k, rows.v, batch.kv_slots)
        return q

    def prefill_arm(self, batch: Batch) -> PrefillArm:
        """Return the attention arm for a batch of prompts, or of rows to verify."""
        return prefill_arm(batch.rows, batch.phase, self.dims.head_dim, bool(self._prefill.get("mma")))

    def leave(self, mixed: Any, residual: Any) -> None:
        """Add the result of a layer without FFN to the residual."""
        looked_up(self._residual_add, "a layer without FFN")(x=mixed, residual=residual)
