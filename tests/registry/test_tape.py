"""Tapes: calls made while one is open can be enqueued again, and nothing else is kept."""

from contextlib import contextmanager, nullcontext
from types import ModuleType

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.errors import ContractError, UsageError
from kernel_muster.registry.launch.tape import Tape, enqueue, on_side_stream, open_tape


def triple(x, out):
    out[...] = x * 3


@pytest.fixture
def handle():
    signature = km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out")))
    contract = km.Contract(
        name="acme_triple", summary="out = 3 * x", signature=signature, cases=(km.Case("one", {"M": 1}),),
        reference=lambda arguments, dims: {"out": np.asarray(arguments["x"]) * 3},
        tolerance=km.Tolerance(1e-6, 0, "one rounding of f32"),
    )  # fmt: skip
    spec = km.KernelSpec(key="acme::triple", contract="acme_triple", archs=("cpu",), backend=km.PythonKernel(triple))
    module = ModuleType("acme")
    module.muster_contracts = km.hookimpl(lambda: [contract])
    module.muster_kernels = km.hookimpl(lambda: [spec])
    return km.open_registry("cpu", levers={}, local_plugins={"acme": module}).kernel("acme", "triple")


def f32(*values):
    return np.array(values, np.float32)


def test_tape_enqueued_again_computes_what_its_arrays_hold_then(handle):
    x, middle, out = f32(1), f32(0), f32(0)
    with Tape() as tape:
        handle(x=x, out=middle)
        enqueue(lambda stream=None: np.copyto(out, middle))
    assert out == f32(3)
    x[:] = 5
    tape()
    assert out == f32(15)
    assert len(tape) == 2


def test_call_outside_the_block_is_not_on_the_tape(handle):
    x, out = f32(1), f32(0)
    with Tape() as tape:
        pass
    handle(x=x, out=out)
    enqueue(lambda stream=None: None)
    assert out == f32(3)
    assert len(tape) == 0
    assert open_tape() is None


def test_tape_keeps_nothing_of_a_call_that_is_empty_or_refused(handle):
    with Tape() as tape:
        handle(x=f32(), out=f32())
        with pytest.raises(ContractError):
            handle(x=f32(1), out=f32(1, 2))
    assert len(tape) == 0


def test_inner_tape_takes_over_until_it_closes(handle):
    with Tape() as outer:
        with Tape() as inner:
            handle(x=f32(1), out=f32(0))
        handle(x=f32(1), out=f32(0))
    assert (len(outer), len(inner)) == (1, 1)


def test_kernel_overlaps_only_behind_a_kernel(handle):
    seen = []
    with Tape(overlap=True) as tape:
        for step in (lambda: handle(x=f32(1), out=f32(0)), lambda: enqueue(lambda stream=None: None)) * 2:
            seen.append(tape.overlap)
            step()
            seen.append(tape.overlap)
    assert seen == [False, True, True, False, False, True, True, False]
    assert Tape().overlap is False
    with Tape(overlap=True, follows=tape) as behind_copy:
        handle(x=f32(1), out=f32(0))
    assert seen[-1] is False is not Tape(overlap=True, follows=behind_copy).overlap


def test_scratch_of_a_tape_is_as_large_as_the_largest_launch_asks():
    made = []

    def make(size):
        made.append(bytearray(size))
        return made[-1]

    tape = Tape(make_scratch=make)
    assert tape.scratch(0) is None
    assert tape.scratch(8) is made[0]
    assert tape.scratch(4) is made[0]
    assert tape.scratch(16) is made[1]
    assert [len(one) for one in made] == [8, 16]
    assert Tape().scratch(8) is None


class Streams:
    """A side stream that records forks and joins, on streams that are names."""

    stream = "side"

    def __init__(self):
        self.order = []

    def fork(self, stream):
        self.order.append(("fork", stream))

    def join(self, stream):
        self.order.append(("join", stream))

    def launch(self, name):
        return lambda stream=None: self.order.append((name, stream))


def test_launches_beside_run_on_the_lane_between_fork_and_join():
    side_stream = Streams()
    with Tape(side_stream=side_stream) as tape:
        enqueue(side_stream.launch("before"))
        with on_side_stream() as side:
            enqueue(side_stream.launch("aside"))
        enqueue(side_stream.launch("main"))
        side.join()
        side.join()
        enqueue(side_stream.launch("after"))
    # While it is recorded, everything runs in line.
    assert side_stream.order == [(name, None) for name in ("before", "aside", "main", "after")]
    side_stream.order.clear()
    tape("stream")
    assert side_stream.order == [
        ("before", "stream"), ("fork", "stream"), ("aside", "side"), ("main", "stream"), ("join", "stream"),
        ("after", "stream"),
    ]  # fmt: skip
    assert len(tape) == 4


@pytest.mark.parametrize("tape", [None, Tape()])
def test_launches_beside_stay_in_line_without_a_lane(tape):
    order = []
    with nullcontext() if tape is None else tape:
        with on_side_stream() as side:
            enqueue(lambda stream=None: order.append("aside"))
        enqueue(lambda stream=None: order.append("main"))
        side.join()
    assert order == ["aside", "main"]
    if tape is not None:
        tape()
        assert order == ["aside", "main"] * 2


def test_first_kernels_behind_fork_and_join_wait_in_full(handle):
    with Tape(overlap=True, side_stream=Streams()) as tape:
        handle(x=f32(1), out=f32(0))
        with on_side_stream() as side:
            assert not open_tape().overlap
            handle(x=f32(1), out=f32(0))
            assert open_tape().overlap
        assert tape.overlap
        side.join()
        assert not tape.overlap


def test_memory_that_a_launch_owns_is_made_where_the_tape_keeps_it(handle):
    entered = []

    @contextmanager
    def keeping():
        entered.append("in")
        yield
        entered.append("out")

    with Tape(keeping=keeping, side_stream=Streams()) as tape:
        handle(x=f32(1), out=f32(0))
        with on_side_stream() as side:
            handle(x=f32(1), out=f32(0))
        side.join()
    assert entered == ["in", "out"] * 2
    assert len(tape) == 2


def test_tape_that_is_open_is_not_opened_again():
    tape = Tape()
    with tape:
        with pytest.raises(UsageError, match="this tape is open already"), tape:
            pass
        assert open_tape() is tape
    assert open_tape() is None
    with tape:
        enqueue(lambda stream=None: None)
    assert len(tape) == 1


@pytest.mark.parametrize("side_stream", [None, Streams()])
def test_join_in_its_own_block_is_refused(side_stream):
    with (
        pytest.raises(UsageError, match="leave the block first"),
        Tape(side_stream=side_stream),
        on_side_stream() as side,
    ):
        side.join()
    assert open_tape() is None


def test_block_that_nothing_waits_for_is_refused_at_the_end_of_the_tape():
    with pytest.raises(UsageError, match="before join"), Tape(side_stream=Streams()), on_side_stream():
        pass
    assert open_tape() is None


def test_second_block_before_the_join_is_refused():
    with Tape(side_stream=Streams()) as tape:
        with on_side_stream() as side:
            pass
        with pytest.raises(UsageError, match="in use"), on_side_stream():
            pass
        side.join()
        with on_side_stream() as again:
            pass
        again.join()
    assert tape.unjoined is None


def test_error_on_a_tape_goes_on_as_it_was_although_a_join_is_missing():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Tape(side_stream=Streams()), on_side_stream():
        fail()
    with pytest.raises(ZeroDivisionError), Tape(side_stream=Streams()):
        unjoined_then(fail)
    assert open_tape() is None


def unjoined_then(fail):
    with on_side_stream():
        pass
    fail()
