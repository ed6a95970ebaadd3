"""The recurrent kernels of a decode step: the bits of rule and norm alone, and slots that the launch before writes."""

import kernel_muster as km
import ml_dtypes
import numpy as np
import pytest
from kernel_muster.audit.proofs import device_memory

pytestmark = pytest.mark.gpu

BF16 = ml_dtypes.bfloat16
RULE = "gated_delta_rule::gated_delta_rule_decode"
MODEL_35B, MODEL_27B = (16, 128, 32, 128), (16, 128, 48, 128)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache") / "cubins")
    return km.open_registry("cuda", levers={"MUSTER_CACHE_DIR": cache})


def launched(kernels, key, **arguments):
    memory = device_memory(0)
    arrays = {name: memory.to(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    kernels.kernel(*key.split("::"))(**{**arguments, **arrays})
    memory.wait()
    return {name: memory.back(array) for name, array in arrays.items()}


def numbers(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(BF16)


def inputs(sequences, heads, weight_type=np.float32):
    """Return what both launches take, and what the norm takes besides."""
    key_heads, key_dim, value_heads, value_dim = heads
    rng = np.random.default_rng(sequences)
    values = value_heads * value_dim
    slots = rng.permutation(sequences + 3)[:sequences].astype(np.int32)
    slots[2:3] = -1
    gates = {name: rng.random((sequences, value_heads)).astype(np.float32) for name in ("decay", "beta")}
    rule = {
        "qkv": rng.standard_normal((sequences, 2 * key_heads * key_dim + values)).astype(BF16), **gates,
        "key_heads": key_heads, "key_dim": key_dim, "value_heads": value_heads, "value_dim": value_dim,
        "state": rng.standard_normal((sequences + 3, value_heads, key_dim, value_dim)).astype(np.float32),
        "slots": slots, "out": np.full((sequences, values), 9, BF16),
    }  # fmt: skip
    gate = rng.standard_normal((sequences, values)).astype(BF16)
    return rule, {"gate": gate, "norm_weight": rng.standard_normal(value_dim).astype(weight_type), "eps": 1e-6}


@pytest.mark.parametrize("weight_type", [np.float32, BF16])
@pytest.mark.parametrize(("sequences", "heads"), [
    *((sequences, heads) for sequences in (1, 2, 4, 7, 16, 40) for heads in (MODEL_35B, MODEL_27B)),
    (3, (2, 5, 6, 7)), (3, (1, 16, 2, 24)), (2, (1, 128, 2, 64)), (1, (1, 8, 2, 1024)), (2, (1, 8, 2, 1030)),
    (2, (2, 8, 2, 1032)),
])  # fmt: skip
def test_rule_with_norm_has_the_bits_of_rule_then_norm(kernels, sequences, heads, weight_type):
    rule, norm = inputs(sequences, heads, weight_type)
    plain = launched(kernels, f"{RULE}_strided", **rule)
    by_head = (-1, heads[3])
    normed = launched(
        kernels, "norm::rms_norm_gated", x=plain["out"].reshape(by_head), gate=norm["gate"].reshape(by_head),
        weight=norm["norm_weight"], eps=norm["eps"], out=np.full_like(plain["out"], 9).reshape(by_head),
    )["out"].reshape(plain["out"].shape)  # fmt: skip
    normed[rule["slots"] < 0] = 0
    fused = launched(kernels, f"{RULE}_norm_strided", **rule, **norm)
    assert fused["out"].tobytes() == normed.tobytes()
    assert fused["state"].tobytes() == plain["state"].tobytes()


CONVOLUTION = "causal_conv1d::causal_conv1d_update"


@pytest.mark.parametrize("key", [RULE, f"{RULE}_norm_strided", CONVOLUTION])
@pytest.mark.parametrize("before", [0, 2, -1, 1000])
def test_slot_that_the_launch_before_writes_is_the_one_that_counts(kernels, key, before):
    rule, norm = inputs(1, MODEL_35B)
    arguments = {**rule, **(norm if key == f"{RULE}_norm_strided" else {})}
    if key == CONVOLUTION:
        arguments = {"x": rule["qkv"], "weight": numbers(8192, 4), "state": numbers(4, 8192, 3)}
        arguments |= {"slots": rule["slots"], "out": np.full_like(rule["qkv"], 9)}
    logits = np.zeros((1, 250_000), BF16)
    logits[0, 1] = 1
    arguments["slots"][0] = 1
    expected = launched(kernels, key, **arguments)
    arguments["slots"][0] = before
    memory = device_memory(0)
    arrays = {name: memory.to(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    writes = kernels.kernel("argmax", "argmax_bf16").prepare(logits=memory.to(logits), out=arrays["slots"])
    moves = kernels.kernel(*key.split("::")).prepare(**{**arguments, **arrays}, overlap=True)
    writes()
    moves()
    memory.wait()
    for name in ("out", "state"):
        assert memory.back(arrays[name]).tobytes() == expected[name].tobytes()
