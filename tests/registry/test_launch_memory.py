"""Launches with the caller's scratch, counters and checks."""

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.contract.arrays import view_of
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.launch.runners import LaunchOptions
from kernel_muster.registry.launch.workspace import Counters, Scratch, place_workspace


class Memory:
    """An allocator that keeps what it gave."""

    def __init__(self):
        self.given = []

    def empty(self, size_bytes):
        self.given.append(("empty", size_bytes))
        return np.full(size_bytes, 255, np.uint8)

    def zeros(self, size_bytes):
        self.given.append(("zeros", size_bytes))
        return np.zeros(size_bytes, np.uint8)


def test_scratch_and_counters_come_from_the_callers_memory():
    scratch, counters, memory = Scratch(300), Counters(4), Memory()
    plans = [LaunchPlan("one", (1, 1, 1), (scratch, counters))]
    places = place_workspace("test", plans, LaunchOptions(memory=memory), 0)
    assert memory.given == [("empty", 512), ("zeros", 256)]
    own, zeros = places.owners
    assert places.pointers == {scratch: view_of(own).pointer, counters: view_of(zeros).pointer}


def test_plan_without_either_asks_the_callers_memory_for_nothing():
    memory = Memory()
    places = place_workspace("test", [LaunchPlan("one", (1, 1, 1), (7,))], LaunchOptions(memory=memory), 0)
    assert memory.given == []
    assert places.owners == ()


def test_check_refuses_what_a_call_refuses_and_launches_nothing():
    handle = km.open_registry("cpu", levers={}).kernel("silu", "silu_mul")
    gate, out = np.ones((2, 16), "f4"), np.full((2, 16), 7, "f4")
    with pytest.raises(km.ContractError, match="gate has dtype float32, expected bf16"):
        handle.check((gate, gate, out))
    seen = []

    def as_bf16(array):
        seen.append(array)
        view = view_of(array)
        return type(view)(0, numpy_dtype("bf16"), view.shape, (32, 2), view.device, True, array)

    handle.check((gate, gate, out), as_bf16)
    assert len(seen) == 3
    assert bool((out == 7).all())
