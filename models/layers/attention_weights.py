"""The four projections of attention, from stored weights: NVFP4, BF16, or BF16 requantised."""

from collections.abc import Sequence
from typing import Any

from kernel_muster.models.dims import AttentionDims
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.families import Bf16Kernels, Tiers, Tiles
from kernel_muster.models.layers.linear import Bf16Linear, Linear, Nvfp4Linear
from kernel_muster.models.layers.requantise import requantise
from kernel_muster.models.weights.source import fuse_rows
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.values import frozen

_INPUTS = ("q_proj", "k_proj", "v_proj")
#: The condition for the copies of Q, K and V for tile GEMMs.
APART = "if the global scales of q_proj, k_proj and v_proj differ: equal ones share one copy, qkv_proj"


def _shapes(hidden: int, dims: AttentionDims) -> dict[str, tuple[int, int]]:
    return {
        "q_proj": (dims.q_rows, hidden),
        "k_proj": (dims.kv_dim, hidden),
        "v_proj": (dims.kv_dim, hidden),
        "o_proj": (hidden, dims.q_dim),
    }


def projection_shapes(hidden: int, dims: AttentionDims) -> tuple[tuple[int, int], ...]:
    """Return ``(N, K)`` of each projection, and of Q, K and V together, which may share a copy."""
    return (*_shapes(hidden, dims).values(), (dims.q_rows + 2 * dims.kv_dim, hidden))


@frozen
class AttentionLinears:
    """Q (with the gate's rows, per head), K, V and output projections. ``fused`` holds Q, K and V for tile GEMMs."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    fused: Nvfp4Linear | None = None

    @property
    def each(self) -> tuple[Linear, ...]:
        """The four projections."""
        return self.q, self.k, self.v, self.o

    @classmethod
    def bf16(cls, ctx: LayerContext, hidden: int, dims: AttentionDims, kernels: Bf16Kernels) -> "AttentionLinears":
        """Keep BF16 weights as they are."""
        shapes = _shapes(hidden, dims)
        q, k, v, o = (Bf16Linear(ctx, ctx.spec(name, *shape, "bf16"), kernels) for name, shape in shapes.items())
        return cls(q, k, v, o)

    @classmethod
    def nvfp4(
        cls, ctx: LayerContext, hidden: int, dims: AttentionDims, tiers: Tiers, tiles: Tiles,
        q_readers: Sequence[AnyHandle], kv_readers: Sequence[AnyHandle], quantize: AnyHandle | None,
    ) -> "AttentionLinears":  # fmt: skip
        """Take NVFP4 weights, requantised from BF16 with ``quantize``.

        ``q_readers`` and ``kv_readers`` are kernels of several projections that also read Q, or K and V. Q, K and V
        share one copy for tile GEMMs if their global scales are equal (one GEMM with many blocks instead of three, two
        of them tiny). Otherwise each has its own.
        """
        shapes = _shapes(hidden, dims)
        values = {name: _value(ctx, name, shape, quantize) for name, shape in shapes.items()}
        inputs = [value for name in _INPUTS if (value := values[name]) is not None]
        whole = fuse_rows(inputs)
        own_tiles: Tiles = {} if whole is not None else tiles

        def make(name: str, tiles: Tiles, readers: Sequence[AnyHandle] = ()) -> Nvfp4Linear:
            spec = ctx.spec(name, *shapes[name], "nvfp4")
            # Values decide about fusion. A plan has none, and counts separate copies: as many bytes.
            condition = APART if name in _INPUTS and values[name] is None else ""
            return Nvfp4Linear(ctx, spec, tiers, tiles, readers, values[name], condition)

        fused = None
        if whole is not None:
            fused = Nvfp4Linear(
                ctx, ctx.spec("qkv_proj", dims.q_rows + 2 * dims.kv_dim, hidden, "nvfp4"), {}, tiles, value=whole
            )
        q, o = make("q_proj", own_tiles, q_readers), make("o_proj", tiles)
        k, v = (make(name, own_tiles, kv_readers) for name in ("k_proj", "v_proj"))
        return cls(q, k, v, o, fused)


def _value(ctx: LayerContext, name: str, shape: tuple[int, int], quantize: AnyHandle | None) -> Any | None:
    """Return the NVFP4 weight, or None in a plan."""
    if quantize is None:
        return ctx.planner.source.find(ctx.spec(name, *shape, "nvfp4"))
    stored = ctx.planner.source.find(ctx.spec(name, *shape, "bf16"))
    return None if stored is None else requantise(quantize, stored)


def fused_tile(linears: AttentionLinears) -> Nvfp4Linear:
    """Return the fused projection of Q, K and V. UsageError if there is none."""
    if linears.fused is None:
        raise UsageError("Q, K and V have no common copy: their global scales differ")
    return linears.fused
