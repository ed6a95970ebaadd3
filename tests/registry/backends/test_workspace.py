"""Memory of launches besides their arguments, as far as no device is needed."""

import numpy as np
import pytest
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.runners import LaunchOptions
from kernel_muster.registry.launch.workspace import (
    Counters,
    Scratch,
    TensorMap,
    check_scratch,
    encode_tensor_map,
    place_workspace,
    regions_of,
)


def plans(*arguments):
    return tuple(LaunchPlan("entry", (1, 1, 1), (part,)) for part in arguments)


def on_device(shape, pointer=4096, device=0, strides=None, writable=True):
    return ArrayView(pointer, np.dtype(np.uint8), shape, strides or (1,), device, writable, None)


def test_parts_of_one_name_share_a_region_of_the_largest_size():
    regions = regions_of(plans(Scratch(100), Scratch(300), Scratch(1, "more"), Counters(8)), Scratch)
    assert regions.offsets == {"scratch": 0, "more": 512}
    assert regions.size_bytes == 768


def test_plans_without_parts_need_nothing():
    assert regions_of(plans(1, 2.0), Scratch).size_bytes == 0
    places = place_workspace("acme::mul", plans(1, 2.0), LaunchOptions(), 0)
    assert (places.pointers, places.owners) == ({}, ())


@pytest.mark.parametrize(
    ("view", "problem"),
    [
        (on_device((256,), device=-1), "lies in host memory, expected cuda:0"),
        (on_device((256,), device=1), "lies in cuda:1, expected cuda:0"),
        (on_device((255,)), "has 255 bytes, expected at least 256"),
        (on_device((256,), pointer=4112), "expected a multiple of 256 bytes"),
        (on_device((256,), strides=(2,)), "expected no gaps"),
        (on_device((256,), writable=False), "is read-only"),
    ],
)
def test_scratch_that_does_not_serve_is_refused(monkeypatch, view, problem):
    monkeypatch.setattr("kernel_muster.registry.launch.workspace.view_of", lambda given: given)
    with pytest.raises(ContractError, match=problem):
        check_scratch("acme::mul", view, 256, 0)
    check_scratch("acme::mul", on_device((256,)), 256, 0)


def test_scratch_that_is_no_array_is_refused():
    with pytest.raises(ContractError, match="acme::mul: scratch is int, expected an array on cuda:0"):
        check_scratch("acme::mul", 7, 256, 0)


@pytest.mark.parametrize(
    "view", [on_device((4, 4, 4), strides=(16, 4, 1)), ArrayView(0, np.dtype("i8"), (2, 2), (16, 8), 0, True, None)]
)
def test_tensor_map_of_what_is_no_matrix_of_a_known_dtype_is_refused(view):
    with pytest.raises(ContractError, match="acme::mul: no tensor map of shape"):
        encode_tensor_map("acme::mul", TensorMap(view, (8, 64)))


@pytest.mark.parametrize("kind", [Scratch, Counters])
@pytest.mark.parametrize("size", [-5, 1.5, "8", None, True])
def test_part_whose_size_is_no_count_of_bytes_is_refused(kind, size):
    with pytest.raises(ContractError, match=f"{kind.__name__} x: size_bytes is {size!r}, expected an int from 0 up"):
        kind(size, "x")


def test_parts_of_no_bytes_have_a_place_and_take_no_memory():
    places = place_workspace("acme::mul", plans(Scratch(0), Counters(0), 1), LaunchOptions(), 0)
    assert (places.pointers, places.owners) == ({Scratch(0): 0, Counters(0): 0}, ())


@pytest.mark.parametrize("strides", [(64, 2), (1, 8), (16, -1)])
def test_tensor_map_of_a_view_with_gaps_in_its_rows_is_refused(strides):
    with pytest.raises(ContractError, match=f"columns are {strides[1]} bytes apart, expected 1: no gaps in a row"):
        encode_tensor_map("acme::mul", TensorMap(on_device((8, 16), strides=strides), (8, 16)))
