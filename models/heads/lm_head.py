"""LM head: logits BF16 ``(M, V)`` of normalised rows, and the greedy choice."""

from typing import Any

import numpy as np
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.families import bf16_kernels, chunk_tiers
from kernel_muster.models.layers.linear import Bf16Linear, Linear, Nvfp4Linear
from kernel_muster.models.layers.tiles import hopper_kernel

_NVFP4, _BF16 = "the LM head is NVFP4", "the LM head is BF16"


class LmHead:
    """The output projection ``(V, H)``: a prompt needs its last row only, so there is one row for each sequence.

    More than 16 rows use one GEMM. NVFP4 weights on a target without the Hopper GEMM use chunks of 16, which read such
    large weights faster than tile GEMMs. ``tied`` is the embedding's table as a weight, if the model shares it.
    """

    def __init__(self, ctx: LayerContext, vocab: int, hidden: int, quant: str, tied: Any = None) -> None:
        kernels = ctx.kernels
        quant = "bf16" if tied is not None else ctx.stored("weight", quant)
        spec = ctx.spec("weight", vocab, hidden, quant)
        self.linear: Linear
        if quant == "nvfp4":
            tiers = {
                1: kernels.kernel("w4a16_gemv", "w4a16_gemv", when=_NVFP4, reached_by="gemv_tier: 1 row"),
                2: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch2", when=_NVFP4, reached_by="gemv_tier: 2 rows"),
                3: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch3", when=_NVFP4, reached_by="gemv_tier: 3 rows"),
                **chunk_tiers(kernels, _NVFP4),
            }
            tiles = hopper_kernel(kernels, _NVFP4, ("w4a16_gemv", "w4a16_gemv_batch16"))
            self.linear = Nvfp4Linear(ctx, spec, tiers, tiles)
        else:
            self.linear = Bf16Linear(ctx, spec, bf16_kernels(kernels, _BF16), tied)
        self._argmax = kernels.kernel("argmax", "argmax_bf16", reached_by="the greedy choice")

    def forward(self, x: Any) -> Any:
        """Return the logits of each row of x BF16 ``(M, H)``."""
        out = new_rows(x, self.linear.weight.spec.shape[0])
        self.linear.forward(x, out, "decode")
        return out

    def greedy(self, logits: Any) -> Any:
        """Return the id i32 ``(M,)`` of each row's largest logit, the lowest of several."""
        ids = np.empty_like(logits, dtype=np.int32, shape=(logits.shape[0],))
        self.choose(logits, ids)
        return ids

    def choose(self, logits: Any, ids: Any) -> None:
        """Write the greedy choice of each row to ids i32 ``(M,)``."""
        self._argmax(logits=logits, out=ids)
