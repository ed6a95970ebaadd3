"""Random weights: equal for a seed and a name, with a scale that preserves activations."""

import numpy as np
import pytest
from kernel_muster.models.weights import random_weights
from kernel_muster.models.weights.random_weights import RandomWeights
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract import nvfp4


def spec(name: str, shape: tuple[int, ...], quant: str) -> WeightSpec:
    return WeightSpec(name, shape, quant)


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
def test_projection_keeps_the_size_of_what_it_projects(quant: str) -> None:
    found = RandomWeights(1).find(spec("a", (256, 1024), quant))
    values = nvfp4.dequantize(found) if quant == "nvfp4" else found.values.astype(np.float64)
    assert values.std() * 32 == pytest.approx(1, rel=0.02)
    assert abs(values.mean()) * 32 < 0.01


def test_weights_follow_seed_and_name() -> None:
    def bits(seed: int, name: str) -> bytes:
        return bytes(RandomWeights(seed).find(spec(name, (32, 64), "nvfp4")).packed.tobytes())

    assert bits(1, "a") == bits(1, "a")
    assert len({bits(1, "a"), bits(2, "a"), bits(1, "b")}) == 3


def test_steps_do_not_show_in_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec("a", (40, 64), "nvfp4"), spec("b", (40, 64), "bf16"), spec("c", (100,), "array")]
    whole = [RandomWeights(1).find(one) for one in specs]
    monkeypatch.setattr(random_weights, "_STEP", 28)
    parts = [RandomWeights(1).find(one) for one in specs]
    assert whole[0].packed.tobytes() == parts[0].packed.tobytes()
    assert whole[0].block_scale.tobytes() == parts[0].block_scale.tobytes()
    assert whole[1].values.tobytes() == parts[1].values.tobytes()
    assert whole[2].tobytes() == parts[2].tobytes()


def test_scales_are_finite_and_codes_take_every_value() -> None:
    found = RandomWeights(1).find(spec("a", (2, 64, 128), "nvfp4"))
    scales = nvfp4.decode_e4m3(found.block_scale)
    assert scales.min() == 0.5
    assert scales.max() == 1.875
    assert set(nvfp4.unpack(found.packed).ravel().tolist()) == set(range(16))
    assert found.global_scale_decode.shape == (2,)


def test_plain_norms_are_around_one_and_others_around_zero() -> None:
    plain = RandomWeights(1).find(spec("layers.0.gdn.norm", (64,), "array")).astype(np.float64)
    centred = RandomWeights(1).find(spec("layers.0.gdn.input_norm", (64,), "array")).astype(np.float64)
    assert abs(plain.mean() - 1) < 0.05
    assert abs(centred.mean()) < 0.05
