"""Who runs in a measurement: our kernels, the read kernel, and peers that are installed.

A contestant makes its own copy of the weight in its own layout and returns launches over as many cold copies as it
needs. One that is not installed, or does not take a shape, says so in a :class:`Absent`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kernel_muster.bench.data import Problem
from kernel_muster.bench.timing import copies_of
from kernel_muster.registry.handles import Handle
from kernel_muster.registry.lookups import Lookups


@dataclass(frozen=True)
class Entry:
    """One contestant, ready: launches over its copies, its output, and the bytes it must read a launch."""

    name: str
    launches: tuple[Callable[[], None], ...]
    out: Any
    size_bytes: int
    is_torch: bool = False


@dataclass(frozen=True)
class Absent:
    """A contestant that does not run, and why."""

    name: str
    why: str


Contestant = Callable[[Problem, int, Any], Entry | Absent]


def read_kernel(kernels: Lookups) -> Contestant:
    """Return the floor: the bytes of the NVFP4 weight, read once."""
    handle = kernels.kernel("muster_bench", "read_bytes")

    def make(problem: Problem, rows: int, stream: Any) -> Entry:
        import cupy

        size = problem.weight_bytes // 16 * 16
        out = cupy.zeros(1, cupy.uint32)
        data = [cupy.ones(size, cupy.uint8) for _ in range(copies_of(size))]
        launches = tuple(_on(handle.prepare(data=one, out=out), stream) for one in data)
        return Entry("read", launches, None, size)

    return make


def ours(kernels: Lookups, module: str, func: str) -> Contestant:
    """Return a kernel of the registry with the signature ``(x, w, out)``."""
    handle = kernels.kernel(module, func)

    def make(problem: Problem, rows: int, stream: Any) -> Entry:
        assert isinstance(handle, Handle)  # noqa: S101  (a miss has raised)
        prepared = handle.prepare_weight(problem.weight)
        size = prepared.data.nbytes
        weights = [prepared] + [_copied(prepared) for _ in range(copies_of(size) - 1)]
        x, out = problem.x[:rows], _poisoned(rows, problem.features)
        launches = tuple(_on(handle.prepare(x=x, w=weight, out=out), stream) for weight in weights)
        return Entry(str(handle.key), launches, out, size)

    return make


def _on(launch: Any, stream: Any) -> Callable[[], None]:
    return partial(launch, stream)


def _copied(weight: Any) -> Any:
    return replace(weight, data=weight.data.copy())


def _poisoned(rows: int, features: int) -> Any:
    import cupy
    from kernel_muster.registry.dtypes import numpy_dtype

    bits = cupy.full((rows, features), 0x7FC0, cupy.uint16)  # NaN
    return bits.view(numpy_dtype("bf16"))


def _torch(array: Any) -> Any:
    import torch

    return torch.from_dlpack(array)


def installed(package: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cublas_bf16(problem: Problem, rows: int, stream: Any) -> Entry | Absent:
    """Return torch's BF16 matrix product on dequantised weights: 3.6 times the bytes."""
    if installed("torch") is None:
        return Absent("cuBLAS bf16", "torch is not installed")
    import torch

    size = 2 * problem.features * problem.depth
    if size > 8 * 2**30:
        return Absent("cuBLAS bf16", "the BF16 weight would take more than 8 GiB a copy")
    values = dequantized(problem)
    copies = [values] + [values.clone() for _ in range(copies_of(size) - 1)]
    x = _torch(problem.x[:rows])
    out = torch.full((rows, problem.features), float("nan"), device="cuda", dtype=torch.bfloat16)
    launches = tuple(partial(torch.mm, x, weight.t(), out=out) for weight in copies)
    return Entry("cuBLAS bf16", launches, out, size, is_torch=True)


def dequantized(problem: Problem) -> Any:
    """Return the weight as BF16 torch tensor; its products of code and scale round there."""
    import torch

    packed, scales = _torch(problem.weight.packed), _torch(problem.weight.block_scale).view(torch.float8_e4m3fn)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    table = torch.cat([table, -table])
    out = torch.empty(problem.features, problem.depth, device="cuda", dtype=torch.bfloat16)
    for start in range(0, problem.features, 8192):
        rows = slice(start, start + 8192)
        codes = torch.stack([packed[rows] & 15, packed[rows] >> 4], -1).flatten(1).long()
        step = scales[rows].float().repeat_interleave(16, 1) * float(problem.weight.global_scale_decode)
        out[rows] = (table[codes] * step).bfloat16()
    return out


def humming(problem: Problem, rows: int, stream: Any) -> Entry | Absent:
    """Return Humming's NVFP4 kernel, by its own heuristics."""
    if installed("humming-kernels") is None:
        return Absent("Humming", "humming-kernels is not installed")
    import json

    import torch
    from humming.forward import humming_forward
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    n, k = problem.features, problem.depth
    config = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
    scale = torch.tensor([float(problem.weight.global_scale_decode)], device="cuda")
    scales = _torch(problem.weight.block_scale).view(torch.float8_e4m3fn)
    layer.load_from_tensors({"weight": _torch(problem.weight.packed), "weight_scale": scales, "weight_scale_2": scale})
    layer.transform()
    chosen = get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type="dense")
    chosen = [[0, 1 << 30, chosen]] if isinstance(chosen, dict) else chosen
    HummingKernel.prepare_kernels(layer.humming_config.to_str(), None, chosen)
    tuning = json.dumps(chosen)
    weight, block, second = layer.weight.data, layer.weight_scale.data, layer.weight_scale_2.data
    size = weight.numel() * weight.element_size() + block.numel() * block.element_size()
    copies = [(weight, block)] + [(weight.clone(), block.clone()) for _ in range(copies_of(size) - 1)]
    x, out = _torch(problem.x[:rows]), torch.full((rows, n), float("nan"), device="cuda", dtype=torch.bfloat16)

    def launch(weight: Any, block: Any) -> None:
        humming_forward(
            layer.humming_config,
            inputs=x,
            weight=weight,
            weight_scale=block,
            weight_scale_2=second,
            outputs=out,
            locks=layer.locks,
            tuning_config=tuning,
        )

    return Entry("Humming", tuple(partial(launch, *copy) for copy in copies), out, size, is_torch=True)


def bitsandbytes_nf4(problem: Problem, rows: int, stream: Any) -> Entry | Absent:
    """Return bitsandbytes' NF4 kernel: another 4-bit format, so compare microseconds with care."""
    if installed("bitsandbytes") is None:
        return Absent("bitsandbytes NF4", "bitsandbytes is not installed")
    import torch
    from bitsandbytes import functional

    quantized, state = functional.quantize_4bit(dequantized(problem), blocksize=64, quant_type="nf4")
    size = quantized.numel() + 4 * state.absmax.numel()
    copies = [(quantized, state.absmax)]
    copies += [(quantized.clone(), state.absmax.clone()) for _ in range(copies_of(size) - 1)]
    x, shape = _torch(problem.x[:rows]), [problem.features, problem.depth]
    multiply = torch.ops.bitsandbytes.gemm_4bit
    launches = tuple(partial(multiply, x, codes, shape, scales, 64, "nf4") for codes, scales in copies)
    return Entry("bitsandbytes NF4", launches, None, size, is_torch=True)


PEERS: tuple[Contestant, ...] = (cublas_bf16, humming, bitsandbytes_nf4)
#: Whose versions a record names.
PEER_PACKAGES = ("torch", "humming-kernels", "bitsandbytes", "gemlite", "quack-kernels")
