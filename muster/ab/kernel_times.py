"""The times of the differing kernels alone, beside the end-to-end times."""

import statistics
from collections.abc import Sequence
from typing import Any

from kernel_muster.ab.measure.metering import Recorded
from kernel_muster.ab.result import Kernels

HOST = "host seconds in their launches, after the prefill, median of the repeats"
DEVICE = "all their launches of one step as a CUDA graph of their own, arms in turn, median of 25 replays"
#: Least length of replays, so the graph's own launch does not count.
_SHORTEST_REPLAY_US = 400.0
_ROUNDS = 25


def host_kernels(differing: tuple[str, ...], a: Sequence[dict[str, float]], b: Sequence[dict[str, float]]) -> Kernels:
    """Return the host time of the differing kernels in each run."""
    seconds = [statistics.median(sum(run.get(key, 0.0) for key in differing) for run in runs) for runs in (a, b)]
    return Kernels(differing=differing, seconds_a=seconds[0], seconds_b=seconds[1], method=HOST if differing else "")


def device_kernels(differing: tuple[str, ...], a: Recorded, b: Recorded, ordinal: int) -> Kernels:
    """Time the differing kernels of one recorded step of each arm on the device.

    They read the weights of all layers, which no cache holds at full size, and write to the step's outputs: afterwards
    no decode may run in these sequences.
    """
    launches = [[launch for key, launch in recorded if key in differing] for recorded in (a, b)]
    if not all(launches):
        return Kernels(differing=differing, seconds_a=0.0, seconds_b=0.0, method="")
    import cupy
    from kernel_muster.bench.timing import Timer

    with cupy.cuda.Device(ordinal):
        timer = Timer()
        graphs: dict[str, tuple[Any, int]] = {}
        for name, part in zip("AB", launches, strict=True):
            once = timer.capture(part, 1)
            timer.once(once)
            times = max(1, int(_SHORTEST_REPLAY_US / max(timer.once(once), 1.0)))
            graphs[name] = (timer.capture(part, times), times)
        timed = timer.race(graphs, _ROUNDS)
    return Kernels(
        differing=differing, seconds_a=timed["A"].us / 1e6, seconds_b=timed["B"].us / 1e6, method=DEVICE
    )  # fmt: skip
