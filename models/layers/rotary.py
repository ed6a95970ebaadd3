"""Rotary positions of queries and keys, and the fused launch between projections and cache."""

from typing import Any

import numpy as np
from kernel_muster.models.dims import AttentionDims, ModelDims, RopeDims
from kernel_muster.models.layers.context import LayerContext, needed
from kernel_muster.models.layers.families import fused_or_parts, is_of
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import KvCache
from kernel_muster.models.policy.attention import FRESH_HEAD_DIMS
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookups import Lookups

_YARN, _PLAIN, _MROPE = "rope is stretched by YaRN", "rope is not stretched by YaRN", "rope is interleaved mrope"
_NORMED = "queries and keys are normalised"
_GATED = "attention is gated"
#: The one input with more than one position for each token.
THREE = "tokens with three positions"
_FORWARD, _TOGETHER = ("rope", "rope_forward"), ("rope", "qk_norm_rope_append")
_APPEND = ("kv_cache", "kv_cache_append")
_PAGED, _FRESH = ("paged_decode", "paged_decode_attn"), ("paged_decode", "paged_decode_attn_fresh")
PAGED_GATED = ("paged_decode", "paged_decode_attn_gated")


class Rotary:
    """Turns heads ``(M, Hq, D)`` and ``(M, Hk, D)`` BF16 in place.

    A token of text has one position for time, height and width: for it mrope equals plain rope, bit for bit. Tokens
    with three positions need the interleaved kernel. Other layouts of mrope have no kernel and are refused.

    ``together`` is the fused kernel for heads of text. Plain rope is its replacement.
    """

    def __init__(self, ctx: LayerContext, dims: RopeDims | None, together: "NormTurnAppend | None" = None) -> None:
        self._dims, self._plain, self._mrope, self._yarn = dims, None, None, None
        if dims is None:
            return
        if dims.yarn is not None:
            self._yarn = ctx.kernels.kernel("rope", "rope_yarn", when=_YARN, reached_by="every pass")
        elif together is not None and together.applies:
            self._plain = together.turn
        else:
            self._plain = ctx.kernels.kernel(*_FORWARD, when=_PLAIN, reached_by="every pass")
        if dims.is_interleaved and dims.yarn is None:
            self._mrope = ctx.kernels.try_kernel("rope", "rope_mrope_interleaved", when=_MROPE, reached_by=THREE)

    def turn(self, q: Any, k: Any, positions: Any) -> None:
        """Turn by positions i32 ``(M,)``, or ``(3, M)`` of time, height and width."""
        dims = self._dims
        if dims is None:
            return
        positions = plain_positions(positions)
        shared = {"q": q, "k": k, "positions": positions, "rotary_dim": dims.rotary_dim, "theta": dims.theta}
        if positions.ndim == 2:
            self._turn_grid(dims, shared)
        elif self._yarn is not None and dims.yarn is not None:
            self._yarn(**shared, factor=dims.yarn.factor, original_context=dims.yarn.original_context)
        elif self._plain is not None:
            self._plain(**shared)

    def _turn_grid(self, dims: RopeDims, shared: dict[str, Any]) -> None:
        if self._mrope is None:
            raise UsageError("tokens have positions in height and width, but rope is no interleaved mrope")
        t, h, w = dims.sections
        self._mrope(**shared, section_t=t, section_h=h, section_w=w)


class NormTurnAppend:
    """Norms of queries and keys, their turn, and keys and values into the cache, with the bits of the parts.

    ``q_norm`` and ``k_norm`` are the weights of the norms, BF16 ``(D,)``. At decode, gated attention may be in the same
    launch.

    ``turn``, ``append`` and ``decode`` are kernels of one step. They serve where a launch of several steps is absent
    or does not suit: ``append`` for tokens with three positions, ``decode`` for attention without a gate.
    """

    def __init__(self, ctx: LayerContext, model: ModelDims, dims: AttentionDims, q_norm: Any, k_norm: Any) -> None:
        self.applies = dims.qk_norm and dims.rope is not None and dims.rope.yarn is None
        self._has_three = dims.rope is not None and dims.rope.is_interleaved
        self._kernel: AnyHandle | None = None
        self._attend: AnyHandle | None = None
        self.turn: AnyHandle | None = None
        self.append: AnyHandle | None = None
        self._weights = q_norm, k_norm
        self._constants: dict[str, Any] = {}
        self._look_up(ctx.kernels)
        self.decode = self._decode_kernel(ctx.kernels, dims)
        if not self.applies or dims.rope is None:
            return
        self._constants = {
            "eps": model.rms_eps, "weight_offset": model.norm_weight_offset,
            "rotary_dim": dims.rope.rotary_dim, "theta": dims.rope.theta,
        }  # fmt: skip

    def _look_up(self, kernels: Lookups) -> None:
        """Look up the fused launch between projections and cache, and then its parts."""
        when = f"{_NORMED}, {_PLAIN}"
        parts = (_FORWARD,) if self._has_three else (_FORWARD, _APPEND)
        if self.applies:
            found = fused_or_parts(kernels, (_TOGETHER,), parts, when=when, reached_by="prefill and verify")
            self._kernel = None if found.whole is None else found.whole[0]
            self.turn, self.append = found.parts[0], found.parts[-1]
        if self._has_three or not self.applies:
            reached_by = THREE if self.applies else "every pass"
            self.append = kernels.kernel(*_APPEND, reached_by=reached_by)

    def _decode_kernel(self, kernels: Lookups, dims: AttentionDims) -> AnyHandle | None:
        """Look up attention at decode: from projections on, with the gate, or alone. Return that of other cases."""
        if not dims.gated:
            return kernels.kernel(*_PAGED, reached_by="decode")
        behind = (PAGED_GATED, _PAGED)
        if self.applies and (kernels.target.is_cpu or dims.head_dim in FRESH_HEAD_DIMS):
            when = f"{_GATED}, {_NORMED}, {_PLAIN}"
            found = kernels.first_of(_FRESH, *behind, required=True, when=when, reached_by="decode")
            self._attend = found if is_of(found, _FRESH) else None
            if not self._has_three:
                return None if self._attend else found
            reached_by = f"decode of {THREE}"
        else:
            reached_by = "decode"
        return kernels.first_of(*behind, required=True, when=_GATED, reached_by=reached_by)

    def serves(self, positions: Any) -> bool:
        """Whether there is a kernel for these positions: one a token."""
        return bool(self._kernel) and positions.ndim == 1

    def attends(self, batch: Batch) -> bool:
        """Whether :meth:`attend` serves this batch: a decode step with one position for each token."""
        return bool(self._attend) and batch.phase == "decode" and batch.positions.ndim == 1

    def forward(self, q: Any, k: Any, v: Any, batch: Batch, cache: KvCache) -> None:
        """Turn projected ``q (M, Hq, D)`` in place, and put ``k`` and ``v (M, Hk, D)`` into their slots."""
        if self._kernel is None:
            raise UsageError("queries and keys have no kernel for their norms and their turn")
        self._kernel(q=q, k=k, v=v, **self._shared(batch, cache))

    def attend(self, q: Any, k: Any, v: Any, gate: Any, batch: Batch, cache: KvCache, out: Any) -> None:
        """Write gated attention of projected ``q (M, Hq, D)``, and put ``k`` and ``v (M, Hk, D)`` into their slots."""
        if self._attend is None:
            raise UsageError("queries and keys have no kernel that attends with them")
        self._attend(
            q=q, k=k, v=v, **self._shared(batch, cache), block_table=batch.block_table,
            context_lens=batch.context_lens, gate=gate, scale=q.shape[2] ** -0.5, out=out,
        )  # fmt: skip

    def _shared(self, batch: Batch, cache: KvCache) -> dict[str, Any]:
        q_weight, k_weight = (needed(weight, "norm") for weight in self._weights)
        return {
            "q_weight": q_weight, "k_weight": k_weight, "positions": batch.positions, "slots": batch.kv_slots,
            **self._constants, "k_cache": cache.k, "v_cache": cache.v,
        }  # fmt: skip


def plain_positions(positions: Any) -> Any:
    """Return one position a token, ``(M,)``, where the three of each are the same."""
    return positions[0] if positions.ndim == 2 and _is_text(positions) else positions


def _is_text(positions: Any) -> bool:
    # On a device this waits. Only callers with three positions a token pay for it.
    return bool(np.array_equal(positions[0], positions[1]) and np.array_equal(positions[0], positions[2]))
