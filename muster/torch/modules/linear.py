"""A linear layer with an NVFP4 weight."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from kernel_muster.registry.errors import UsageError
from kernel_muster.torch.kernels import Kernels
from kernel_muster.torch.modules.layer_ops import nvfp4_linear
from kernel_muster.torch.modules.plans import ProjectionPlan
from kernel_muster.torch.modules.state import (
    logical_state,
    logical_weight,
    module_state,
    quantised_state,
    read_state,
    rename_state,
)
from kernel_muster.torch.weights import logical_of, weight_of


class Nvfp4Linear(torch.nn.Module):
    """``x w^T (+ bias)``: ``x [..., K]`` BF16, ``w (N, K)`` NVFP4, each dot product in FP32 and rounded once to BF16.

    :meth:`bind` looks its kernels up and makes their copies of the weight, as buffers outside the state dict. The state
    dict is the logical weight, and also loads those of compressed-tensors and ModelOpt. Its dtypes never change, for
    any argument of :meth:`to`. The policy of ``models`` selects the kernel by rows. A call is a decode step if the
    axis before the last has one row, else a prefill. It has no gradient.
    """

    def __init__(
        self, state: Mapping[str, torch.Tensor], bias: torch.Tensor | None = None, name: str = "linear"
    ) -> None:
        super().__init__()
        for buffer, value in read_state(name, state).items():
            self.register_buffer(buffer, value)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.bfloat16))
        self.out_features, self.in_features = self.weight_packed.shape[0], 2 * self.weight_packed.shape[1]
        self.name = name
        self.plan: ProjectionPlan | None = None
        self.forms: list[str] = []
        self._copy_names: list[str] = []
        self._is_released = False

    @classmethod
    def of_weight(cls, weight: Any, bias: torch.Tensor | None = None, name: str = "linear") -> "Nvfp4Linear":
        """Make one from a logical row-major ``Nvfp4Weight``, of arrays or of tensors, and share its memory."""
        return cls(logical_state(weight), bias, name)

    @classmethod
    def of_module(cls, module: torch.nn.Module, name: str = "linear") -> "Nvfp4Linear":
        """Make one from a module: of compressed-tensors or ModelOpt in NVFP4, sharing its memory, or from a Linear.

        The weight of a Linear is quantised. ContractError for any other module.
        """
        found = module_state(module)
        weight = found.get("weight")
        plain = weight is not None and weight.is_floating_point() and "weight_packed" not in found
        state = quantised_state(name, weight) if plain and weight is not None else found
        return cls(state, getattr(module, "bias", None), name)

    def extra_repr(self) -> str:
        """Show sizes, and whether kernels are bound."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, bound={self.plan is not None}"

    def bind(self, kernels: Kernels) -> "Nvfp4Linear":
        """Look the kernels up, and make their copies if the weight lies on their device."""
        self.take(ProjectionPlan(kernels, self.name, (self.out_features, self.in_features)))
        return self

    def take(self, plan: ProjectionPlan) -> None:
        """Launch the kernels of a plan from now on."""
        self.plan = plan
        self.prepare()

    def prepare(self) -> None:
        """Make the copies of the weight anew: after its buffers were written to by hand. UsageError once released."""
        if self._is_released:
            raise UsageError(f"{self.name}: its weight was released, so that no copy can be made of it: load it again")
        self._drop_copies()
        plan = self.plan
        if plan is None or (plan.kernels.target.arch is not None and plan.kernels.ordinal is None):
            return
        if self.weight_packed.device != plan.kernels.device:
            return
        logical = logical_weight(self)
        for handle in plan.makers.values():
            weight = weight_of(handle.prepare_weight(logical_of(logical)))
            self.forms.append(weight.form)
            for tensor in weight.tensors:
                name = f"copy_{len(self._copy_names)}"
                self.register_buffer(name, tensor, persistent=False)
                self._copy_names.append(name)

    def release(self) -> None:
        """Free the logical weight and keep the kernels' copies. Then there is no state dict and no pickle."""
        if not self.forms:
            raise UsageError(f"{self.name}: has no copy of its weight yet: bind it on the device of its kernels first")
        kept = {tensor.data_ptr() for tensor in self.copies}
        for name in ("weight_packed", "weight_scale"):
            if getattr(self, name).data_ptr() not in kept:
                setattr(self, name, getattr(self, name).new_empty(0))
        self._is_released = True

    @property
    def copies(self) -> list[torch.Tensor]:
        """The tensors of all copies, in the order of their forms."""
        return [getattr(self, name) for name in self._copy_names]

    def ready(self, x: torch.Tensor) -> str:
        """Return the token of the kernels, or refuse an impossible call, with the reason."""
        if self.plan is None:
            raise UsageError(f"{self.name}: no kernels are bound: call kernel_muster.torch.bind(model, kernels)")
        if not self.forms:
            where = f"{self.weight_packed.device}, its kernels launch on {self.plan.kernels.device}"
            raise UsageError(f"{self.name}: its weight lies on {where}: move the module there")
        if x.requires_grad and torch.is_grad_enabled():
            raise UsageError(f"{self.name}: has no gradient: call it under torch.inference_mode() or torch.no_grad()")
        return self.plan.token

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project. A bias is added to the rounded product, with a second rounding."""
        out = nvfp4_linear(x, self.copies, self.forms, self.ready(x), phase_of(x))
        return out if self.bias is None else out + self.bias

    def _drop_copies(self) -> None:
        for name in self._copy_names:
            del self._buffers[name]
        self.forms, self._copy_names = [], []

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Nvfp4Linear":
        if not self._is_released:
            self._drop_copies()

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            made = fn(tensor)
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        super()._apply(moved, recurse)
        if not self._is_released:
            self.prepare()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self._is_released:
            raise UsageError(f"{self.name}: its weight was released: build the module again from the checkpoint")
        rename_state(prefix.rstrip(".") or self.name, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.prepare()

    def _save_to_state_dict(self, *args: Any) -> None:
        self._refuse_if_released("state dict")
        super()._save_to_state_dict(*args)

    def _refuse_if_released(self, what: str) -> None:
        if self._is_released:
            raise UsageError(
                f"{self.name}: its weight was released, so it has no {what}: keep it, or save the checkpoint"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled state: the logical weight. Its kernels and copies belong to this process."""
        self._refuse_if_released("pickle")
        state = self.__dict__.copy()
        state["_buffers"] = {name: one for name, one in self._buffers.items() if name not in self._copy_names}
        return state | {"plan": None, "forms": [], "_copy_names": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Nvfp4Linear":
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made


def phase_of(x: torch.Tensor) -> str:
    """Return the phase of a call: a prompt has several rows a sequence ``[..., S, K]``, a decode step one."""
    return "prefill" if x.dim() > 2 and x.shape[-2] > 1 else "decode"
