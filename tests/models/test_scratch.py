from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
from kernel_muster.models.memory.scratch import Scratch, ScratchPlan
from kernel_muster.registry.errors import ScratchError
from kernel_muster.registry.launch.tape import Tape, on_side_stream


def planned(size_bytes: int = 64) -> Scratch:
    plan = ScratchPlan()
    plan.use("layers.0", "tile", "q", size_bytes)
    plan.use("layers.0", "wide", "q", size_bytes, (1, 1))
    return Scratch(plan)


@pytest.mark.parametrize("steps", [(1, 2), (0, 0), (0, 9), (2, 2)])
def test_plan_two_live_users_of_one_buffer_are_refused(steps: tuple[int, int]) -> None:
    plan = ScratchPlan()
    plan.use("layers.0", "first", "q", 8, (0, 2))
    with pytest.raises(ScratchError, match=r"layers\.0: q is used by first in steps 0\.\.2 and by second"):
        plan.use("layers.0", "second", "q", 8, steps)


def test_plan_shares_a_buffer_between_lifetimes_and_scopes() -> None:
    plan = ScratchPlan()
    plan.use("layers.0", "first", "q", 8, (0, 1))
    plan.use("layers.0", "second", "q", 32, (2, 3))
    plan.use("layers.1", "first", "q", 16, (0, 1))
    plan.use("layers.1", "first", "k", 4, (0, 1))
    assert plan.buffers == {"k": 4, "q": 32}
    assert plan.total_bytes == 36
    assert plan.planned_bytes("q", "first") == 16


def test_plan_above_its_limit_is_refused_and_not_clamped() -> None:
    plan = ScratchPlan(limit_bytes=40)
    plan.use("a", "x", "q", 40)
    with pytest.raises(ScratchError, match="needs 48 bytes with k for y, the limit is 40"):
        plan.use("a", "y", "k", 8)


@pytest.mark.parametrize(("size", "steps"), [(-1, (0, 0)), (8, (1, 0))])
def test_plan_of_nonsense_is_refused(size: int, steps: tuple[int, int]) -> None:
    with pytest.raises(ScratchError):
        ScratchPlan().use("a", "x", "q", size, steps)


def test_lease_is_an_array_of_the_asked_type() -> None:
    with planned().lease("q", "tile", (2, 4)) as q:
        assert (q.shape, str(q.dtype), q.flags.c_contiguous) == ((2, 4), "bfloat16", True)
        q[...] = 1


def test_lease_above_the_plan_is_refused_and_not_clamped() -> None:
    with pytest.raises(ScratchError, match=r"tile needs 68 bytes for f32 \(17,\), planned were 64"):
        planned().lease("q", "tile", (17,), "f32").__enter__()


def test_lease_while_another_lives_is_refused() -> None:
    scratch = planned()
    with scratch.lease("q", "tile", (4,)), pytest.raises(ScratchError, match="wide wants it while tile uses it"):
        scratch.lease("q", "wide", (4,)).__enter__()
    with scratch.lease("q", "wide", (4,)):
        pass


def test_lease_ends_when_its_block_raises() -> None:
    scratch = planned()
    with pytest.raises(ValueError, match="oops"), scratch.lease("q", "tile", (4,)):
        raise ValueError("oops")
    with scratch.lease("q", "tile", (4,)):
        pass


def test_lease_by_somebody_who_planned_nothing_is_refused() -> None:
    with pytest.raises(ScratchError, match="nobody leases q, which it did not plan"):
        planned().lease("q", "nobody", (1,)).__enter__()


def use(scratch: Scratch, user: str = "tile", stream: object | None = None) -> None:
    with scratch.lease("q", user, (4,), stream=stream):
        pass


def test_lease_on_a_second_stream_is_refused() -> None:
    scratch, one, two = planned(), object(), object()
    for _ in range(3):
        use(scratch, stream=one)
    with pytest.raises(ScratchError, match=r"q: wide uses it on a second stream, beside tile, .*; join first"):
        use(scratch, "wide", two)


class SecondStream:
    stream = "side"

    def fork(self, stream: object | None) -> None:
        pass

    def join(self, stream: object | None) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["in line", "on two streams"])
def tape(request: pytest.FixtureRequest) -> Iterator[None]:
    """Launches with a second stream, and without one: what races there is refused here too."""
    with Tape(side_stream=SecondStream()) if request.param else nullcontext():
        yield


@pytest.mark.usefixtures("tape")
def test_lease_beside_launches_that_nothing_waits_for_is_refused() -> None:
    scratch = planned()
    use(scratch)
    with on_side_stream() as side:
        use(scratch)  # a block begins after all earlier launches
    with pytest.raises(ScratchError, match="wide uses it on a second stream, beside tile"):
        use(scratch, "wide")
    side.join()
    use(scratch, "wide")
    with on_side_stream() as again:
        use(scratch)
    again.join()


def test_lease_in_a_block_beside_one_that_nothing_waits_for_is_refused() -> None:
    scratch = planned()
    with on_side_stream():
        use(scratch)
    with on_side_stream(), pytest.raises(ScratchError, match="wide uses it on a second stream"):
        use(scratch, "wide")


def test_lease_reuses_one_allocation() -> None:
    sizes: list[int] = []

    def allocate(size: int) -> np.ndarray:
        sizes.append(size)
        return np.empty(size, np.uint8)

    scratch = Scratch(planned().plan, allocate)
    for user in ("tile", "wide", "tile"):
        with scratch.lease("q", user, (4,)):
            pass
    assert sizes == [64]
