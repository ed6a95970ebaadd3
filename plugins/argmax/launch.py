"""Launching argmax: the blocks of a cluster share a row where there are clusters."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import cuda_kernel, team_grid, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    if dims["V"] == 0:
        raise ContractError(f"logits has shape {views['logits'].shape}, expected at least one logit a row")
    entry = f"argmax_bf16_w{width_of(dims['V'])}"
    return LaunchPlan(entry, team_grid(entries[entry], dims["M"]), (views["logits"], views["out"], dims["V"]))


ARGMAX = cuda_kernel(
    Path(__file__).with_name("argmax.cu"),
    tuple(EntryPoint(f"argmax_bf16_w{width}", ("ptr", "ptr", "i32")) for width in (1, 8)),
    _plan,
)
