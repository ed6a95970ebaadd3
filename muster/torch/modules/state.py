"""NVFP4 weights of other libraries' modules and state dicts, as the buffers of ours.

The buffers have ModelOpt's direction of the global scale: ``weight_packed`` U8 ``[N, K/2]``, even k in the low nibble,
``weight_scale`` E4M3 ``[N, K/16]``, and ``weight_scale_2`` FP32 ``[1]``, which multiplies. compressed-tensors stores
``weight_global_scale`` instead, which divides. FP32 1/x replaces it, with one rounding.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.errors import ContractError, UsageError
from kernel_muster.torch.arrays import tensor_of

NAMES = ("weight_packed", "weight_scale", "weight_scale_2")


def read_state(owner: str, found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return our buffers from tensors with the names of either library. ContractError for other formats than NVFP4.

    The buffers share the memory of their sources.
    """
    packed = found.get("weight_packed", found.get("weight"))
    scale, names = found.get("weight_scale"), ", ".join(sorted(found)) or "nothing"
    if packed is None or scale is None:
        raise ContractError(f"{owner}: has {names}, expected weight_packed (or weight) and weight_scale")
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise ContractError(f"{owner}: weight is {packed.dtype} {tuple(packed.shape)}, expected NVFP4: uint8 (N, K/2)")
    if scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ContractError(f"{owner}: weight_scale is {scale.dtype}, expected torch.float8_e4m3fn")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % nvfp4.GROUP or tuple(scale.shape) != (rows, columns // nvfp4.GROUP):
        raise ContractError(
            f"{owner}: weight_scale has shape {tuple(scale.shape)}, expected (N, K/16) = ({rows}, {columns / 16:g})"
        )
    return {
        "weight_packed": packed.detach(),
        "weight_scale": scale.detach().view(torch.float8_e4m3fn),
        "weight_scale_2": _decode_scale(owner, found).reshape(1),
    }


def _decode_scale(owner: str, found: Mapping[str, Any]) -> torch.Tensor:
    for name in ("weight_scale_2", "weight_global_scale"):
        if (value := found.get(name)) is None:
            continue
        if value.numel() != 1 or value.dtype != torch.float32:
            raise ContractError(f"{owner}: {name} is {value.dtype} {tuple(value.shape)}, expected one float32")
        decode = value.detach().clone() if name == "weight_scale_2" else 1 / value.detach()
        if not value.is_meta and not (torch.isfinite(decode).all() and (decode >= 0).all()):
            raise ContractError(f"{owner}: {name} is {value.item()}, expected a finite scale")
        return decode
    raise ContractError(f"{owner}: has no global scale: expected weight_scale_2 or weight_global_scale")


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the weight's entries of a module of compressed-tensors or ModelOpt, by name."""
    names = ("weight", *NAMES, "weight_global_scale")
    found = {name: getattr(module, name, None) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def quantised_state(owner: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise a floating weight ``[N, K]`` as ``nvfp4.quantize`` of the registry does, on the host."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ContractError(f"{owner}: weight is {weight.dtype} {tuple(weight.shape)}, expected floating (N, K)")
    made = nvfp4.quantize(weight.detach().float().cpu().numpy())
    scale = torch.tensor([float(made.global_scale_decode)], dtype=torch.float32)
    state = {"weight_packed": tensor_of(made.packed), "weight_scale": tensor_of(made.block_scale), NAMES[2]: scale}
    return read_state(owner, {name: value.to(weight.device) for name, value in state.items()})


def logical_state(weight: Any) -> dict[str, torch.Tensor]:
    """Return the buffers of a logical weight in row-major order, of arrays or of tensors."""
    if getattr(weight, "layout", None) != nvfp4.ROW_MAJOR:
        raise UsageError(f"weight has layout {getattr(weight, 'layout', None)!r}, expected {nvfp4.ROW_MAJOR}")
    scale = torch.tensor([float(weight.global_scale_decode)], dtype=torch.float32)
    packed, block_scale = tensor_of(weight.packed), tensor_of(weight.block_scale)
    return read_state("weight", {"weight_packed": packed, "weight_scale": block_scale, NAMES[2]: scale})


def logical_weight(module: Any) -> nvfp4.Nvfp4Weight:
    """Return the logical weight of our buffers. Its global scale is copied to the host, where launches read it."""
    scales = module.weight_scale.view(torch.uint8)
    return nvfp4.Nvfp4Weight(module.weight_packed, scales, np.asarray(module.weight_scale_2.item(), np.float32))


def rename_state(owner: str, state: MutableMapping[str, Any], prefix: str) -> None:
    """Rename another library's tensors below ``prefix`` of a state dict to our buffers, in place."""
    known = ("weight", *NAMES, "weight_global_scale")
    found = {name: state[prefix + name] for name in known if prefix + name in state}
    if not found or set(found) == set(NAMES):
        return
    for name in found:
        del state[prefix + name]
    state.update({prefix + name: value for name, value in read_state(owner, found).items()})
