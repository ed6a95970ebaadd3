"""Every device kernel of every built-in family against its contract, on a real device: registering is testing."""

import ml_dtypes
import numpy as np
import pytest
from families import MODULES
from kernel_muster.audit.checking import CASE_S
from kernel_muster.audit.proof.proofs import device_memory, prove
from kernel_muster.plugins.sampling.cpu import sample_top_k_top_p
from kernel_muster.registry.backends.cuda_kernel import is_device_backend
from kernel_muster.registry.contract.contracts import Case
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import MusterError

pytestmark = pytest.mark.gpu

KEYS = sorted({spec.key for module in MODULES for spec in module.muster_kernels() if is_device_backend(spec.backend)})


@pytest.fixture
def find(kernels):
    """Return what finds the kernel that another claims the bits of."""

    def handle_of(key):
        try:
            return kernels.kernel(key.module, key.func)
        except MusterError:
            return None

    return handle_of


@pytest.mark.parametrize("key", KEYS)
def test_device_kernel_keeps_its_contract_in_every_case(kernels, find, key):
    handle = kernels.kernel(*key.split("::"))
    results = list(prove(handle, device_memory(0), find, seconds=CASE_S))  # in threads, as an audit does
    assert [f"{finding.code}: {finding.why}" for result in results for finding in result.findings] == []
    assert [result.case for result in results] == [case.name for case in handle.contract.cases]


# The host checks these arguments and refuses. A device kernel cannot: it must touch nothing outside.

BF16 = ml_dtypes.bfloat16
OUTSIDE = pytest.mark.parametrize("wrong", [-7, 5, 1000, 2**31 - 1, -(2**31)])


def numbers(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(BF16)


def full(shape, value, dtype=BF16):
    return np.full(shape, value, dtype)


@OUTSIDE
@pytest.mark.parametrize("width", [64, 65])
def test_gather_of_an_id_outside_the_table_gives_zeros(launched, wrong, width):
    table = numbers(5, width)
    ids = np.array([4, wrong, 0], np.int32)
    out = launched("embedding::gather", table=table, ids=ids, out=full((3, width), 9))["out"]
    assert np.array_equal(out, [table[4], np.zeros(width), table[0]])


@OUTSIDE
@pytest.mark.parametrize("width", [16, 5])
def test_append_to_a_slot_outside_the_cache_keeps_nothing(launched, wrong, width):
    k, v = numbers(3, 2, width), numbers(3, 2, width) + BF16(1)
    pool = full((1500, 1, 2, width), 9)
    slots = np.array([wrong, 4, -1], np.int32)
    got = launched("kv_cache::kv_cache_append", k=k, v=v, slots=slots, k_cache=(pool, 5), v_cache=(pool, 5))
    for name, rows in (("k", k), ("v", v)):
        expected = pool.copy()
        expected[4, 0] = rows[1]
        assert np.array_equal(got[f"{name}_cache"], expected)


@OUTSIDE
@pytest.mark.parametrize(("channels", "taps"), [(16, 4), (5, 3)])
def test_convolution_in_a_slot_outside_the_pool_is_padding(launched, wrong, channels, taps):
    pool = full((1500, channels, taps - 1), 9)
    got = launched(
        "causal_conv1d::causal_conv1d_update", x=numbers(2, channels), weight=numbers(channels, taps),
        state=(pool, 5), slots=np.array([wrong, -1], np.int32), out=full((2, channels), 9),
    )  # fmt: skip
    assert not got["out"].any()
    assert np.array_equal(got["state"], pool)


@pytest.mark.parametrize("offsets", [[0, 9, 3], [-5, 2, 1000], [2**31 - 1, 0, 3], [3, 2, 1], [0, -(2**31), 3]])
@pytest.mark.parametrize(("channels", "taps"), [(16, 4), (5, 3)])
def test_convolution_of_rows_that_do_not_rise_stays_inside(launched, offsets, channels, taps):
    pool, rows = full((9, channels, taps - 1), 9), full((9, channels), 9)
    states = full((9, channels, taps - 1), 9)
    got = launched(
        "causal_conv1d::causal_conv1d_verify_n", x=numbers(3, channels), cu_rows=np.array(offsets, np.int32),
        weight=numbers(channels, taps), state=(pool, 2), slots=np.array([1, 0], np.int32), out=(rows, 3),
        out_states=(states, 3),
    )  # fmt: skip
    assert (got["state"][2:] == 9).all()
    assert (got["out"][3:] == 9).all()
    assert (got["out_states"][3:] == 9).all()


@pytest.mark.parametrize("wrong", [-1, -(2**31)])
def test_rope_leaves_a_row_with_a_negative_position(launched, wrong):
    q, k = numbers(2, 2, 16), numbers(2, 1, 16)
    positions = np.array([wrong, 3], np.int32)
    got = launched("rope::rope_forward", q=q, k=k, positions=positions, rotary_dim=16, theta=1e4)
    for name, before in (("q", q), ("k", k)):
        assert np.array_equal(got[name][0], before[0])
        assert not np.array_equal(got[name][1], before[1])


@pytest.mark.parametrize("width", [4096, 4097])
def test_argmax_passes_over_nan_and_a_row_of_nothing_else_is_zero(launched, width):
    logits = numbers(3, width)
    logits[0, 7], logits[0, 3999] = np.nan, 1e30
    logits[1], logits[2] = np.nan, -np.inf
    out = launched("argmax::argmax_bf16", logits=logits, out=full(3, -9, np.int32))["out"]
    assert out.tolist() == [3999, 0, 0]


@pytest.mark.parametrize("width", [4096, 4097])
def test_top_k_of_infinities_zeros_and_ties_is_in_order(launched, width):
    logits = full((1, width), -1)
    logits[0, [5, 90, 91, 4000]] = 0, -0.0, np.inf, 0
    got = launched(
        "sampling::topk_bf16", logits=logits, k=6, out_values=full((1, 6), 9, np.float32),
        out_ids=full((1, 6), 9, np.int32),
    )  # fmt: skip
    assert got["out_ids"].tolist() == [[91, 5, 90, 4000, 0, 1]]
    assert got["out_values"].tolist() == [[np.inf, 0, 0, 0, -1, -1]]


@pytest.mark.parametrize("k", [1, 20, 256, 257, 5000])
@pytest.mark.parametrize("kind", ["rising", "falling", "equal", "blocks"])
def test_top_k_of_rows_that_no_sample_of_theirs_shows(launched, kind, k):
    width = 30_000
    values = {
        "rising": np.arange(width) / 100, "falling": -np.arange(width) / 100, "equal": np.ones(width),
        "blocks": np.where(np.arange(width) // 2500 == 7, 3.0, -np.inf),  # one warp's share; the others are empty
    }[kind]  # fmt: skip
    logits = values.astype(BF16)[None]
    got = launched(
        "sampling::topk_bf16", logits=logits, k=k, out_values=full((1, k), 9, np.float32),
        out_ids=full((1, k), 9, np.int32),
    )  # fmt: skip
    order = np.lexsort((np.arange(width), -logits[0].astype(np.float64)))[:k]
    assert got["out_ids"][0].tolist() == order.tolist()
    assert np.array_equal(got["out_values"][0], logits[0].astype(np.float32)[order])


@pytest.mark.parametrize("k", [1, 20, 64, 128, 129])
@pytest.mark.parametrize(("rows", "width"), [(2, 248_320), (20, 50_257)])
def test_top_k_of_rows_that_several_blocks_share(launched, rows, width, k):
    logits = np.random.default_rng(k).normal(0, 3, (rows, width)).astype(BF16)
    logits[0, :40:2] = 20  # as many as one block has places for, in one warp's share
    got = launched(
        "sampling::topk_bf16", logits=logits, k=k, out_values=full((rows, k), 9, np.float32),
        out_ids=full((rows, k), 9, np.int32),
    )  # fmt: skip
    for row, values in enumerate(logits.astype(np.float64)):
        order = np.lexsort((np.arange(width), -values))[:k]
        assert got["out_ids"][row].tolist() == order.tolist()
        assert np.array_equal(got["out_values"][row], values[order])


@pytest.mark.parametrize(("rows", "width"), [(10, 248_320), (40, 50_257)])
def test_sampling_of_rows_that_several_blocks_share(kernels, launched, rows, width):
    key = "sampling::sample_top_k_top_p"
    contract = kernels.kernel(*key.split("::")).contract
    made = contract.arguments(Case("here", {"M": rows, "V": width}), np.random.default_rng(5))
    made["top_k"][::7] = 100
    made["top_p"][::7] = 0.8
    made["uniform"][::7] = 0.25
    expected = np.full(rows, -9, np.int32)
    sample_top_k_top_p(**{**made, "out": expected})
    assert launched(key, **made)["out"].tolist() == expected.tolist()


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.7, 0.9999])
@pytest.mark.parametrize("top_k", [0, 5, 300, 20_000])
def test_sampling_of_equal_logits_takes_the_index_that_uniform_says(launched, top_k, uniform):
    width = 30_000
    made = {
        "temperature": np.array([0.5], np.float32), "top_k": np.array([top_k], np.int32),
        "top_p": np.array([1.0], np.float32), "uniform": np.array([uniform], np.float32),
    }  # fmt: skip
    logits = full((1, width), 2.5)
    out = launched("sampling::sample_top_k_top_p", logits=logits, **made, out=full(1, -9, np.int32))["out"]
    assert out.tolist() == [int(np.float64(made["uniform"][0]) * (top_k or width))]


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": -1.0}, {"temperature": np.nan}, {"temperature": np.inf}, {"top_k": -3}, {"top_p": 0.0},
        {"top_p": 1.5}, {"top_p": np.nan}, {"uniform": 1.0}, {"uniform": -0.5}, {"uniform": np.nan},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_with_a_parameter_out_of_range_takes_the_largest(launched, changed):
    logits = numbers(1, 512)
    logits[0, 300] = 50
    types = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "uniform": np.float32}
    right = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "uniform": 0.5}
    made = {name: np.array([value], types[name]) for name, value in {**right, **changed}.items()}
    out = launched("sampling::sample_top_k_top_p", logits=logits, **made, out=full(1, -9, np.int32))["out"]
    assert out.tolist() == [300]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "uniform", "token"),
    [
        (0.0, 0, 1.0, 0.9, 4), (1e-30, 0, 1.0, 0.9, 4), (1.0, 1, 1.0, 0.99, 4), (1.0, 0, 1e-7, 0.99, 4),
        (1.0, 2, 1.0, 0.9, 7), (1e30, 0, 1.0, 0.0, 4), (1e30, 4, 1.0, 0.99, 1), (1e30, 2000, 0.5, 0.9999, 511),
    ],
)  # fmt: skip
def test_sampling_at_the_edges_of_its_limits(launched, temperature, top_k, top_p, uniform, token):
    logits = full((1, 1024), 0)
    logits[0, [4, 7]] = 2, 1  # the order is 4, 7, 0, 1, 2, 3, 5, 6, 8, ...
    limits = {
        "temperature": np.array([temperature], np.float32), "top_k": np.array([top_k], np.int32),
        "top_p": np.array([top_p], np.float32), "uniform": np.array([uniform], np.float32),
    }  # fmt: skip
    out = launched("sampling::sample_top_k_top_p", logits=logits, **limits, out=full(1, -9, np.int32))["out"]
    assert out.tolist() == [token]


def test_draft_of_minus_one_never_holds(launched):
    drafts, targets = np.array([[3, -1, 5], [1, 2, 3]], np.int32), np.array([[3, -1, 5, 6], [1, 2, 3, 4]], np.int32)
    out = launched("sampling::verify_greedy", draft_ids=drafts, target_ids=targets, out_accepted=full(2, 9, np.int32))[
        "out_accepted"
    ]
    assert out.tolist() == [1, 3]


# rows with gaps


def gapped(array, gap):
    """Return a view of the same rows, a gap apart in memory."""
    wide = np.zeros((*array.shape[:-1], array.shape[-1] + gap), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide


@pytest.mark.parametrize("gap", [8, 3])
@pytest.mark.parametrize(
    ("key", "sliced", "outputs", "more"),
    [
        ("silu::silu_mul", ("gate", "up"), {"out": 40}, {}),
        ("residual_add::sigmoid_gate_mul_batched", ("x", "gate"), {"out": 40}, {}),
        ("ssm_preprocess::deinterleave_qg", ("qg",), {"out_q": 20, "out_gate": 20}, {"head_dim": 4}),
    ],
)
def test_rows_with_gaps_give_the_bits_of_rows_without(kernels, launched, key, sliced, outputs, more, gap):
    handle, memory = kernels.kernel(*key.split("::")), device_memory(0)
    rows = {name: numbers(3, 40) + BF16(place) for place, name in enumerate(sliced)}
    without = launched(key, **rows, **more, **{name: full((3, size), 9) for name, size in outputs.items()})
    given = {name: memory.to(gapped(array, gap))[:, :40] for name, array in rows.items()}
    made = {name: memory.to(full((3, size), 9)) for name, size in outputs.items()}
    handle(**given, **more, **made)
    memory.wait()
    for name, array in made.items():
        assert memory.back(array).tobytes() == without[name].tobytes()


# shares of a row


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(8, 2, 64), (24, 4, 256)])
def test_attention_of_a_row_alone_has_the_bits_of_the_row_among_many(kernels, heads, key_heads, width):
    handle, memory = kernels.kernel("paged_decode", "paged_decode_attn"), device_memory(0)
    rng, rows, entries = np.random.default_rng(7), 300, 64
    cache = (80, 16, key_heads, width)
    caches = {name: memory.to(rng.standard_normal(cache).astype(BF16)) for name in ("k_cache", "v_cache")}
    q = memory.to(rng.standard_normal((rows, heads, width)).astype(BF16))
    table = memory.to(rng.integers(0, 80, (rows, entries), np.int32))
    lengths = rng.integers(1, 16 * entries + 1, rows, np.int32)
    lengths[[0, 4, 152]] = 16 * entries, 257, 256
    lengths = memory.to(lengths)

    def launch(chosen):
        out = memory.to(full((rows, heads, width), 9))[chosen]
        handle(q=q[chosen], **caches, block_table=table[chosen], context_lens=lengths[chosen], scale=0.1, out=out)
        memory.wait()
        return memory.back(out)

    # Of many rows a block has several pieces, of one row one.
    among_many = launch(slice(0, rows))
    for row in (0, 4, 152, 296):  # where int32 views are aligned
        assert np.array_equal(launch(slice(row, row + 1)), among_many[row : row + 1])


# tiles


@pytest.mark.parametrize(
    ("features", "rows", "fewer", "depth"),
    [
        (256, 16, 1, 272), (1030, 12, 5, 272), (96, 300, 270, 272), (4100, 1030, 130, 272), (40, 64, 1, 5136),
        (4230, 16, 1, 272), (4240, 9, 8, 2064), (13000, 16, 3, 80), (1030, 66, 65, 2056),
        # few features: tiles of 8 and of 16, groups of rows, whole and partial blocks of k, more than are on their way
        (96, 16, 1, 5120), (96, 64, 9, 5120), (96, 33, 16, 2064), (256, 16, 8, 2048), (512, 17, 7, 144),
        (70, 64, 2, 16416),
    ],
)  # fmt: skip
def test_dense_gemm_of_fewer_rows_has_the_same_bits(kernels, features, rows, fewer, depth):
    handle, memory = kernels.kernel("gemm", "dense_gemm_bf16"), device_memory(0)
    # The second half of a sum cancels the first: the remaining roundings show the order of its parts.
    x, weight = (numbers(count, depth // 2) for count in (rows, features))
    x, weight = memory.to(np.hstack([x, x])), Bf16Weight(memory.to(np.hstack([weight, -weight])))
    outs = [memory.to(full((count, features), 9)) for count in (rows, fewer)]
    for out in outs:
        handle(x=x[: out.shape[0]], w=weight, out=out)
    memory.wait()
    whole, part = (memory.back(out) for out in outs)
    assert np.abs(part.astype(np.float32)).max() < 1
    assert np.array_equal(whole[:fewer], part)
