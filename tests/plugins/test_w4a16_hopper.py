"""The Hopper GEMM without its device: the layout, the configuration of a shape, and its schedule."""

import re
from pathlib import Path

import numpy as np
import pytest
from kernel_muster.plugins import w4a16_hopper
from kernel_muster.plugins.w4a16_hopper import launch
from kernel_muster.plugins.w4a16_hopper.contracts import W4A16_HOPPER_GEMM
from kernel_muster.plugins.w4a16_hopper.layout import CHUNK_BYTES, CODE_BYTES, LAYOUT, to_wgmma_layout
from kernel_muster.plugins.w4a16_hopper.work import CONFIGS, Work, estimated_us, ranges_of, work_of
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import Case
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import Counters, Scratch, TensorMap

SOURCE = Path(w4a16_hopper.__file__).parent / "gemm.cu"


def weight(rows, columns, seed=0):
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return nvfp4.quantize(values)


# The layout, read as the kernel's lanes read it

# (row half h, pair p) -> bits of sign and of the magnitude's three bits inside a half word
PLACES = {(0, 0): (15, 8, 7, 6), (1, 0): (12, 5, 4, 3), (0, 1): (9, 2, 1, 0), (1, 1): (14, 11, 10, 13)}
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def as_lanes_read_it(laid_out):
    """Return the values of all chunks, ``[blocks * 64, chunks * 64]``, before the tensor's scale."""
    rows, columns = laid_out.shape
    blocks, chunks = -(-rows // 64), 2 * -(-columns // 128)
    data = laid_out.data.reshape(blocks, chunks, CHUNK_BYTES)
    words = np.ascontiguousarray(data[..., :CODE_BYTES]).view("<u4").reshape(blocks, chunks, 4, 8, 4, 4)
    scales = data[..., CODE_BYTES:].reshape(blocks, chunks, 4, 8, 2, 4).astype(np.float64)
    scales = np.where(scales == 0, 0.0, (1 + scales % 8 / 8) * 2.0 ** (scales // 8 - 21))
    values = np.zeros((blocks, 4, 2, 8, chunks, 4, 2, 4, 2))  # block, w, h, g, chunk, j, p, t, e
    for e in range(2):
        half = words >> (16 * e)
        for (h, p), (sign, *bits) in PLACES.items():
            magnitude = sum(((half >> bit) & 1) << (2 - i) for i, bit in enumerate(bits))
            value = np.where((half >> sign) & 1, -1.0, 1.0) * np.take(MAGNITUDES, magnitude)
            value = value * scales[:, :, :, :, h, np.newaxis, :]  # block, chunk, w, g, t, j
            values[:, :, h, :, :, :, p, :, e] = value.transpose(0, 2, 3, 1, 5, 4)
    return values.reshape(blocks * 64, chunks * 64)


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (64, 64), (65, 80), (200, 272)])
def test_layout_read_by_lanes_is_the_weight_padded_with_zeros(rows, columns):
    logical = weight(rows, columns)
    values = as_lanes_read_it(to_wgmma_layout(logical))
    scaled = values[:rows, :columns] * float(logical.global_scale_decode)
    assert np.array_equal(scaled, nvfp4.dequantize(logical))
    assert not values[rows:].any()
    assert not values[:, columns:].any()


def test_layout_of_subnormal_and_zero_scales_is_exact():
    logical = weight(16, 64)
    logical.block_scale[:, 0], logical.block_scale[:, 1] = np.arange(16), 0x7E
    values = as_lanes_read_it(to_wgmma_layout(logical))[:16, :64]
    assert np.array_equal(values * float(logical.global_scale_decode), nvfp4.dequantize(logical))


def test_layout_is_the_same_from_the_transposed_copy():
    logical = weight(70, 96)
    assert to_wgmma_layout(nvfp4.transpose(logical)).data.tobytes() == to_wgmma_layout(logical).data.tobytes()


def test_layout_in_several_steps_is_that_of_one(monkeypatch):
    whole = to_wgmma_layout(weight(300, 48)).data.tobytes()
    monkeypatch.setattr("kernel_muster.plugins.w4a16_hopper.layout._ROWS_A_STEP", 64)
    assert to_wgmma_layout(weight(300, 48)).data.tobytes() == whole


@pytest.mark.parametrize("scale", [0x7F, 0xFF, 0xB8])
def test_layout_of_a_nan_or_negative_scale_is_refused(scale):
    logical = weight(16, 32)
    logical.block_scale[3, 1] = scale
    with pytest.raises(ContractError, match=f"{LAYOUT}: a block scale is NaN or negative"):
        to_wgmma_layout(logical)


def test_layout_of_experts_is_refused():
    experts = nvfp4.Nvfp4Weight(np.zeros((2, 4, 8), np.uint8), np.zeros((2, 4, 1), np.uint8), np.ones(2, np.float32))
    with pytest.raises(ContractError, match=r"weight has shape \(2, 4, 16\), expected \(N, K\)"):
        to_wgmma_layout(experts)


# Forms


def test_forms_are_those_of_the_source():
    pattern = r"^GEMM\((\w+), (\d+), (\d+), (\d+), (\d+), (true|false)\)$"
    found = re.findall(pattern, SOURCE.read_text(), re.MULTILINE)
    assert {name: (*map(int, numbers), gathers == "true") for name, *numbers, gathers in found} == {
        name: (config.tokens, config.warpgroups, config.span, config.stages, config.cost.gather is not None)
        for name, config in CONFIGS.items()
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_form_fits_into_a_multiprocessor(config):
    assert config.shared_bytes + 1024 <= 228 * 1024
    assert config.threads <= 1024


# Work: pieces as gemm.cuh cuts them, walked here by the same rules


def pieces(work, rows, features, depth):
    """Yield ``(worker, tile, first step, last step)`` of every worker in its order."""
    config = CONFIGS[work.entry]
    tiles, steps = config.tiles(rows, features), config.steps(depth)
    ranges = ranges_of(work, rows, features, depth)
    for worker in range(work.workers):
        for done in range(work.whole):
            if (tile := done * work.workers + worker) < tiles:
                yield worker, tile, 0, steps
        line, place = divmod(worker, ranges.workers)
        at, end = (ranges.stages * i + min(i, ranges.remainder) for i in (place, place + 1))
        while at < end:
            tile, begin = divmod(at, steps)
            stop = min(steps, begin + end - at)
            yield worker, work.whole * work.workers + line + tile, begin, stop
            at += stop - begin


SIZES = [
    (m, n, k)
    for m in (1, 17, 32, 33, 64, 100, 128, 129, 192, 256, 300, 512, 1000, 4096)
    for n, k in ((1, 16), (130, 272), (2048, 4096), (5120, 6144), (5120, 17408), (17408, 5120))
]


@pytest.mark.parametrize("multiprocessors", [1, 78, 114, 132])
@pytest.mark.parametrize(("rows", "features", "depth"), SIZES)
def test_work_covers_every_step_of_every_tile_once(rows, features, depth, multiprocessors):
    work = work_of(rows, features, depth, multiprocessors)
    config, steps = CONFIGS[work.entry], CONFIGS[work.entry].steps(depth)
    assert 1 <= work.workers <= multiprocessors
    parts = {}
    for worker, tile, begin, end in pieces(work, rows, features, depth):
        parts.setdefault(tile, []).append((begin, end, worker))
    assert sorted(parts) == list(range(config.tiles(rows, features)))
    handed_over = []
    for shares in parts.values():
        begins, ends, workers = zip(*sorted(shares), strict=True)
        assert (0, *ends) == (*begins, steps)
        # The worker with the beginning waits for the workers after it, which are launched before it.
        assert list(workers) == list(range(workers[0], workers[0] + len(workers)))
        handed_over += workers[1:]
    assert len(set(handed_over)) == len(handed_over)  # each has one place for its sums


def bound(rows=40, features=200, depth=272, x=None, laid_out=None):
    dims = {"M": rows, "N": features, "K": depth}
    arguments = W4A16_HOPPER_GEMM.arguments(Case("here", dims), np.random.default_rng(3))
    arguments = {name: value for name, value in arguments.items() if name in W4A16_HOPPER_GEMM.signature.names}
    arguments["w"] = laid_out or to_wgmma_layout(weight(features, depth))
    return W4A16_HOPPER_GEMM.signature.bind("test", (), {**arguments, **({} if x is None else {"x": x})})


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors_of", lambda ordinal: 132)


def test_launch_has_a_place_for_the_sums_of_every_worker(one_gpu):
    arguments = bound()
    (plan,) = launch.GEMM.plan(arguments, {})
    work = work_of(40, 200, 272, 132)
    config = CONFIGS[work.entry]
    assert (plan.entry, plan.grid, plan.dynamic_shared_bytes) == (work.entry, (work.workers, 1, 1), config.shared_bytes)
    tensor_map, _, _, scratch, counters, scale, *sizes = plan.arguments
    assert tensor_map == TensorMap(arguments.views["x"], (40, 64))
    assert scratch == Scratch(4 * work.workers * config.rows * config.tokens)
    assert counters == Counters(4 * work.workers * config.warpgroups)
    assert scale == arguments.arguments["w"].global_scale_decode
    ranges = ranges_of(work, 40, 200, 272)
    assert sizes == [40, 200, 272, 40, work.whole, ranges.workers, ranges.stages, ranges.remainder]
    assert plan.cluster == (None if work.cluster == 1 else (work.cluster, 1, 1))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_boxes_of_a_form_are_even_cover_the_rows_and_hardly_reach_beyond_them(config):
    for rows in range(1, 3 * config.tokens + 2):
        tokens, tiles = config.even_tokens(rows), config.tiles(rows, 1)
        assert 1 <= tokens <= config.tokens
        assert rows <= tokens * tiles < rows + tiles


def test_launch_of_rows_that_bulk_copies_cannot_reach_is_refused(one_gpu):
    wide = np.zeros((40, 276), W4A16_HOPPER_GEMM.arguments(Case("c", {"M": 1, "N": 1, "K": 16}),
                    np.random.default_rng(0))["x"].dtype)  # fmt: skip
    with pytest.raises(ContractError, match="x has rows 276 elements apart, expected a multiple of 8"):
        launch.GEMM.plan(bound(x=wide[:, :272]), {})


def test_work_of_few_tiles_and_much_depth_is_shared_by_all():
    work = work_of(256, 5120, 17408, 132)
    assert (work.workers, work.whole) == (132, 0)
    assert CONFIGS[work.entry].tiles(256, 5120) < 132


def test_estimate_grows_with_every_dimension():
    for entry in CONFIGS:
        smallest = estimated_us(Work(entry, 8, 0), 40, 1024, 2048)
        for larger in ((1000, 1024, 2048), (40, 4096, 2048), (40, 1024, 8192)):
            assert estimated_us(Work(entry, 8, 0), *larger) > smallest
