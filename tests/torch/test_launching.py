"""Launches that are kept: which call may take one, and for how long."""

import gc
import weakref

import numpy as np
import pytest
from kernel_muster.registry.contract import nvfp4

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
from kernel_muster.registry.launch.prepared import InOrder  # noqa: E402
from kernel_muster.torch.launching import KeptLaunches, key_of  # noqa: E402

pytestmark = pytest.mark.torch


class Launch:
    """A launch that counts its calls."""

    def __init__(self, calls, owns_memory):
        self.calls, self.owns_memory = calls, owns_memory

    def __call__(self, stream=None):
        self.calls.append(stream)


class Handle:
    """A handle that counts how often arguments were checked."""

    def __init__(self, owns_memory=False):
        self.checked, self.calls, self.owns_memory = [], [], owns_memory

    def borrow(self, arguments, stream, memory):
        self.checked.append(memory)
        return InOrder([Launch(self.calls, self.owns_memory)])


X, OUT = torch.zeros(4, 8), torch.zeros(4, 8)


def test_equal_arguments_are_checked_once_and_enqueued_each_time():
    kept, handle = KeptLaunches(), Handle()
    for _ in range(3):
        kept.enqueue(handle, (X, 1e-6, OUT), 7, "memory")
    assert handle.checked == ["memory"]
    assert handle.calls == [7, 7, 7]


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(4, 8), 1e-6, OUT),
        (X[:, :4], 1e-6, OUT),
        (X.view(8, 4), 1e-6, OUT),
        (X.t(), 1e-6, OUT),
        (X.view(torch.int32), 1e-6, OUT),
        (X, 1e-5, OUT),
        (X, None, OUT),
    ],
    ids=["address", "shape", "view", "strides", "dtype", "scalar", "none"],
)
def test_arguments_that_differ_in_anything_are_checked_anew(other):
    kept, handle = KeptLaunches(), Handle()
    for arguments in ((X, 1e-6, OUT), other):
        kept.enqueue(handle, arguments, 7, None)
    assert len(handle.checked) == 2


def test_another_kernel_or_stream_is_checked_anew():
    kept, first, second = KeptLaunches(), Handle(), Handle()
    for handle, stream in ((first, 7), (second, 7), (first, 8), (first, 7)):
        kept.enqueue(handle, (X, OUT), stream, None)
    assert (len(first.checked), len(second.checked)) == (2, 1)


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (0, False)])
def test_numbers_that_compare_equal_are_not_taken_for_each_other(one, other):
    assert key_of(None, 1, (one,)) != key_of(None, 1, (other,))


def weight(scale=0.5, **change):
    held = {
        "packed": torch.zeros(4, 8, dtype=torch.uint8),
        "block_scale": torch.zeros(4, 1, dtype=torch.uint8),
    } | change
    return nvfp4.Nvfp4Weight(held["packed"], held["block_scale"], np.asarray(scale, np.float32))


def test_weight_is_known_by_its_tensors_and_its_scale():
    packed, block_scale = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8)
    same = {"packed": packed, "block_scale": block_scale}
    key = key_of(None, 1, (weight(**same),))
    assert key is not None
    assert key == key_of(None, 1, (weight(**same),))
    assert key != key_of(None, 1, (weight(0.25, **same),))
    assert key != key_of(None, 1, (weight(packed=packed),))


def test_weight_with_an_array_of_the_host_is_checked_each_time():
    kept, handle = KeptLaunches(), Handle()
    logical = nvfp4.quantize(np.ones((4, 16), np.float32))
    for _ in range(2):
        kept.enqueue(handle, (X, logical, OUT), 7, None)
    assert len(handle.checked) == 2
    assert len(kept) == 0


def test_launch_with_memory_of_its_own_is_not_kept():
    kept, handle = KeptLaunches(), Handle(owns_memory=True)
    for _ in range(2):
        kept.enqueue(handle, (X, OUT), 7, None)
    assert (len(handle.checked), len(kept)) == (2, 0)


def test_no_argument_is_kept_alive():
    kept, handle = KeptLaunches(), Handle()
    tensor = torch.zeros(3, 5)
    seen = weakref.ref(tensor)
    kept.enqueue(handle, (tensor,), 7, None)
    del tensor
    gc.collect()
    assert seen() is None
    assert len(kept) == 1


def test_older_half_goes_when_there_are_too_many():
    kept, handle = KeptLaunches(most=4), Handle()
    for number in range(5):
        kept.enqueue(handle, (number,), 7, None)
    assert len(kept) == 3
    kept.enqueue(handle, (4,), 7, None)
    assert len(handle.checked) == 5
    kept.enqueue(handle, (0,), 7, None)
    assert len(handle.checked) == 6
