"""Launching the sampling kernels: the blocks of a cluster share a row of logits where there are clusters."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, team_grid
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound

Entries = Mapping[str, EntryResources]

_FOLDER = Path(__file__).parent
_SEQUENCES_A_BLOCK = 4
# All masses of a row together stay below 2^62; the largest logit has 2^62 over the next power of two of V.
_MASS_BITS = 62


def _check_logits(bound: Bound) -> None:
    """Raise ContractError where a row has no logit."""
    if bound.dims["V"] == 0:
        raise ContractError(f"logits has shape {bound.views['logits'].shape}, expected at least one logit a row")


def _plan_sample(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    _check_logits(bound)
    tensors = tuple(views[name] for name in ("logits", "temperature", "top_k", "top_p", "uniform", "out"))
    unit = 2.0 ** (_MASS_BITS - dims["V"].bit_length())
    entry = "sample_top_k_top_p"
    return LaunchPlan(entry, team_grid(entries[entry], dims["M"]), (*tensors, unit, dims["V"]))


def _plan_topk(bound: Bound, entries: Entries) -> LaunchPlan:
    views, dims = bound.views, bound.dims
    _check_logits(bound)
    arguments = (views["logits"], views["out_values"], views["out_ids"], dims["V"], dims["k"])
    return LaunchPlan("topk_bf16", team_grid(entries["topk_bf16"], dims["M"]), arguments)


def _plan_verify(bound: Bound, entries: Entries) -> LaunchPlan:
    tensors = tuple(bound.views[name] for name in ("draft_ids", "target_ids", "out_accepted"))
    sequences = bound.dims["S"]
    grid = (ceil_div(sequences, _SEQUENCES_A_BLOCK), 1, 1)
    return LaunchPlan("verify_greedy", grid, (*tensors, sequences, bound.dims["n"]))


SAMPLE = cuda_kernel(
    _FOLDER / "sample.cu",
    (EntryPoint("sample_top_k_top_p", ("ptr",) * 6 + ("f32", "i32")),),
    _plan_sample,
)
TOPK = cuda_kernel(
    _FOLDER / "topk.cu",
    (EntryPoint("topk_bf16", ("ptr", "ptr", "ptr", "i32", "i32")),),
    _plan_topk,
)
VERIFY_GREEDY = cuda_kernel(
    _FOLDER / "verify_greedy.cu", (EntryPoint("verify_greedy", ("ptr", "ptr", "ptr", "i32", "i32")),), _plan_verify
)
