"""Kernels as PyTorch operators: ``torch.ops.muster.<contract>`` for every contract of an opened registry.

Needs the extra ``torch``. Nothing else of kernel_muster imports torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_muster.torch.kernels import Kernel, Kernels
    from kernel_muster.torch.weights import Weight

_HOME = {"Kernel": "kernels", "Kernels": "kernels", "Weight": "weights"}

__all__ = ["Kernel", "Kernels", "Weight"]

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
