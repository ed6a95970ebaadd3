"""kernel_muster: a registry of GPU kernels built from plugins, and a roll call at boot.

Names are imported on first use, so ``import kernel_muster`` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernel_muster._version import __version__

if TYPE_CHECKING:
    from kernel_muster.api import boot, build_model, open_registry
    from kernel_muster.audit.render.json_report import render_json
    from kernel_muster.audit.render.markdown import render_markdown
    from kernel_muster.audit.render.text import render_text
    from kernel_muster.audit.report import Report
    from kernel_muster.audit.session import BootSession
    from kernel_muster.models.weights.source import WeightSpec
    from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
    from kernel_muster.registry.backends.numba.numba_kernel import NumbaEntry, NumbaKernel
    from kernel_muster.registry.backends.request import EntryPoint
    from kernel_muster.registry.backends.torch_op import TorchOpKernel
    from kernel_muster.registry.backends.triton.triton_kernel import TritonKernel
    from kernel_muster.registry.contract.builders import DecodesItself, ModelBuilder
    from kernel_muster.registry.contract.contracts import Case, Contract, Tolerance
    from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, WeightParam
    from kernel_muster.registry.contract.specs import KernelSpec, PythonKernel
    from kernel_muster.registry.errors import (
        BootRefused,
        ContractError,
        KernelMissing,
        LateKernelMiss,
        LateRegistration,
        MusterError,
        NullKernelError,
        UsageError,
    )
    from kernel_muster.registry.findings import Finding
    from kernel_muster.registry.hardware.target import Target
    from kernel_muster.registry.hookspecs import hookimpl
    from kernel_muster.registry.keys import KernelKey
    from kernel_muster.registry.launch.workspace import Counters, Scratch, TensorMap
    from kernel_muster.registry.levers import Lever, Measured
    from kernel_muster.registry.selection.handles import Handle, NullHandle
    from kernel_muster.registry.selection.lookups import Lookups
    from kernel_muster.registry.selection.sites import track_caller

_HOME = {
    "api": ("boot", "build_model", "open_registry"),
    "audit.render.json_report": ("render_json",),
    "audit.render.markdown": ("render_markdown",),
    "audit.render.text": ("render_text",),
    "audit.report": ("Report",),
    "audit.session": ("BootSession",),
    "models.weights.source": ("WeightSpec",),
    "registry.backends.cuda_kernel": ("CudaKernel", "LaunchPlan"),
    "registry.launch.workspace": ("Counters", "Scratch", "TensorMap"),
    "registry.backends.numba.numba_kernel": ("NumbaEntry", "NumbaKernel"),
    "registry.backends.request": ("EntryPoint",),
    "registry.backends.torch_op": ("TorchOpKernel",),
    "registry.backends.triton.triton_kernel": ("TritonKernel",),
    "registry.contract.builders": ("DecodesItself", "ModelBuilder"),
    "registry.contract.contracts": ("Case", "Contract", "Tolerance"),
    "registry.errors": (
        "BootRefused",
        "ContractError",
        "KernelMissing",
        "LateKernelMiss",
        "LateRegistration",
        "MusterError",
        "NullKernelError",
        "UsageError",
    ),
    "registry.findings": ("Finding",),
    "registry.selection.handles": ("Handle", "NullHandle"),
    "registry.hookspecs": ("hookimpl",),
    "registry.keys": ("KernelKey",),
    "registry.levers": ("Lever", "Measured"),
    "registry.selection.lookups": ("Lookups",),
    "registry.contract.signature": ("ScalarParam", "Signature", "TensorParam", "WeightParam"),
    "registry.selection.sites": ("track_caller",),
    "registry.contract.specs": ("KernelSpec", "PythonKernel"),
    "registry.hardware.target": ("Target",),
}
_MODULE_OF = {name: f"kernel_muster.{module}" for module, names in _HOME.items() for name in names}

__all__ = [
    "BootRefused",
    "BootSession",
    "Case",
    "Contract",
    "ContractError",
    "Counters",
    "CudaKernel",
    "DecodesItself",
    "EntryPoint",
    "Finding",
    "Handle",
    "KernelKey",
    "KernelMissing",
    "KernelSpec",
    "LateKernelMiss",
    "LateRegistration",
    "LaunchPlan",
    "Lever",
    "Lookups",
    "Measured",
    "ModelBuilder",
    "MusterError",
    "NullHandle",
    "NullKernelError",
    "NumbaEntry",
    "NumbaKernel",
    "PythonKernel",
    "Report",
    "ScalarParam",
    "Scratch",
    "Signature",
    "Target",
    "TensorMap",
    "TensorParam",
    "Tolerance",
    "TorchOpKernel",
    "TritonKernel",
    "UsageError",
    "WeightParam",
    "WeightSpec",
    "__version__",
    "boot",
    "build_model",
    "hookimpl",
    "open_registry",
    "render_json",
    "render_markdown",
    "render_text",
    "track_caller",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kernel_muster' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
