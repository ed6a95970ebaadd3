"""Launching the sampling kernels: several blocks share a row of logits, clusters of them where there are clusters."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.workspace import Counters
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound
from kernel_muster.registry.values import frozen

Entries = Mapping[str, EntryResources]

_FOLDER = Path(__file__).parent
_SEQUENCES_A_BLOCK = 4
# All masses of a row together stay below 2^62; the largest logit has 2^62 over the next power of two of V.
_MASS_BITS = 62
# largest.cuh: what a list is made for, and blocks that share a row; four of 256 threads fit on a multiprocessor.
MOST_WANTED, _MOST_BLOCKS = 128, 32
_WARP, _THREADS, _THREADS_A_MULTIPROCESSOR = 32, 256, 1024


def _check_logits(bound: Bound) -> None:
    """Raise ContractError where a row has no logit."""
    if bound.dims["V"] == 0:
        raise ContractError(f"logits has shape {bound.views['logits'].shape}, expected at least one logit a row")


@frozen
class Shares:
    """How many blocks a row has, a power of two, and the words that they post for the merging one (largest.cuh)."""

    blocks: int
    stride: int


def shares_of(rows: int, width: int, wanted: int, entry: EntryResources, multiprocessors: int) -> Shares:
    """Return the blocks of a row of ``width`` logits: whole clusters, all of which run at once, of a piece a thread.

    A block waits for what others of its row post, so that none may wait for its turn to begin.
    """
    team = entry.cluster[0] if entry.cluster else 1
    threads = entry.max_threads or _THREADS
    pieces = width // width_of(width)
    at_once = multiprocessors * (_THREADS_A_MULTIPROCESSOR // threads)
    teams = min(_MOST_BLOCKS // team, at_once // max(rows * team, 1), ceil_div(pieces, threads * team))
    blocks = team << max(teams if wanted <= MOST_WANTED else 1, 1).bit_length() - 1
    busy = min(blocks, ceil_div(pieces, _WARP))
    least = min(wanted, MOST_WANTED, 2 * ceil_div(min(wanted, MOST_WANTED), busy) + 7)
    return Shares(blocks, blocks * (_WARP * ceil_div(2 * least + 1, _WARP) + 1))


def _shared_out(
    bound: Bound, entries: Entries, entry: str, names: tuple[str, ...], numbers: tuple[int | float, ...], wanted: int
) -> LaunchPlan:
    _check_logits(bound)
    rows, views = bound.dims["M"], bound.views
    device = views["logits"].device
    shares = shares_of(rows, bound.dims["V"], wanted, entries[entry], multiprocessors_of(device))
    posts = Counters(8 * rows * shares.stride, "posts")
    arguments = (*(views[name] for name in names), posts, *numbers, shares.blocks.bit_length() - 1, shares.stride)
    return LaunchPlan(entry, (rows * shares.blocks, 1, 1), arguments)


def _plan_sample(bound: Bound, entries: Entries) -> LaunchPlan:
    width = bound.dims["V"]
    unit = 2.0 ** (_MASS_BITS - width.bit_length())
    names = ("logits", "temperature", "top_k", "top_p", "uniform", "out")
    return _shared_out(bound, entries, "sample_top_k_top_p", names, (unit, width), min(MOST_WANTED, width))


def _plan_topk(bound: Bound, entries: Entries) -> LaunchPlan:
    numbers = bound.dims["V"], bound.dims["k"]
    return _shared_out(bound, entries, "topk_bf16", ("logits", "out_values", "out_ids"), numbers, bound.dims["k"])


def _plan_verify(bound: Bound, entries: Entries) -> LaunchPlan:
    tensors = tuple(bound.views[name] for name in ("draft_ids", "target_ids", "out_accepted"))
    sequences = bound.dims["S"]
    grid = (ceil_div(sequences, _SEQUENCES_A_BLOCK), 1, 1)
    return LaunchPlan("verify_greedy", grid, (*tensors, sequences, bound.dims["n"]))


SAMPLE = cuda_kernel(
    _FOLDER / "sample.cu",
    (EntryPoint("sample_top_k_top_p", ("ptr",) * 7 + ("f32", "i32", "i32", "i32")),),
    _plan_sample,
)
TOPK = cuda_kernel(
    _FOLDER / "topk.cu",
    (EntryPoint("topk_bf16", ("ptr",) * 4 + ("i32",) * 4),),
    _plan_topk,
)
VERIFY_GREEDY = cuda_kernel(
    _FOLDER / "verify_greedy.cu", (EntryPoint("verify_greedy", ("ptr", "ptr", "ptr", "i32", "i32")),), _plan_verify
)
