"""Peers of a dense product with an NVFP4 weight, by their public interfaces. An absent one gives its reason."""

import json
from functools import partial
from typing import Any

from kernel_muster.bench.contestants import Absent, Contestant, Entry, Launch, as_torch, installed
from kernel_muster.bench.data.nvfp4 import DenseData, relative_l2
from kernel_muster.bench.timing import copies_of

#: Packages whose versions a record names.
PACKAGES = ("torch", "triton", "humming-kernels", "bitsandbytes", "gemlite", "quack-kernels", "flashinfer-python")
_LARGEST_BF16_BYTES = 8 * 2**30


#: Peers of lower precision are timed too: Humming rounds its scales; NF4 and MXFP4 are judged in their own format.
LARGEST_ERROR = 1e-2


def dense_peers(data: DenseData, rows: int) -> tuple[Contestant, ...]:
    """Return all peers of a product ``x[rows, K] w[N, K]^T``."""
    makers = (
        ("cuBLAS bf16", "torch", cublas_bf16, False),
        ("Humming", "humming-kernels", humming, False),
        ("bitsandbytes NF4", "bitsandbytes", bitsandbytes_nf4, False),
        ("QuACK", "quack-kernels", quack, True),
        ("GemLite NVFP4", "gemlite", gemlite_nvfp4, True),
        ("GemLite MXFP4", "gemlite", gemlite_mxfp4, True),
    )
    return tuple(
        Contestant(name, "peer", partial(_if_installed, package, make, data, rows), (), LARGEST_ERROR, is_slow)
        for name, package, make, is_slow in makers
    )


def _if_installed(package: str, make: Any, data: DenseData, rows: int, stream: Any) -> Entry | Absent:
    if installed(package) is None:
        return Absent(f"{package} is not installed")
    made: Entry | Absent = make(data, rows)
    return made


def dequantized(data: DenseData) -> Any:
    """Return the weight as BF16 torch tensor. Products of code and scale are rounded."""
    import torch

    packed, scales = as_torch(data.weight.packed), as_torch(data.weight.block_scale).view(torch.float8_e4m3fn)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    table = torch.cat([table, -table])
    out = torch.empty(data.features, data.depth, device="cuda", dtype=torch.bfloat16)
    for start in range(0, data.features, 8192):
        rows = slice(start, start + 8192)
        codes = torch.stack([packed[rows] & 15, packed[rows] >> 4], -1).flatten(1).long()
        step = scales[rows].float().repeat_interleave(16, 1) * float(data.weight.global_scale_decode)
        out[rows] = (table[codes] * step).bfloat16()
    return out


def _operands(data: DenseData, rows: int) -> tuple[Any, Any]:
    """Return ``x [rows, K]`` and a poisoned ``out [rows, N]`` as torch tensors."""
    import torch

    out = torch.full((rows, data.features), float("nan"), device="cuda", dtype=torch.bfloat16)
    return as_torch(data.x[:rows]), out


def _flops(data: DenseData, rows: int) -> float:
    return 2.0 * rows * data.features * data.depth


def cublas_bf16(data: DenseData, rows: int) -> Entry | Absent:
    """Return torch's BF16 matrix product on dequantised weights: 3.6 times the bytes."""
    import torch

    size = 2 * data.features * data.depth
    if size > _LARGEST_BF16_BYTES:
        return Absent("the BF16 weight would take more than 8 GiB a copy")
    values = dequantized(data)
    copies = [values] + [values.clone() for _ in range(copies_of(size) - 1)]
    x, out = _operands(data, rows)
    launches = tuple(partial(torch.mm, x, weight.t(), out=out) for weight in copies)
    return Entry(launches, out, size, _flops(data, rows), is_torch=True)


def humming(data: DenseData, rows: int) -> Entry | Absent:
    """Return Humming's NVFP4 kernel, with its own heuristics."""
    import torch
    from humming.forward import humming_forward
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = HummingLayer(shape_n=data.features, shape_k=data.depth, weight_config=config, torch_dtype=torch.bfloat16)
    layer = layer.cuda()
    scale = torch.tensor([float(data.weight.global_scale_decode)], device="cuda")
    scales = as_torch(data.weight.block_scale).view(torch.float8_e4m3fn)
    layer.load_from_tensors({"weight": as_torch(data.weight.packed), "weight_scale": scales, "weight_scale_2": scale})
    layer.transform()
    chosen = get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type="dense")
    chosen = [[0, 1 << 30, chosen]] if isinstance(chosen, dict) else chosen
    HummingKernel.prepare_kernels(layer.humming_config.to_str(), None, chosen)
    weight, block = layer.weight.data, layer.weight_scale.data
    size = weight.numel() * weight.element_size() + block.numel() * block.element_size()
    copies = [(weight, block)] + [(weight.clone(), block.clone()) for _ in range(copies_of(size) - 1)]
    x, out = _operands(data, rows)
    launch = partial(
        humming_forward,
        layer.humming_config,
        inputs=x,
        weight_scale_2=layer.weight_scale_2.data,
        outputs=out,
        locks=layer.locks,
        tuning_config=json.dumps(chosen),
    )
    launches = tuple(partial(launch, weight=codes, weight_scale=scales) for codes, scales in copies)
    return Entry(launches, out, size, _flops(data, rows), is_torch=True)


def bitsandbytes_nf4(data: DenseData, rows: int) -> Entry | Absent:
    """Return bitsandbytes' NF4 kernel, another 4-bit format: compare microseconds with care."""
    import torch
    from bitsandbytes import functional

    quantized, state = functional.quantize_4bit(dequantized(data), blocksize=64, quant_type="nf4")
    weight = functional.dequantize_4bit(quantized, state)
    size = quantized.numel() + 4 * state.absmax.numel()
    copies = [(quantized, state.absmax)]
    copies += [(quantized.clone(), state.absmax.clone()) for _ in range(copies_of(size) - 1)]
    x, shape = as_torch(data.x[:rows]), [data.features, data.depth]
    multiply = torch.ops.bitsandbytes.gemm_4bit
    launches = tuple(partial(multiply, x, codes, shape, scales, 64, "nf4") for codes, scales in copies)
    return _of_own_format(launches, x, weight, size, _flops(data, rows))


def quack(data: DenseData, rows: int) -> Entry | Absent:
    """Return QuACK's NVFP4 kernel, launched like all others. Each of its tiles is compiled on first use."""
    import torch
    from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

    scales = as_torch(data.weight.block_scale).view(torch.float8_e4m3fn)
    blob, packed_scales = prepare_w4_weight(as_torch(data.weight.packed), scales, wformat="nvfp4")
    size = blob.numel() * blob.element_size() + packed_scales.numel() * packed_scales.element_size()
    copies = [(blob, packed_scales)]
    copies += [(blob.clone(), packed_scales.clone()) for _ in range(copies_of(size) - 1)]
    x, out = _operands(data, rows)
    launch = partial(
        gemm_w4a16,
        x,
        tensor_scale=float(data.weight.global_scale_decode),
        out=out,
        n_out=data.features,
        use_pdl=False,
        wformat="nvfp4",
    )
    launches = tuple(partial(launch, blob=codes, sf=scale) for codes, scale in copies)
    return Entry(launches, out, size, _flops(data, rows), is_torch=True)


def gemlite_nvfp4(data: DenseData, rows: int) -> Entry | Absent:
    """Return GemLite's NVFP4 kernel on the same weight."""
    import torch
    from gemlite.helper import A16W4_NVFP

    inverse = torch.tensor(1.0 / float(data.weight.global_scale_decode), device="cuda")
    scales = as_torch(data.weight.block_scale).view(torch.float8_e4m3fn)
    maker = A16W4_NVFP(device="cuda:0", dtype=torch.bfloat16)
    layer = maker.from_packed_weights(as_torch(data.weight.packed), scales=scales, meta_scale=inverse)
    launches, size = _gemlite_launches(layer, data, rows)
    check = partial(_judged_by, lambda out: data.error(out, rows), launches[0])
    return Entry(launches, None, size, _flops(data, rows), is_torch=True, check=check)


def gemlite_mxfp4(data: DenseData, rows: int) -> Entry | Absent:
    """Return GemLite's MXFP4 kernel: the same codes with power-of-two scales, one for each 32 values."""
    import torch
    from gemlite.helper import A16W4_MXFP

    packed = as_torch(data.weight.packed)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    powers = torch.randint(118, 124, (data.features, data.depth // 32), device="cuda", dtype=torch.uint8)
    maker = A16W4_MXFP(device="cuda:0", dtype=torch.bfloat16)
    layer = maker.from_weights(codes, powers.view(torch.float8_e8m0fnu))
    launches, size = _gemlite_launches(layer, data, rows)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    values = torch.cat([table, -table])[codes.long()] * torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
    return _of_own_format(launches, as_torch(data.x[:rows]), values, size, _flops(data, rows))


def _gemlite_launches(layer: Any, data: DenseData, rows: int) -> tuple[tuple[Launch, ...], int]:
    import gemlite

    tensors, meta = layer.get_tensor_args(), layer.get_meta_args()
    size = sum(one.numel() * one.element_size() for one in tensors[:2])
    copies = [tensors] + [[one.clone() for one in tensors[:2]] + tensors[2:] for _ in range(copies_of(size) - 1)]
    x = as_torch(data.x[:rows])
    return tuple(partial(gemlite.forward_functional, x, None, copy, meta) for copy in copies), size


def _of_own_format(launches: tuple[Launch, ...], x: Any, weight: Any, size: int, flops: float) -> Entry:
    """Judge against the weight in the peer's own format: its rounding is no fault of the kernel."""
    expected = (x.float() @ weight.float().t()).cpu()
    check = partial(_judged_by, lambda out: relative_l2(out.float().cpu(), expected.double().numpy()), launches[0])
    return Entry(launches, None, size, flops, is_torch=True, check=check)


def _judged_by(judge: Any, launch: Launch) -> float:
    import torch

    out = launch()
    torch.cuda.synchronize()
    return float(judge(out))
