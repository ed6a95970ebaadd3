"""Operators of modules: they choose the kernel when they run, so that a compiled graph holds one for any rows.

A projection of ``x [..., K]`` BF16 returns ``[..., N]`` BF16, every dot product in FP32 and rounded once. ``plan`` is
the token of the module's kernels, ``forms`` stand for its copies of the weight, and ``weights`` are their tensors, one
after the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from kernel_muster.models.policy.phase import PHASES
from kernel_muster.registry.errors import ContractError, UsageError
from kernel_muster.torch.modules.plans import ProjectionPlan, SwiGluPlan, find_plan
from kernel_muster.torch.weights import form_of, rebuilt

NAMESPACE = "muster_layers"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class _Copies(dict[str, Any]):
    """A weight in each layout of its tensors, made when a kernel takes it."""

    def __init__(self, token: str, tensors: Sequence[torch.Tensor], forms: Sequence[str], on_host: bool) -> None:
        self._given = (token, tensors, forms, on_host)

    def __missing__(self, layout: str) -> Any:
        token, tensors, forms, on_host = self._given
        start = 0
        for form in forms:
            known = form_of(token, form)
            end = start + len(known.names)
            if known.layout == layout:
                weight = self[layout] = rebuilt(token, tensors[start:end], form, on_host)
                return weight
            start = end
        raise UsageError(f"{token}: has no copy of its weight in layout {layout}: bind the module again")


def _rows(token: str, x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return ``x`` as a matrix. ContractError if its last axis does not match the weight."""
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ContractError(f"{token}: x has shape {tuple(x.shape)}, expected (..., {columns})")
    if x.dtype != torch.bfloat16:
        raise ContractError(f"{token}: x has dtype {x.dtype}, expected torch.bfloat16")
    return x.reshape(-1, columns)


def _check(token: str, phase: str) -> Any:
    if phase not in PHASES:
        raise UsageError(f"{token}: phase is {phase!r}, expected {', '.join(PHASES)}")
    return phase


def _linear(x: torch.Tensor, weights: Sequence[torch.Tensor], forms: Sequence[str], plan: str, phase: str) -> Any:
    found: ProjectionPlan = find_plan(ProjectionPlan, plan)
    rows, columns = found.shape
    flat = _rows(plan, x, columns).contiguous()
    out = flat.new_empty((flat.shape[0], rows))
    copies = _Copies(plan, weights, forms, found.kernels.ordinal is None)
    found.project(copies, flat, out, _check(plan, phase))
    return out.view(*x.shape[:-1], rows)


def _traced_linear(x: Any, weights: Any, forms: Sequence[str], plan: str, phase: str) -> Any:
    rows, columns = find_plan(ProjectionPlan, plan).shape
    _rows(plan, x, columns)
    return x.new_empty((*x.shape[:-1], rows))


def _gate_up(
    x: torch.Tensor, gate: Sequence[torch.Tensor], gate_forms: Sequence[str], up: Sequence[torch.Tensor],
    up_forms: Sequence[str], plan: str, phase: str,
) -> Any:  # fmt: skip
    found: SwiGluPlan = find_plan(SwiGluPlan, plan)
    rows, columns = found.gate.shape
    flat, on_host = _rows(plan, x, columns).contiguous(), found.kernels.ordinal is None
    act = flat.new_empty((flat.shape[0], rows))
    copies = (_Copies(plan, gate, gate_forms, on_host), _Copies(plan, up, up_forms, on_host))
    found.activate(*copies, flat, act, _check(plan, phase))
    return act.view(*x.shape[:-1], rows)


def _traced_gate_up(x: Any, gate: Any, gate_forms: Any, up: Any, up_forms: Any, plan: str, phase: str) -> Any:
    rows, columns = find_plan(SwiGluPlan, plan).gate.shape
    _rows(plan, x, columns)
    return x.new_empty((*x.shape[:-1], rows))


def _define(name: str, schema: str, run: Any, traced: Any) -> Any:
    tags = tuple(getattr(torch.Tag, tag) for tag in ("pt2_compliant_tag",) if hasattr(torch.Tag, tag))
    _LIBRARY.define(f"{name}{schema}", tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", traced, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


nvfp4_linear = _define(
    "nvfp4_linear",
    "(Tensor x, Tensor[] weights, str[] forms, str plan, str phase) -> Tensor",
    _linear,
    _traced_linear,
)
nvfp4_gate_up = _define(
    "nvfp4_gate_up",
    "(Tensor x, Tensor[] gate, str[] gate_forms, Tensor[] up, str[] up_forms, str plan, str phase) -> Tensor",
    _gate_up,
    _traced_gate_up,
)
