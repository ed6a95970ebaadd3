"""Kernels as PyTorch operators, ``torch.ops.muster.<contract>`` for every contract of a registry, and modules on them.

Needs the extra ``torch``. Nothing else of kernel_muster imports torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_muster.torch.kernels import Kernel, Kernels
    from kernel_muster.torch.modules.binding import bind
    from kernel_muster.torch.modules.linear import Nvfp4Linear
    from kernel_muster.torch.modules.norm import GatedRMSNorm, RMSNorm
    from kernel_muster.torch.modules.swiglu import SwiGLU
    from kernel_muster.torch.weights import Weight

_HOME = {
    "GatedRMSNorm": "modules.norm",
    "Kernel": "kernels",
    "Kernels": "kernels",
    "Nvfp4Linear": "modules.linear",
    "RMSNorm": "modules.norm",
    "SwiGLU": "modules.swiglu",
    "Weight": "weights",
    "bind": "modules.binding",
}

__all__ = ["GatedRMSNorm", "Kernel", "Kernels", "Nvfp4Linear", "RMSNorm", "SwiGLU", "Weight", "bind"]

if find_spec("torch") is None:
    raise ImportError(
        "kernel_muster.torch needs PyTorch, which is not installed: pip install 'kernel-muster[torch]'", name="torch"
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kernel_muster.torch' has no attribute {name!r}")
    value = getattr(import_module(f"kernel_muster.torch.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
