"""All modules of a model at once."""

import torch
from kernel_muster.registry.errors import UsageError
from kernel_muster.torch.kernels import Kernels
from kernel_muster.torch.modules.linear import Nvfp4Linear
from kernel_muster.torch.modules.norm import GatedRMSNorm, RMSNorm
from kernel_muster.torch.modules.swiglu import SwiGLU


def bind(model: torch.nn.Module, kernels: Kernels) -> list[str]:
    """Look up the kernels of all our modules in a model, name each by its place, and return the names.

    All lookups happen here: in a boot, call it before the seal. UsageError for a model without such modules.
    """
    bound: list[str] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or not isinstance(module, SwiGLU | Nvfp4Linear | RMSNorm | GatedRMSNorm):
            continue
        place = name or module.name
        module.name = place
        if isinstance(module, SwiGLU):
            for part, child in module.named_children():
                inside.add(id(child))
                child.name = f"{place}.{part}"
        module.bind(kernels)
        bound.append(place)
    if not bound:
        raise UsageError(f"{type(model).__name__} has no module of kernel_muster.torch to bind")
    return bound
