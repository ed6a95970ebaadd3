"""The tile GEMMs on a real device, beyond their contract's cases: equal bits at depth, and rows with gaps."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_muster.plugins.w4a16.contracts import W4A16_GEMM
from kernel_muster.plugins.w4a16.launch import TILES
from kernel_muster.registry.contract.contracts import Case

pytestmark = pytest.mark.gpu
KEYS = pytest.mark.parametrize("key", sorted(TILES))
ONE_ORDER = "w4a16::w4a16_gemm_t"


def made(m, n, k):
    return W4A16_GEMM.arguments(Case("here", {"M": m, "N": n, "K": k}), np.random.default_rng(11))


def on_device(memory, weight):
    return replace(weight, packed=memory.to(weight.packed), block_scale=memory.to(weight.block_scale))


def launched(kernels, memory, key, weight, x, out):
    """Launch on a prepared weight and return the output's bits."""
    result = memory.to(out)
    kernels.kernel(*key.split("::"))(x=x, w=weight, out=result)
    memory.wait()
    return memory.back(result).view(np.uint16)


def prepared(kernels, key, weight):
    return kernels.kernel(*key.split("::")).prepare_weight(weight)


@pytest.fixture(scope="module")
def deep(memory):
    """Arguments as deep as a model's, their weight on the device."""
    arguments = made(1024, 1040, 5120)
    return {**arguments, "w": on_device(memory, arguments["w"])}


@pytest.mark.parametrize("rows", [1, 16, 17, 63, 64, 65, 128, 129, 1024])
def test_variants_give_the_same_bits_at_a_models_depth(kernels, memory, deep, rows):
    x, out = memory.to(deep["x"][:rows]), deep["out"][:rows]
    bits = {key: launched(kernels, memory, key, prepared(kernels, key, deep["w"]), x, out) for key in TILES}
    assert not (bits[ONE_ORDER] == out.view(np.uint16)).any()  # all of it was written
    assert [key for key in TILES if not np.array_equal(bits[key], bits[ONE_ORDER])] == []


@KEYS
def test_rows_of_x_with_gaps_give_the_bits_of_rows_without(kernels, memory, key):
    arguments = made(70, 80, 192)
    weight = prepared(kernels, key, on_device(memory, arguments["w"]))
    wide = np.full((70, 200), np.nan, arguments["x"].dtype)
    wide[:, :192] = arguments["x"]
    got = [
        launched(kernels, memory, key, weight, x, arguments["out"])
        for x in (memory.to(arguments["x"]), memory.to(wide)[:, :192])
    ]
    assert np.array_equal(*got)
