"""Fused launches of the GEMV family: exactly the bits of the launches that they replace."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

# Key heads, key dim, value heads, value dim, K: two models, tiles that hold q, k, v and z, few features of each depth,
# a last block of gates with spare heads, a depth without unrolling.
GDN = (
    (16, 128, 48, 128, 5120), (16, 128, 32, 128, 2048), (2, 130, 6, 66, 5120), (2, 33, 6, 35, 2048),
    (2, 33, 6, 35, 5120), (1, 10, 5, 9, 3344), (1, 700, 7, 100, 2048),
)  # fmt: skip
# Query features, key features, K: two models, then each pair of splits.
QGKV = (
    (6144, 1024, 5120), (4096, 504, 2048), (530, 700, 5120), (530, 600, 2048), (40, 50, 2048), (40, 600, 2048),
    (530, 50, 5120), (40, 600, 5120), (40, 50, 5120), (530, 600, 4096), (40, 50, 80),
)  # fmt: skip
DUAL = ((17408, 5120), (512, 2048), (9010, 2048), (500, 5120), (1030, 5120), (77, 1040))


def poisoned(cupy, like, shape, dtype=None):
    out = cupy.empty_like(like, shape=shape, dtype=dtype)
    out.view(cupy.uint8)[...] = 0xFF
    return out


def same(one, other):
    return bool((one.view("u1") == other.view("u1")).all())


@pytest.mark.parametrize(("features", "depth"), DUAL)
def test_gate_up_and_silu_in_one_launch_have_the_bits_of_two(cupy, kernels, features, depth):
    from kernel_muster.bench.data.nvfp4 import make_dense_data

    gate, up = (make_dense_data(features, depth, 8, seed) for seed in (0, 1))
    dual, silu = kernels.kernel("w4a16_gemv", "w4a16_gemv_dual"), kernels.kernel("silu", "silu_mul")
    w_gate, w_up = (dual.prepare_weight(data.weight) for data in (gate, up))
    expected = []
    for m in range(8):
        a, b, act = (poisoned(cupy, gate.x, (1, features)) for _ in range(3))
        dual(x=gate.x[m : m + 1], w_a=w_gate, w_b=w_up, out_a=a, out_b=b)
        silu(gate=a, up=b, out=act)
        expected.append(act.view(cupy.uint16))
    for rows, tier in ((1, ""), (2, "_batch2"), (3, "_batch3"), (5, "_batch8"), (8, "_batch8")):
        out = poisoned(cupy, gate.x, (rows, features))
        fused = kernels.kernel("w4a16_gemv", f"w4a16_gemv_dual_silu{tier}")
        fused(x=gate.x[:rows], w_gate=w_gate, w_up=w_up, out=out)
        assert bool((out.view(cupy.uint16) == cupy.concatenate(expected[:rows])).all())


@pytest.mark.parametrize(("queries", "keys", "depth"), QGKV)
def test_query_gate_key_and_value_in_one_launch_have_the_bits_of_two(cupy, kernels, queries, keys, depth):
    from kernel_muster.bench.data.nvfp4 import make_dense_data

    data = [make_dense_data(features, depth, 3, seed) for seed, features in enumerate((2 * queries, keys, keys + 16))]
    x = data[0].x
    for rows, tier in ((1, ""), (2, "_batch2"), (3, "_batch3")):
        fused, qg, dual = (kernels.kernel("w4a16_gemv", f"w4a16_gemv_{form}{tier}") for form in ("qgkv", "qg", "dual"))
        w, w_a, w_b = (fused.prepare_weight(one.weight) for one in data)
        one, other = ([poisoned(cupy, x, (rows, n)) for n in (queries, queries, keys, keys + 16)] for _ in range(2))
        fused(
            x=x[:rows], w=w, w_a=w_a, w_b=w_b, head_dim=queries // 2, out_q=one[0], out_gate=one[1], out_a=one[2],
            out_b=one[3],
        )  # fmt: skip
        qg(x=x[:rows], w=w, head_dim=queries // 2, out_q=other[0], out_gate=other[1])
        dual(x=x[:rows], w_a=w_a, w_b=w_b, out_a=other[2], out_b=other[3])
        assert all(same(*pair) for pair in zip(one, other, strict=True))


class GdnInputs:
    """What the input launches of one layer read, of random numbers, and both ways to launch them."""

    def __init__(self, kernels, key_heads, key_dim, value_heads, value_dim, depth, rows=6):
        import cupy
        from kernel_muster.bench.data.nvfp4 import make_dense_data
        from kernel_muster.registry.contract.weights import Bf16Weight

        self.kernels, self.cupy, self.heads = kernels, cupy, value_heads
        self.shape = {"key_heads": key_heads, "key_dim": key_dim, "value_heads": value_heads, "value_dim": value_dim}
        self.channels, self.values = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
        data = make_dense_data(self.channels + self.values, depth, max(rows, 6))
        self.fused = kernels.kernel("w4a16_gemv", "w4a16_gemv_gdn_in")
        self.w, self.x = self.fused.prepare_weight(data.weight), data.x
        rng = np.random.default_rng(3)

        def bf16(*shape, scale=1.0):
            values = (scale * rng.standard_normal(shape)).astype(data.x.dtype)
            return cupy.asarray(values.view(np.uint16)).view(data.x.dtype)

        # Gates of such rows are neither all open nor all shut.
        self.w_ba, self.taps = bf16(2 * value_heads, depth, scale=depth**-0.5), bf16(self.channels, 4)
        self.pool = bf16(max(rows, 4), self.channels, 3)
        self.a_log = cupy.asarray(np.log(rng.uniform(0.01, 16.0, value_heads)).astype(np.float32))
        self.dt_bias = cupy.asarray(rng.standard_normal(value_heads).astype(np.float32))
        self.ba_weight = Bf16Weight(self.w_ba)

    def outputs(self, count):
        rows = [poisoned(self.cupy, self.x, (count, columns)) for columns in (self.channels, self.values)]
        return rows + [poisoned(self.cupy, self.x, (count, self.heads), np.float32) for _ in range(2)]

    def together(self, x, state, slots):
        qkv, z, decay, beta = found = self.outputs(len(x))
        self.fused(
            x=x, w=self.w, w_ba=self.w_ba, **self.shape, a_log=self.a_log, dt_bias=self.dt_bias, conv_weight=self.taps,
            state=state, slots=slots, out_qkv=qkv, out_z=z, out_decay=decay, out_beta=beta,
        )  # fmt: skip
        return found

    def apart(self, x, state, slots):
        qkv, z, decay, beta = found = self.outputs(1)
        raw, ba = poisoned(self.cupy, qkv, qkv.shape), poisoned(self.cupy, qkv, (1, 2 * self.heads))
        find = self.kernels.kernel
        find("w4a16_gemv", "w4a16_gemv_qkvz")(x=x, w=self.w, **self.shape, out_qkv=raw, out_z=z)
        find("gemv", "dense_gemv_bf16")(x=x, w=self.ba_weight, out=ba)
        find("ssm_preprocess", "compute_gdn_gates")(
            a=ba[:, self.heads :].copy(), b=ba[:, : self.heads].copy(), a_log=self.a_log, dt_bias=self.dt_bias,
            out_decay=decay, out_beta=beta,
        )  # fmt: skip
        find("causal_conv1d", "causal_conv1d_update")(x=raw, weight=self.taps, state=state, slots=slots, out=qkv)
        return found


@pytest.mark.parametrize("sizes", GDN)
def test_inputs_of_a_gated_delta_net_in_one_launch_have_the_bits_of_four(kernels, sizes):
    inputs = GdnInputs(kernels, *sizes)
    cupy, pools = inputs.cupy, [inputs.pool.copy() for _ in range(2)]
    # Slots twice in a row, others between, and padding. Memory outside the pool of three is never touched.
    for step, slot in enumerate((2, 2, 0, -1, 1, 2)):
        x, slots = inputs.x[step : step + 1], cupy.asarray(np.array([slot], np.int32))
        one = inputs.together(x, pools[0][:3], slots)
        other = inputs.apart(x, pools[1][:3], slots)
        assert all(same(*pair) for pair in zip(one, other, strict=True))
        assert same(*pools)
    assert same(pools[0][3], inputs.pool[3])
    assert not same(pools[0][:3], inputs.pool[:3])


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("sizes", GDN)
def test_inputs_of_rows_in_one_launch_have_the_bits_of_each_alone(kernels, sizes, rows):
    inputs = GdnInputs(kernels, *sizes, rows=rows)
    cupy, pools = inputs.cupy, [inputs.pool.copy() for _ in range(2)]
    for step in range(3):
        slots = np.roll(np.arange(-1, rows, dtype=np.int32), step)[:rows]
        found = inputs.together(inputs.x[:rows], pools[0], cupy.asarray(slots))
        for row, slot in enumerate(slots):
            alone = inputs.apart(inputs.x[row : row + 1], pools[1], cupy.asarray(slots[row : row + 1]))
            assert all(same(whole[row : row + 1], one) for whole, one in zip(found, alone, strict=True)), (row, slot)
        assert same(*pools)
    assert not same(pools[0], inputs.pool)


@pytest.mark.parametrize("wrong", [-7, 3, 1000, 2**31 - 1, -(2**31)])
def test_slot_outside_the_pool_is_padding(kernels, wrong):
    inputs = GdnInputs(kernels, 2, 33, 6, 35, 2048)
    pool, slots = inputs.pool.copy(), inputs.cupy.asarray(np.array([wrong], np.int32))
    qkv, *rest = inputs.together(inputs.x[:1], pool[:3], slots)
    padding = inputs.apart(inputs.x[:1], inputs.pool.copy()[:3], inputs.cupy.asarray(np.array([-1], np.int32)))
    assert not qkv.view("u2").any()
    assert all(same(*pair) for pair in zip(rest, padding[1:], strict=True))
    assert same(pool, inputs.pool)


@pytest.mark.parametrize(("features", "depth"), [(1024, 5120), (512, 2048), (504, 2048), (512, 5120)])
def test_key_and_value_together_have_the_bits_of_each_alone_at_every_tier(cupy, kernels, features, depth):
    from kernel_muster.bench.data.nvfp4 import make_dense_data

    key, value = (make_dense_data(features, depth, 8, seed) for seed in (0, 1))
    dual = kernels.kernel("w4a16_gemv", "w4a16_gemv_dual")
    w_a, w_b = (dual.prepare_weight(one.weight) for one in (key, value))
    for rows, tier in ((4, "_batch4"), (8, "_batch8")):
        alone = kernels.kernel("w4a16_gemv", f"w4a16_gemv{tier}")
        outs = [poisoned(cupy, key.x, (rows, features)) for _ in range(2)]
        for weight, out in zip((w_a, w_b), outs, strict=True):
            alone(x=key.x[:rows], w=weight, out=out)
        for m in range(rows):
            a, b = (poisoned(cupy, key.x, (1, features)) for _ in range(2))
            dual(x=key.x[m : m + 1], w_a=w_a, w_b=w_b, out_a=a, out_b=b)
            assert same(a, outs[0][m : m + 1])
            assert same(b, outs[1][m : m + 1])
