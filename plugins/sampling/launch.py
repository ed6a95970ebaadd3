"""Launching the sampling kernels: several blocks share a row of logits."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import Counters

_FOLDER = Path(__file__).parent
_SEQUENCES_A_BLOCK = 4
# All masses of a row together stay below 2^62; the largest logit has 2^62 over the next power of two of V.
_MASS_BITS = 62
# ranking.cuh and largest.cuh: what a list is made for, words that a lane of all warps reads, and the sums of a row.
_MOST_WANTED, _THREADS, _POSTS_A_LANE = 128, 256, 8 * 4
_JOINT_BYTES = 16 + 3 * 256 * 8
# 32 lanes of the merging block read what a warp of one block posted, or of two; four blocks fit on a multiprocessor.
_LANES, _MOST_BLOCKS, _BLOCKS_A_MULTIPROCESSOR = 32, 64, 4


def _check_logits(bound: Bound) -> None:
    """Raise ContractError where a row has no logit."""
    if bound.dims["V"] == 0:
        raise ContractError(f"logits has shape {bound.views['logits'].shape}, expected at least one logit a row")


def row_bits_of(rows: int, width: int, multiprocessors: int) -> int:
    """Return the logarithm to base 2 of the blocks of a row of ``width`` logits: all run at once, of a piece a thread.

    A block waits for what others of its row have found, so that none may wait for its turn to begin. More than 32
    share a row only where a multiprocessor has one block, and a thread two vectors at most.
    """
    at_once = multiprocessors * _BLOCKS_A_MULTIPROCESSOR
    pieces = ceil_div(width // width_of(width), _THREADS)
    is_thin = width_of(width) > 1 and pieces <= 2 * _MOST_BLOCKS and rows * _MOST_BLOCKS <= multiprocessors
    return max(min(_MOST_BLOCKS >> (not is_thin), at_once // max(rows, 1), pieces), 1).bit_length() - 1


def _shared_out(
    bound: Bound, entry: str, names: tuple[str, ...], numbers: tuple[int | float, ...], joint: bool
) -> LaunchPlan:
    _check_logits(bound)
    rows, views = bound.dims["M"], bound.views
    bits = row_bits_of(rows, bound.dims["V"], multiprocessors_of(views["logits"].device))
    posts = Counters(8 * _POSTS_A_LANE * rows * min(1 << bits, _LANES), "posts")
    sums = Counters(_JOINT_BYTES * rows * joint, "joint")
    others = (views[name] for name in names)
    return LaunchPlan(entry, (rows << bits, 1, 1), (views["logits"], posts, bits, *numbers, *others, sums))


def _plan_sample(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    width = bound.dims["V"]
    unit = 2.0 ** (_MASS_BITS - width.bit_length())
    names = ("temperature", "top_k", "top_p", "uniform", "out")
    return _shared_out(bound, "sample_top_k_top_p", names, (width, unit), True)


def _plan_topk(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    k = bound.dims["k"]
    return _shared_out(bound, "topk_bf16", ("out_values", "out_ids"), (bound.dims["V"], k), k > _MOST_WANTED)


def _plan_verify(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    tensors = tuple(bound.views[name] for name in ("draft_ids", "target_ids", "out_accepted"))
    sequences = bound.dims["S"]
    grid = (ceil_div(sequences, _SEQUENCES_A_BLOCK), 1, 1)
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
