"""Copies of rows in the host's memory. The tests in tests/gpu cover those of a device."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.memory import memory as memories
from kernel_muster.models.memory.memory import (
    DeviceMemory,
    HostMemory,
    copy_rows,
    enough_memory,
    memory_of,
    need_device,
    zero,
)
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import ContractError, UsageError
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.launch.tape import Tape


def test_rows_are_copied_bit_for_bit_with_gaps_on_either_side() -> None:
    source = np.arange(24, dtype=np.float32).astype(numpy_dtype("bf16")).reshape(4, 6)
    into = np.zeros((4, 8), numpy_dtype("bf16"))
    copy_rows(into[:, 2:6], source[:, 1:5])
    expected = np.zeros((4, 8), numpy_dtype("bf16"))
    expected[:, 2:6] = source[:, 1:5]
    assert into.tobytes() == expected.tobytes()


def test_copy_is_kept_on_an_open_tape() -> None:
    source, into = np.ones(4, np.float32), np.zeros(4, np.float32)
    with Tape() as tape:
        copy_rows(into, source)
    source[:] = 7
    tape()
    assert into.tolist() == [7] * 4


@pytest.mark.parametrize("wrong", [np.zeros((2, 3), np.float32), np.zeros((2, 4), np.int32)])
def test_rows_that_do_not_fit_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(ContractError, match="do not fit each other"):
        copy_rows(wrong, np.zeros((2, 4), np.float32))


def test_nothing_to_copy_is_no_launch() -> None:
    with Tape() as tape:
        copy_rows(np.zeros((0, 4)), np.zeros((0, 4)))
    assert len(tape) == 0


def test_host_memory_gives_arrays_of_every_type_and_copies_out() -> None:
    memory = memory_of(CPU_TARGET)
    assert isinstance(memory, HostMemory)
    assert memory.zeros((2, 3), "bf16").dtype == numpy_dtype("bf16")
    array = np.ones(3, np.float32)
    assert memory.put(array) is array
    out = memory.get(array)
    zero(array)
    assert out.tolist() == [1, 1, 1]
    assert array.tolist() == [0, 0, 0]


def test_architecture_without_a_device_has_the_hosts_memory_and_no_weights() -> None:
    target = Target("sm_90a", parse_arch("sm_90a"))
    assert not isinstance(memory_of(target), DeviceMemory)
    with pytest.raises(UsageError, match="tiny with weights: sm_90a is an architecture without a device"):
        need_device(target, "tiny with weights")
    need_device(CPU_TARGET, "tiny with weights")


def test_full_memory_is_a_usage_error_that_says_for_what() -> None:
    said = r"a cache does not fit into memory \(0\.0 GiB held by then\): 9 GiB; fewer"
    with pytest.raises(UsageError, match=said), enough_memory(HostMemory(), "a cache"):
        raise MemoryError("9 GiB")
    with pytest.raises(ValueError, match="other"), enough_memory(HostMemory(), "a cache"):
        raise ValueError("other")


class Pool:
    """A pool of CuPy's: what arrays hold, and what it keeps for others."""

    def __init__(self) -> None:
        self.used, self.kept = 0, 8

    def malloc(self, size: int) -> None:
        raise AssertionError(size)

    def free_all_blocks(self) -> None:
        self.kept = 0

    def total_bytes(self) -> int:
        return self.used + self.kept


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    cuda = SimpleNamespace(Device=lambda ordinal: nullcontext(), MemoryPool=Pool, Stream=object)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(memories, "_LEFT", [])
    return cuda


def test_what_a_model_left_goes_back_when_the_next_ones_memory_is_made(cupy: Any) -> None:
    left = DeviceMemory(0)
    pools = (left.pool, left._passes)
    left.model = SimpleNamespace(memory=left)  # type: ignore[attr-defined]  # as models refer to themselves
    del left
    DeviceMemory(0)
    assert [pool.kept for pool in pools] == [0, 0]
    assert not set(pools) & set(memories._LEFT)


def test_pool_outlives_a_memory_whose_arrays_somebody_still_has(cupy: Any) -> None:
    left = DeviceMemory(0)
    pool: Any = left.pool
    pool.used = 4
    del left
    DeviceMemory(0)
    assert pool in memories._LEFT
    pool.used = 0
    DeviceMemory(0)
    assert pool not in memories._LEFT
