"""Numba kernels on a real device: exact bits, launch paths, and the audit's proof."""

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.dtypes import numpy_dtype

pytestmark = pytest.mark.gpu

BF16 = numpy_dtype("bf16")
KEYS = tuple(
    f"quantize_nvfp4::{name}" for name in ("quantize_bf16_to_nvfp4", "quantize_bf16_to_nvfp4_t", "transpose_nvfp4")
)


@pytest.fixture
def quantized(cupy, kernels):
    """Return a function that quantises on the device, plain and fused, and gives the outputs of both on the host."""

    def run(values):
        n, k = values.shape
        on_device = cupy.asarray(values.view(np.uint16)).view(BF16)
        shapes = {"out_packed": (n, k // 2), "out_block_scale": (n, k // 16)}
        shapes |= {f"{name}_t": shape[::-1] for name, shape in shapes.items()}
        results = []
        for suffix in ("", "_t"):
            handle = kernels.kernel("quantize_nvfp4", f"quantize_bf16_to_nvfp4{suffix}")
            names = [name for name in handle.contract.signature.names if name in shapes]
            outs = {name: cupy.full(shapes[name], 0xAA, np.uint8) for name in names}
            outs["out_global_scale"] = cupy.full(1, 77, np.float32)
            handle(values=on_device, **outs)
            results.append({name: cupy.asnumpy(out) for name, out in outs.items()})
        return results

    return run


def weights(kind, n, k):
    rng = np.random.default_rng(n * 10007 + k)
    if kind == "zero":
        return (np.zeros((n, k)) * rng.choice([-1.0, 1.0], (n, k))).astype(BF16)
    if kind == "subnormal":
        return (rng.integers(0, 0x180, (n, k), np.uint16) | (rng.integers(0, 2, (n, k), np.uint16) << 15)).view(BF16)
    if kind == "any_bits":
        bits = rng.integers(0, 0x10000, (n, k), np.uint16)
        return np.where(bits & 0x7F80 == 0x7F80, bits ^ 0x4000, bits).astype(np.uint16).view(BF16)
    if kind == "tie":
        halves = rng.choice([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6], (n, k))
        values = (halves * rng.choice([-1, 1], (n, k))).reshape(n, -1, 16)
        values[..., 3] = 6
        values *= 2.0 ** rng.integers(-10, 9, values.shape[:2])[..., None]
        values[0, 0, 3] = 2688
        return values.reshape(n, k).astype(BF16)
    return (rng.standard_normal((n, k)) * 2.0 ** -rng.integers(0, 24, (n, 1))).astype(BF16)


@pytest.mark.parametrize("kind", ["random", "any_bits", "subnormal", "tie", "zero"])
@pytest.mark.parametrize("k", [16, 32, 48, 272, 2048, 5120])
@pytest.mark.parametrize("n", [1, 3, 17])
def test_quantised_bits_are_those_of_the_reference(quantized, n, k, kind):
    values = weights(kind, n, k)
    weight = nvfp4.quantize(values)
    plain, fused = quantized(values)
    for outs in (plain, fused):
        assert outs["out_global_scale"].tobytes() == weight.global_scale_decode.tobytes()
        assert np.array_equal(outs["out_block_scale"], weight.block_scale)
        assert np.array_equal(outs["out_packed"], weight.packed)
    assert np.array_equal(fused["out_packed_t"], weight.packed.T)
    assert np.array_equal(fused["out_block_scale_t"], weight.block_scale.T)


def test_large_weight_has_the_bits_of_the_reference(quantized):
    values = weights("random", 4099, 5120)
    weight = nvfp4.quantize(values)
    plain, fused = quantized(values)
    assert np.array_equal(plain["out_packed"], weight.packed)
    assert np.array_equal(fused["out_packed_t"], weight.packed.T)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_value_that_is_not_finite_makes_every_scale_nan(quantized, bad):
    values = np.ones((17, 272), BF16)
    values[16, 271] = bad
    for outs in quantized(values):
        assert np.isnan(outs["out_global_scale"]).all()
        assert (outs["out_block_scale"] == 0x7F).all()


def test_no_rows_give_a_global_scale_of_zero(quantized):
    for outs in quantized(np.zeros((0, 32), BF16)):
        assert outs["out_global_scale"] == [0]


def test_transposition_on_a_stream_and_in_a_graph_moves_every_byte(cupy, kernels):
    rng = np.random.default_rng(0)
    packed, scale = (rng.integers(0, 256, (333, width), np.uint8) for width in (8 * 37, 37))
    outs = {"out_packed": cupy.zeros((8 * 37, 333), np.uint8), "out_block_scale": cupy.zeros((37, 333), np.uint8)}
    handle = kernels.kernel("quantize_nvfp4", "transpose_nvfp4")
    launch = handle.prepare(cupy.asarray(packed), cupy.asarray(scale), *outs.values(), overlap=True)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    launch(stream)
    graph = stream.end_capture()
    assert not outs["out_packed"].any()
    graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(cupy.asnumpy(outs["out_packed"]), packed.T)
    assert np.array_equal(cupy.asnumpy(outs["out_block_scale"]), scale.T)


def test_kernels_are_proven_by_an_audit(cache, tmp_path):
    manifest = tmp_path / "MODEL.toml"
    manifest.write_text('[model]\nname = "tiny"\nquant = "nvfp4"\n')
    levers = {"MUSTER_CACHE_DIR": cache}
    with km.boot(manifest=manifest, target="cuda", stage="proven", levers=levers) as session:
        for key in KEYS:
            session.kernels.kernel(*key.split("::"))
    assert {row.key: row.stage for row in session.report.kernels} == dict.fromkeys(KEYS, "proven")
