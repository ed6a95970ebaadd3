"""Host kernels of the quantize_nvfp4 family."""

from kernel_muster.plugins._reference import Array
from kernel_muster.registry.contract import nvfp4


def quantize_bf16_to_nvfp4(values: Array, out_packed: Array, out_block_scale: Array, out_global_scale: Array) -> None:
    """Quantise ``values [N, K]`` BF16 into packed ``[N, K/2]``, block scales ``[N, K/16]`` and one FP32 scale.

    Numerics: :func:`nvfp4.quantize`, all in FP32. A NaN or infinity raises ContractError before any write.
    """
    weight = nvfp4.quantize(values)
    out_packed[...] = weight.packed
    out_block_scale[...] = weight.block_scale
    out_global_scale[0] = weight.global_scale_decode


def quantize_bf16_to_nvfp4_t(
    values: Array,
    out_packed: Array,
    out_block_scale: Array,
    out_global_scale: Array,
    out_packed_t: Array,
    out_block_scale_t: Array,
) -> None:
    """Quantise ``values [N, K]`` and write packed and block scales also as ``[K/2, N]`` and ``[K/16, N]``.

    Numerics and errors are those of quantize_bf16_to_nvfp4.
    """
    quantize_bf16_to_nvfp4(values, out_packed, out_block_scale, out_global_scale)
    transpose_nvfp4(out_packed, out_block_scale, out_packed_t, out_block_scale_t)


def transpose_nvfp4(packed: Array, block_scale: Array, out_packed: Array, out_block_scale: Array) -> None:
    """Write ``packed [N, K/2]`` and ``block_scale [N, K/16]`` column by column."""
    for row in range(packed.shape[0]):
        out_packed[:, row] = packed[row]
        out_block_scale[:, row] = block_scale[row]
