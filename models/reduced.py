"""A model of the same architecture at a small size for any machine: every kind of layer, few of each.

Sizes suit the kernels of every target: heads of 128, the smallest for prompt attention in tiles, states of 128, rows
that begin at multiples of 16 bytes.
"""

from dataclasses import replace

from kernel_muster.models.dims import AttentionDims, DrafterDims, ModelDims, MoeDims, RopeDims

HIDDEN, VOCAB, INTERMEDIATE = 256, 512, 512
_LAYERS = 4


def reduced(dims: ModelDims) -> ModelDims:
    """Return small dimensions with the layers, options and quantisation of a model.

    A drafter's fit its target's: it reads the first and the last two layers.
    """
    kinds = dims.layer_kinds[:_LAYERS]
    if len(set(kinds)) < len(set(dims.layer_kinds)):  # the first group has only one kind of several
        kinds = (*kinds[1:], next(kind for kind in dims.layer_kinds if kind not in kinds))
    return replace(
        dims,
        hidden=HIDDEN,
        vocab=VOCAB,
        layer_kinds=kinds,
        attention=None if dims.attention is None else _attention(dims.attention),
        gdn=None if dims.gdn is None else replace(dims.gdn, key_heads=2, key_dim=128, value_heads=8, value_dim=128),
        intermediate=INTERMEDIATE if dims.intermediate else 0,
        moe=None if dims.moe is None else _moe(dims.moe),
        drafter=None if dims.drafter is None else _drafter(dims.drafter),
    )


def _attention(dims: AttentionDims) -> AttentionDims:
    return replace(dims, q_heads=4, kv_heads=2, head_dim=128, rope=None if dims.rope is None else _rope(dims.rope))


def _drafter(dims: DrafterDims) -> DrafterDims:
    return replace(dims, gamma=4, window=32, mask_id=VOCAB - 1, target_layers=(0, _LAYERS - 2, _LAYERS - 1))


def _rope(rope: RopeDims) -> RopeDims:
    return replace(rope, rotary_dim=32, sections=(6, 5, 5) if rope.sections else ())


def _moe(moe: MoeDims) -> MoeDims:
    shared = 128 if moe.shared_intermediate else 0
    return replace(moe, experts=16, top_k=4, intermediate=128, shared_intermediate=shared)
