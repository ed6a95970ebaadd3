"""SwiGLU with NVFP4 weights."""

import torch
from kernel_muster.registry.errors import UsageError
from kernel_muster.torch.kernels import Kernels
from kernel_muster.torch.modules.layer_ops import nvfp4_gate_up
from kernel_muster.torch.modules.linear import Nvfp4Linear, phase_of
from kernel_muster.torch.modules.plans import SwiGluPlan

_PARTS = ("gate_proj", "up_proj", "down_proj")
_SILU = ("silu", "SiLUActivation", "SiLU", "swish")


class SwiGLU(torch.nn.Module):
    """``down(silu(gate x) * up x)``, with the names of a transformers MLP: ``gate_proj``, ``up_proj``, ``down_proj``.

    Gate, up and their product are rounded to BF16, also where one launch makes all three.
    """

    def __init__(self, gate: Nvfp4Linear, up: Nvfp4Linear, down: Nvfp4Linear, name: str = "mlp") -> None:
        super().__init__()
        sizes = (gate.in_features, gate.out_features)
        wrong = (up.in_features, up.out_features) != sizes or (down.out_features, down.in_features) != sizes
        if wrong or any(one.bias is not None for one in (gate, up, down)):
            raise UsageError(f"{name}: gate, up and down must be (I, H), (I, H) and (H, I) without a bias")
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.name = name
        self.plan: SwiGluPlan | None = None

    @classmethod
    def of_module(cls, module: torch.nn.Module, name: str = "mlp") -> "SwiGLU":
        """Make one from a transformers MLP with SiLU, from parts accepted by ``Nvfp4Linear.of_module``."""
        if missing := [part for part in _PARTS if not isinstance(getattr(module, part, None), torch.nn.Module)]:
            raise UsageError(f"{name}: {type(module).__name__} has no {', '.join(missing)}")
        activation = getattr(module, "act_fn", None)
        shown = getattr(activation, "__name__", type(activation).__name__)
        if shown not in _SILU:
            raise UsageError(f"{name}: the activation is {shown}, expected SiLU: no kernel has another")
        gate, up, down = (Nvfp4Linear.of_module(getattr(module, part), f"{name}.{part}") for part in _PARTS)
        return cls(gate, up, down, name)

    def bind(self, kernels: Kernels) -> "SwiGLU":
        """Look the kernels up and let each projection make its copies."""
        gate = self.gate_proj
        plan = SwiGluPlan(kernels, self.name, gate.in_features, gate.out_features)
        self.plan = plan
        for part, its in zip((gate, self.up_proj, self.down_proj), (plan.gate, plan.up, plan.down), strict=True):
            part.take(its)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all three projections."""
        if self.plan is None:
            raise UsageError(f"{self.name}: no kernels are bound: call kernel_muster.torch.bind(model, kernels)")
        gate, up = self.gate_proj, self.up_proj
        gate.ready(x)
        up.ready(x)
        act = nvfp4_gate_up(x, gate.copies, gate.forms, up.copies, up.forms, self.plan.token, phase_of(x))
        out: torch.Tensor = self.down_proj(act)
        return out
