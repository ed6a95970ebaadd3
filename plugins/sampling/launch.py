"""Launching the sampling kernels: several blocks a row of logits."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import Counters

_FOLDER = Path(__file__).parent
_SEQUENCES_PER_BLOCK = 4
# The masses of a row have a sum below 2^62. The mass of the largest logit is 2^62 over the next power of two of V.
_MASS_BITS = 62
# The largest k of a list, threads and candidates of a block, and the size of RowWorkspace (radix_select.cuh).
(_MAX_LISTED_K,) = constants(_FOLDER / "radix_select.cuh", "MAX_LISTED_K")
_THREADS, _WARPS = constants(INCLUDE_DIR / "logits.cuh", "THREADS", "WARPS")
_CANDIDATES = _WARPS * constants(_FOLDER / "candidates.cuh", "CANDIDATES")[0]
_WORKSPACE_BYTES = 16 + 3 * 256 * 8
# 32 lanes of the merging block read the candidates of one block each, or of two. Four blocks fit on a multiprocessor.
_LANES, _MAX_BLOCKS, _BLOCKS_PER_MULTIPROCESSOR = 32, 64, 4


def _check_logits(bound: Bound) -> None:
    """Raise ContractError where a row has no logit."""
    if bound.dims["V"] == 0:
        raise ContractError(f"logits has shape {bound.views['logits'].shape}, expected at least one logit a row")


def row_bits_of(rows: int, width: int, multiprocessors: int) -> int:
    """Return the logarithm to base 2 of the blocks of a row of ``width`` logits, at least a vector a thread.

    Blocks of a row wait for each other, so that all of them must run at the same time. More than 32 blocks share a row
    only if each block has a multiprocessor, and each thread at most two vectors.
    """
    resident = multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
    blocks = ceil_div(width // width_of(width), _THREADS)
    is_thin = width_of(width) > 1 and blocks <= 2 * _MAX_BLOCKS and rows * _MAX_BLOCKS <= multiprocessors
    return max(min(_MAX_BLOCKS >> (not is_thin), resident // max(rows, 1), blocks), 1).bit_length() - 1


def _plan_rows(
    bound: Bound, entry: str, names: tuple[str, ...], numbers: tuple[int | float, ...], has_workspace: bool
) -> LaunchPlan:
    _check_logits(bound)
    rows, views = bound.dims["M"], bound.views
    bits = row_bits_of(rows, bound.dims["V"], multiprocessors_of(views["logits"].device))
    candidates = Counters(8 * _CANDIDATES * rows * min(1 << bits, _LANES), "candidates")
    workspace = Counters(_WORKSPACE_BYTES * rows * has_workspace, "workspace")
    others = (views[name] for name in names)
    return LaunchPlan(entry, (rows << bits, 1, 1), (views["logits"], candidates, bits, *numbers, *others, workspace))


def _plan_sample(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    width = bound.dims["V"]
    unit = 2.0 ** (_MASS_BITS - width.bit_length())
    names = ("temperature", "top_k", "top_p", "uniform", "out")
    return _plan_rows(bound, "sample_top_k_top_p", names, (width, unit), True)


def _plan_topk(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    k = bound.dims["k"]
    return _plan_rows(bound, "topk_bf16", ("out_values", "out_ids"), (bound.dims["V"], k), k > _MAX_LISTED_K)


def _plan_verify(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    tensors = tuple(bound.views[name] for name in ("draft_ids", "target_ids", "out_accepted"))
    sequences = bound.dims["S"]
    grid = (ceil_div(sequences, _SEQUENCES_PER_BLOCK), 1, 1)
    return LaunchPlan("verify_greedy", grid, (*tensors, sequences, bound.dims["n"]))


SAMPLE = cuda_kernel(
    _FOLDER / "sample.cu",
    (EntryPoint("sample_top_k_top_p", ("ptr", "ptr", "i32", "i32", "f32") + ("ptr",) * 6),),
    _plan_sample,
)
TOPK = cuda_kernel(
    _FOLDER / "topk.cu",
    (EntryPoint("topk_bf16", ("ptr", "ptr", "i32", "i32", "i32", "ptr", "ptr", "ptr")),),
    _plan_topk,
)
VERIFY_GREEDY = cuda_kernel(
    _FOLDER / "verify_greedy.cu", (EntryPoint("verify_greedy", ("ptr", "ptr", "ptr", "i32", "i32")),), _plan_verify
)
