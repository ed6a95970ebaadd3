"""Gated delta net: its norms and projections.

Activations are BF16 ``(M, features)``. The mixer between them (convolution, delta rule) reads what
:meth:`Gdn.project` returns.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kernel_muster.models.dims import GdnDims, ModelDims
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.families import batch_tiers, bf16_kernels, exact_tiers, tile_kernels
from kernel_muster.models.layers.interleave import split_qkvz
from kernel_muster.models.layers.linear import Bf16Linear, Linear, Nvfp4Linear
from kernel_muster.models.layers.norm import GatedRmsNorm, RmsNorm
from kernel_muster.models.policy.phase import Phase
from kernel_muster.registry.handles import AnyHandle

_USER, _NVFP4 = "gdn", "projections are NVFP4"


@dataclass(frozen=True)
class GdnInputs:
    """BF16 rows: qkv ``[q all heads | k all | v all]``, the output gate z, and beta and alpha ``ba``."""

    qkv: Any
    z: Any
    ba: Any


class Gdn:
    """Norms, input and output projections of one layer; every lookup is made here."""

    def __init__(self, ctx: LayerContext, model: ModelDims, dims: GdnDims) -> None:
        kernels = ctx.kernels
        rms_norm = kernels.kernel("norm", "rms_norm")
        rms_norm_residual = kernels.kernel("norm", "rms_norm_residual")
        rms_norm_gated = kernels.kernel("norm", "rms_norm_gated")
        dense = bf16_kernels(kernels)
        self._qkvz_one: AnyHandle | None = None
        qkvz = ctx.spec("qkvz_proj", dims.qkvz_rows, model.hidden, model.quant)
        self.qkvz: Linear
        self.out: Linear
        out = ctx.spec("out_proj", model.hidden, dims.z_dim, model.quant)
        if model.quant == "nvfp4":
            self._qkvz_one = kernels.kernel("w4a16_gemv", "w4a16_gemv_qkvz", when=_NVFP4)
            tiers = {**exact_tiers(kernels, _NVFP4), **batch_tiers(kernels, _NVFP4)}
            tiles = tile_kernels(kernels, _NVFP4)
            self.qkvz = Nvfp4Linear(ctx, qkvz, tiers, tiles, [self._qkvz_one])
            self.out = Nvfp4Linear(ctx, out, tiers, tiles)
        else:
            self.qkvz, self.out = Bf16Linear(ctx, qkvz, dense), Bf16Linear(ctx, out, dense)
        # beta and alpha decide what the state forgets: two rows a value head, kept unquantised.
        self.ba = Bf16Linear(ctx, ctx.spec("ba_proj", dims.ba_rows, model.hidden, "bf16"), dense)
        constants = (model.rms_eps, model.norm_weight_offset)
        self.input_norm = RmsNorm(rms_norm, rms_norm_residual, ctx.array("input_norm", model.hidden), *constants)
        self.post_norm = RmsNorm(rms_norm, rms_norm_residual, ctx.array("post_norm", model.hidden), *constants)
        self.head_norm = GatedRmsNorm(rms_norm_gated, ctx.array("norm", dims.value_dim), model.rms_eps)
        self.dims, self._scratch = dims, ctx.scratch
        self.used: Counter[str] = Counter()  # launches that split what they project
        ctx.plan_scratch(_USER, "gdn.qkvz", 2 * ctx.max_rows * dims.qkvz_rows, (0, 0))
        ctx.plan_scratch(_USER, "gdn.normed", 2 * ctx.max_rows * dims.z_dim, (1, 1))

    def project(self, x: Any, phase: Phase) -> GdnInputs:
        """Project normalised rows ``x (M, H)``; one row is one launch that splits, more are split after it."""
        dims = self.dims
        found = GdnInputs(new_rows(x, dims.qkv_dim), new_rows(x, dims.z_dim), new_rows(x, dims.ba_rows))
        heads = (dims.key_heads, dims.key_dim, dims.value_heads, dims.value_dim)
        if x.shape[0] == 1 and self._qkvz_one is not None:
            w = self.qkvz.weight.copy_for(self._qkvz_one)
            self._qkvz_one(x, w, *heads, found.qkv, found.z)
            self.used["qkvz"] += 1
        else:
            with self._scratch.lease("gdn.qkvz", _USER, (x.shape[0], dims.qkvz_rows)) as fused:
                self.qkvz.forward(x, fused, phase)
                split_qkvz(fused, *heads, found.qkv, found.z)
        self.ba.forward(x, found.ba, phase)
        return found

    def output(self, mixed: Any, z: Any, phase: Phase) -> Any:
        """Return ``out_proj(norm(mixed) * silu(z))`` of ``(M, value_heads * value_dim)``, normed over each head."""
        out = new_rows(mixed, self.out.weight.spec.shape[0])
        with self._scratch.lease("gdn.normed", _USER, mixed.shape) as normed:
            heads = (mixed.shape[0] * self.dims.value_heads, self.dims.value_dim)
            self.head_norm.forward(mixed.reshape(heads), z.reshape(heads), normed.reshape(heads))
            self.out.forward(normed, out, phase)
        return out
