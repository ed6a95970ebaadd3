"""Launches of a compiled kernel on a real device: streams, graphs, overlap, and refused arguments."""

from dataclasses import replace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import device_memory
from kernel_muster.registry.contract.arrays import view_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def arguments(cupy):
    """Return a maker of device arguments for a GEMV of M rows, with the exact result."""

    def make(handle, rows, features=129, depth=256):
        memory = device_memory(0)
        case = km.Case("here", {"M": rows, "N": features, "K": depth})
        given = handle.contract.arguments(case, np.random.default_rng(rows))
        exact = handle.contract.reference(given, case.dims)["out"]
        weight = given["w"]
        arrays = {name: memory.to(v) for name, v in vars(weight).items() if isinstance(v, np.ndarray) and v.ndim}
        made = {"x": memory.to(given["x"]), "out": memory.to(given["out"])}
        return {**made, "w": handle.prepare_weight(replace(weight, **arrays))}, exact

    return make


def gemv(kernels, rows=2):
    return kernels.kernel("w4a16_gemv", "w4a16_gemv" if rows == 1 else f"w4a16_gemv_batch{rows}")


def as_float(cupy, array):
    return cupy.asnumpy(array).astype(np.float64)


def bits(cupy, array):
    return cupy.asnumpy(array).tobytes()


def raw(array):
    """Return BF16 as the integers that CuPy has every operation for."""
    return array.view(np.uint16)


def with_gaps(cupy, array, gap):
    """Return a copy whose rows lie some elements further apart."""
    wide = cupy.zeros((array.shape[0], array.shape[1] + gap), np.uint16)
    wide[:, :-gap] = raw(array)
    return wide.view(array.dtype)[:, :-gap]


# launches


def test_launch_gives_the_exact_result_rounded_to_bf16(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, exact = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    np.testing.assert_allclose(as_float(cupy, given["out"]), exact, rtol=2**-8, atol=1e-3)


def test_prepared_launch_on_a_stream_reads_what_the_arguments_hold_when_it_runs(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, exact = arguments(handle, 2)
    stream = cupy.cuda.Stream(non_blocking=True)
    launch = handle.prepare(**given)
    raw(given["x"])[...] = 0
    cupy.cuda.Device().synchronize()
    launch(stream)
    stream.synchronize()
    assert not as_float(cupy, given["out"]).any()
    fresh, _ = arguments(handle, 2)
    raw(given["x"])[...] = raw(fresh["x"])
    cupy.cuda.Device().synchronize()
    launch(stream)
    stream.synchronize()
    np.testing.assert_allclose(as_float(cupy, given["out"]), exact, rtol=2**-8, atol=1e-3)


def test_launch_inside_a_graph_capture_replays_to_the_same_bits(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    expected = bits(cupy, given["out"])
    stream = cupy.cuda.Stream(non_blocking=True)
    launch = handle.prepare(**given)
    stream.begin_capture()
    launch(stream)
    graph = stream.end_capture()
    raw(given["out"])[...] = 0
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    assert bits(cupy, given["out"]) == expected


def test_launch_that_may_overlap_gives_the_same_bits(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    expected = bits(cupy, given["out"])
    raw(given["out"])[...] = 0
    handle.prepare(**given, overlap=True)()
    cupy.cuda.Device().synchronize()
    assert bits(cupy, given["out"]) == expected


def test_rows_of_a_batch_have_the_bits_of_one_row(cupy, kernels, arguments):
    many, one = gemv(kernels, 8), gemv(kernels, 1)
    given, _ = arguments(many, 8)
    many(**given)
    alone = cupy.empty_like(given["out"])
    for row in range(8):
        x, out = given["x"][row : row + 1].copy(), cupy.empty_like(alone[:1])
        one(x=x, w=given["w"], out=out)
        raw(alone)[row : row + 1] = raw(out)
    cupy.cuda.Device().synchronize()
    assert bits(cupy, alone) == bits(cupy, given["out"])


def test_no_rows_launch_nothing(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 0)
    handle(**given)
    cupy.cuda.Device().synchronize()


def test_rows_with_gaps_give_the_same_bits(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    handle(**given)
    out = cupy.empty_like(given["out"])
    handle(x=with_gaps(cupy, given["x"], 8), w=given["w"], out=out)
    cupy.cuda.Device().synchronize()
    assert bits(cupy, out) == bits(cupy, given["out"])


# refusals


def test_array_in_host_memory_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match="x lies in host memory, expected cuda:0"):
        handle(**{**given, "x": cupy.asnumpy(given["x"])})


def test_slice_that_begins_between_vector_loads_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    flat = cupy.zeros(given["x"].size + 1, np.uint16).view(given["x"].dtype)
    with pytest.raises(km.ContractError, match=r"x begins at 0x[0-9a-f]+, expected a multiple of 16 bytes"):
        handle(**{**given, "x": flat[1:].reshape(given["x"].shape)})


def test_every_second_value_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    wide = cupy.zeros((2, 2 * given["x"].shape[1]), np.uint16).view(given["x"].dtype)
    with pytest.raises(km.ContractError, match=r"x has strides .*, expected a contiguous last axis"):
        handle(**{**given, "x": wide[:, ::2]})


def test_rows_that_begin_between_vector_loads_are_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match="expected a multiple of 8"):
        handle(**{**given, "x": with_gaps(cupy, given["x"], 1)})


def test_output_with_gaps_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match=r"out has shape .*, expected no gaps"):
        handle(**{**given, "out": with_gaps(cupy, given["out"], 8)})


def test_more_rows_than_the_tier_takes_are_refused(kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 3)
    with pytest.raises(km.ContractError, match="M is 3, expected at most 2"):
        handle(**given)


def test_stream_that_is_none_is_refused(kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match="stream is str, expected a CuPy or torch stream"):
        handle(**given, stream="stream 7")


# torch


def test_torch_tensors_go_in_without_a_copy_on_their_stream(cupy, kernels, arguments):
    import torch

    handle = gemv(kernels)
    given, exact = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    x = torch.from_numpy(cupy.asnumpy(raw(given["x"])).view(np.int16)).cuda().view(torch.bfloat16)
    assert view_of(x).pointer == x.data_ptr()
    out = torch.full(tuple(given["out"].shape), float("nan"), dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    handle(x=x, w=given["w"], out=out, stream=stream)
    stream.synchronize()
    np.testing.assert_allclose(out.double().cpu().numpy(), exact, rtol=2**-8, atol=1e-3)
    assert out.view(torch.uint8).cpu().numpy().tobytes() == bits(cupy, given["out"])


def test_torch_tensor_on_the_host_is_refused(kernels, arguments):
    import torch

    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    x = torch.zeros(tuple(given["x"].shape), dtype=torch.bfloat16)
    with pytest.raises(km.ContractError, match="x lies in host memory"):
        handle(**{**given, "x": x})
