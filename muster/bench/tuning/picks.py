"""The dispatched arm at each measured point, for a set of levers, beside cuBLAS and the fastest arm."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernel_muster.bench.tuning.questions import choice_of, shape_of
from kernel_muster.bench.tuning.source import BF16_ARMS, CUBLAS, GEMV, TILES_OF_3, Timing
from kernel_muster.models.policy.gemv import TIERS, WIDE_TIER
from kernel_muster.models.policy.phase import Phase
from kernel_muster.models.policy.projection import projection_arm
from kernel_muster.registry.levers import Levers


@dataclass(frozen=True)
class Pick:
    """The dispatched arm at a point, its time, our fastest arm, and cuBLAS if measured."""

    features: int
    depth: int
    rows: int
    arm: str
    us: float
    fastest: str
    fastest_us: float
    cublas_us: float | None

    @property
    def is_slower(self) -> bool:
        """Whether cuBLAS in BF16 is faster than the dispatched arm."""
        return self.cublas_us is not None and self.us > self.cublas_us


def picks(timings: Sequence[Timing], levers: Levers, phase: Phase = "decode") -> Iterator[Pick]:
    """Yield the dispatched arm for NVFP4 weights, without points at which it was not measured."""
    for timing in timings:
        arm = pick(timing, levers, phase)
        ours = {name: us for name, us in timing.us.items() if name not in (CUBLAS, TILES_OF_3, *BF16_ARMS)}
        if arm in ours:
            fastest = min(ours, key=ours.__getitem__)
            place = (timing.features, timing.depth, timing.rows)
            yield Pick(*place, arm, ours[arm], fastest, ours[fastest], timing.us.get(CUBLAS))


def pick(timing: Timing, levers: Levers, phase: Phase) -> str:
    """Return the arm of a projection that has every measured one."""
    gemm = choice_of(timing, levers)
    there = () if gemm is None else (gemm,)
    tiers = (*TIERS, WIDE_TIER) if GEMV in timing.us else ()
    if projection_arm(shape_of(timing), phase, tiers, there, levers) == "gemv":
        return GEMV
    return str(gemm)
