"""Launching the argmax: several blocks a row, up to a limit."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.plugins._cuda.launching import ceil_div, cuda_kernel, multiprocessors_of, width_of
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import Counters

_SOURCE = Path(__file__).with_name("argmax.cu")
# Loads of a block in flight together. A warp waits for the words of 32 blocks at once.
_LOADS_PER_BLOCK, _MAX_BITS = prod(constants(_SOURCE, "THREADS", "LOADS")), 5


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    rows, width = bound.dims["M"], bound.dims["V"]
    if width == 0:
        raise ContractError(f"logits has shape {bound.views['logits'].shape}, expected at least one logit a row")
    vector = width_of(width)
    bits = min(_MAX_BITS, (ceil_div(width // vector, _LOADS_PER_BLOCK) - 1).bit_length())
    # The last block of a row waits for the others, so that all of them must be resident.
    if rows > multiprocessors_of(bound.views["logits"].device):
        bits = 0
    blocks = 1 << bits
    arguments = (bound.views["logits"], bound.views["out"], Counters(8 * rows * blocks, "partials"), width, bits)
    return LaunchPlan(f"argmax_bf16_w{vector}", (rows * blocks, 1, 1), arguments)


ARGMAX = cuda_kernel(
    _SOURCE,
    tuple(EntryPoint(f"argmax_bf16_w{width}", ("ptr", "ptr", "ptr", "i32", "i32")) for width in (1, 8)),
    _plan,
)
