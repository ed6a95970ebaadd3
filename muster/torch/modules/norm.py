"""RMS norms."""

from typing import Any

import torch
from kernel_muster.registry.errors import UsageError
from kernel_muster.torch.kernels import Kernel, Kernels


class _Norm(torch.nn.Module):
    """A weight ``(H,)``, an epsilon, and one kernel."""

    _FUNC = ""

    def __init__(self, weight: torch.Tensor, eps: float, name: str = "norm") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().to(torch.bfloat16), requires_grad=False)
        self.eps, self.name = eps, name
        self.kernel: _Bound | None = None

    def extra_repr(self) -> str:
        """Show size and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def bind(self, kernels: Kernels) -> "_Norm":
        """Look the kernel up."""
        lookups = kernels.lookups.for_layer(self.name)
        self.kernel = _Bound(kernels.of(lookups.kernel("norm", self._FUNC, reached_by="every pass")))
        return self

    def _ready(self, *inputs: torch.Tensor) -> tuple[Kernel, list[torch.Tensor]]:
        """Return the kernel and its inputs as matrices, or refuse an impossible call, with the reason."""
        if self.kernel is None:
            raise UsageError(f"{self.name}: no kernels are bound: call kernel_muster.torch.bind(model, kernels)")
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            raise UsageError(f"{self.name}: has no gradient: call it under torch.inference_mode() or torch.no_grad()")
        return self.kernel.found, [one.reshape(-1, one.shape[-1]).contiguous() for one in inputs]


class RMSNorm(_Norm):
    """``x / rms(x) * (weight_offset + weight)``: ``x [..., H]`` BF16, statistics in FP32, one rounding of the result.

    ``weight_offset`` is 1 for zero-centred weights. A module that rounds before it multiplies differs in the last bit.
    """

    _FUNC = "rms_norm"

    def __init__(self, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, name: str = "norm") -> None:
        super().__init__(weight, eps, name)
        self.weight_offset = weight_offset

    @classmethod
    def of_module(cls, module: torch.nn.Module, weight_offset: float = 0.0, name: str = "norm") -> "RMSNorm":
        """Make one from ``torch.nn.RMSNorm`` or a norm of transformers. UsageError if a part is missing."""
        return cls(*_parts_of(module, name), weight_offset, name)

    def extra_repr(self) -> str:
        """Show size and constants."""
        return f"{super().extra_repr()}, weight_offset={self.weight_offset}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        kernel, (rows,) = self._ready(x)
        out = torch.empty_like(rows)
        kernel(rows, self.weight, self.eps, self.weight_offset, out)
        return out.view(x.shape)


class GatedRMSNorm(_Norm):
    """``x / rms(x) * weight * silu(gate)``: x and gate ``[..., H]`` BF16, computed in FP32, one rounding of the result.

    A module that rounds the normalised x differs in the last bits.
    """

    _FUNC = "rms_norm_gated"

    @classmethod
    def of_module(cls, module: torch.nn.Module, name: str = "norm") -> "GatedRMSNorm":
        """Make one from a norm of transformers with a SiLU gate after it. UsageError if a part is missing."""
        activation = getattr(module, "activation", "silu")
        if activation not in ("silu", "swish"):
            raise UsageError(f"{name}: the activation is {activation!r}, expected silu")
        return cls(*_parts_of(module, name), name)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis and gate it."""
        kernel, (rows, gates) = self._ready(x, gate)
        out = torch.empty_like(rows)
        kernel(rows, gates, self.weight, self.eps, out)
        return out.view(x.shape)


def _parts_of(module: torch.nn.Module, name: str) -> tuple[torch.Tensor, float]:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if eps is None or weight is None or weight.dim() != 1:
        raise UsageError(f"{name}: {type(module).__name__} has no weight (H,) or no epsilon of its own")
    return weight, float(eps)


class _Bound:
    """A kernel shared by copies of a module, and absent from pickles."""

    def __init__(self, found: Kernel) -> None:
        self.found = found

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Bound":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    """Return None, the value of a kernel loaded in another process."""
