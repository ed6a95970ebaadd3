"""One projection outside mixers and FFNs."""

from collections.abc import Collection

from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.families import batch_tiers, bf16_kernels, exact_tiers
from kernel_muster.models.layers.linear import Bf16Linear, Linear, Nvfp4Linear
from kernel_muster.models.layers.tiles import may_take_wide, tile_kernels
from kernel_muster.models.policy.phase import PHASES, Phase
from kernel_muster.registry.selection.sites import track_caller

_NVFP4, _BF16 = "its weight is NVFP4", "its weight is BF16"


@track_caller
def projection(
    ctx: LayerContext, name: str, shape: tuple[int, int], quant: str, phases: Collection[Phase] = PHASES
) -> Linear:  # fmt: skip
    """Make a projection ``(N, K)`` for some phases, in its weight's stored quantisation, else in ``quant``."""
    stored = ctx.stored(name, quant)
    spec = ctx.spec(name, *shape, stored)
    kernels = ctx.kernels
    if stored == "bf16":
        return Bf16Linear(ctx, spec, bf16_kernels(kernels, _BF16))
    has_wide = may_take_wide(kernels, [shape], phases)
    tiers = {**exact_tiers(kernels, _NVFP4), **batch_tiers(kernels, _NVFP4, has_wide)}
    return Nvfp4Linear(ctx, spec, tiers, tile_kernels(kernels, [shape], _NVFP4, phases=phases))
