"""Routed experts on a real device: launches that begin early, both paths bit for bit, and invalid lists."""

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import device_memory
from kernel_muster.registry.contract.contracts import random_weight
from kernel_muster.registry.contract.signature import WeightParam

pytestmark = pytest.mark.gpu
BF16 = ml_dtypes.bfloat16
EXPERTS, CHOICES = 12, 4


@pytest.fixture(scope="module")
def layer(kernels):
    return Layer(kernels)


class Layer:
    """A layer whose K has entry points of its own (2048 and 512), with few features; and the launches of both paths."""

    hidden, intermediate = 2048, 512

    def __init__(self, kernels):
        self.kernels, self.memory = kernels, device_memory(0)
        rng = np.random.default_rng(0)
        sizes = {"E": EXPERTS, "H": self.hidden, "I": self.intermediate}
        gate_up = self.kernel("moe_w4a16::moe_w4a16_grouped_gate_up")
        shapes = {"gate": ("E", "I", "H"), "up": ("E", "I", "H"), "down": ("E", "H", "I")}
        self.weights = {}
        for name, shape in shapes.items():
            logical = random_weight(WeightParam("w", "nvfp4", shape), sizes, rng)
            moved = type(logical)(
                self.put(logical.packed), self.put(logical.block_scale), logical.global_scale_decode, logical.layout
            )
            self.weights[name] = gate_up.prepare_weight(moved)
        self.x = self.put((rng.standard_normal((64, self.hidden)) / 45).astype(BF16))
        self.rng = rng

    def kernel(self, key):
        return self.kernels.kernel(*key.split("::"))

    def put(self, array):
        return self.memory.to(array)

    def empty(self, *shape, dtype=BF16):
        return self.put(np.full(shape, 77, dtype))

    def routing(self, tokens):
        """Return ids and weights on the device; low experts far more often."""
        order = self.rng.random((tokens, EXPERTS)) ** (1.0 + np.arange(EXPERTS) / 4)
        ids = np.argsort(-order, axis=1)[:, :CHOICES].astype(np.int32)
        weights = self.rng.random(ids.shape) + 0.1
        return self.put(ids), self.put((weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))

    def grouped(self, buffers, tokens, overlap):
        """Return the launches from ids to out, in order."""
        b, slots = buffers, tokens * CHOICES
        order = {"slots": b["slots"][:slots], "offsets": b["offsets"], "work": b["work"]}
        made = {f"out_{name}": array for name, array in order.items()}
        h, y, w = b["h"][:slots], b["y"][:slots], self.weights
        arguments = (
            ("moe::moe_sort_by_expert", {"ids": b["ids"][:tokens], "experts": EXPERTS, **made}),
            (
                "moe_w4a16::moe_w4a16_grouped_gate_up",
                {"x": self.x[:tokens], "w_gate": w["gate"], "w_up": w["up"], **order, "top_k": CHOICES, "out": h},
            ),
            ("moe_w4a16::moe_w4a16_grouped_down", {"h": h, "w_down": w["down"], **order, "out": y}),
            (
                "moe::moe_unpermute_reduce_indexed",
                {"y": y, "slots": order["slots"], "weights": b["weights"][:tokens], "out": b["out"][:tokens]},
            ),
        )
        return [self.kernel(key).prepare(**given, overlap=overlap) for key, given in arguments]

    def buffers(self, tokens=64):
        slots = tokens * CHOICES
        i32 = np.int32
        return {
            "ids": self.empty(tokens, CHOICES, dtype=i32),
            "weights": self.empty(tokens, CHOICES, dtype=np.float32),
            "slots": self.empty(slots, dtype=i32),
            "offsets": self.empty(EXPERTS + 1, dtype=i32),
            "work": self.empty(EXPERTS, 4, dtype=i32),
            "h": self.empty(slots, self.intermediate),
            "y": self.empty(slots, self.hidden),
            "out": self.empty(tokens, self.hidden),
        }

    def pairwise(self, ids, weights, rows):
        tokens = len(ids)
        out = self.empty(tokens, self.hidden)
        family, w = f"moe_fused_batch{rows}", self.weights
        for start in range(0, tokens, rows):
            part = slice(start, min(start + rows, tokens))
            h = self.empty(part.stop - start, CHOICES, self.intermediate)
            up = {"w_gate": w["gate"], "w_up": w["up"], "out": h}
            self.kernel(f"{family}::{family}_gate_up")(x=self.x[part], ids=ids[part], **up)
            down = {"weights": weights[part], "w_down": w["down"], "out": out[part]}
            self.kernel(f"{family}::{family}_down")(h=h, ids=ids[part], **down)
        self.memory.wait()
        return self.memory.back(out)


@pytest.mark.parametrize("tokens", [1, 3, 17, 64])
def test_experts_that_begin_early_have_the_bits_of_those_that_wait(layer, tokens):
    """Every pass has another routing in the same buffers, so that what an early launch finds there is always stale."""
    import cupy

    buffers, stream = layer.buffers(), cupy.cuda.Stream(non_blocking=True)
    early, waiting = layer.grouped(buffers, tokens, True), layer.grouped(buffers, tokens, False)
    for _ in range(6):
        ids, weights = layer.routing(tokens)
        buffers["ids"][:tokens], buffers["weights"][:tokens] = ids, weights
        results = []
        for launches in (early, waiting):
            buffers["out"].view(np.uint16)[...] = 0x7FC0  # NaN
            layer.memory.wait()
            for launch in launches:
                launch(stream)
            layer.memory.wait()
            results.append(layer.memory.back(buffers["out"][:tokens]))
        assert results[0].tobytes() == results[1].tobytes()
        assert np.isfinite(results[0].astype(np.float32)).all()


@pytest.mark.parametrize("tokens", [1, 2, 9, 24, 33, 64])  # from 24 on in parts of many rows
def test_grouped_experts_have_the_bits_of_pairwise_ones(layer, tokens):
    buffers = layer.buffers()
    ids, weights = layer.routing(tokens)
    buffers["ids"][:tokens], buffers["weights"][:tokens] = ids, weights
    for launch in layer.grouped(buffers, tokens, False):
        launch()
    layer.memory.wait()
    grouped = layer.memory.back(buffers["out"][:tokens])
    for rows in (2, 3):
        assert grouped.tobytes() == layer.pairwise(ids, weights, rows).tobytes()


@pytest.mark.parametrize(
    "row",
    [(5, 0, 1 << 30, 99), (-7, 0, 4, 4), (1 << 20, 0, 4, 24), (3, -9, 4, -1), (3, 4, 2, 24), (3, 1000, 2000, 1 << 30)],
)
def test_work_list_that_names_what_is_not_there_stays_inside(layer, row):
    tokens = 3
    buffers = layer.buffers(tokens + 2)
    buffers["slots"][...] = layer.put(np.arange(buffers["slots"].size, dtype=np.int32))
    buffers["offsets"][...] = layer.put(np.array([0] * EXPERTS + [tokens * CHOICES], np.int32))
    buffers["work"][...] = layer.put(np.tile(np.array(row, np.int32), (EXPERTS, 1)))
    for launch in layer.grouped(buffers, tokens, False)[1:3]:
        launch()
    layer.memory.wait()
    for name in ("h", "y"):
        outside = layer.memory.back(buffers[name])[tokens * CHOICES :]
        assert (outside.astype(np.float32) == 77).all()


@pytest.mark.parametrize("offsets", [(0, 1 << 30), (5, -7), (40, 3), (240, 240), (-1, 1000)])
def test_offsets_of_many_rows_that_say_nonsense_stay_inside(layer, offsets):
    tokens = 60
    buffers = layer.buffers(tokens + 2)
    buffers["slots"][...] = layer.put(np.arange(buffers["slots"].size, dtype=np.int32))
    buffers["offsets"][...] = layer.put(np.resize(np.array(offsets, np.int32), EXPERTS + 1))
    for launch in layer.grouped(buffers, tokens, False)[1:3]:
        launch()
    layer.memory.wait()
    for name in ("h", "y"):
        outside = layer.memory.back(buffers[name])[tokens * CHOICES :]
        assert (outside.astype(np.float32) == 77).all()


@pytest.mark.parametrize(("tokens", "width"), [(1, 2048), (5, 2048), (64, 2048), (3, 4104), (9, 77)])
def test_results_come_back_and_are_added_to_with_the_bits_of_two_launches(layer, tokens, width):
    rng, slots = layer.rng, tokens * CHOICES
    place = rng.permutation(slots).astype(np.int32)
    place[::7] = -1
    y, shared, x = (layer.put(rng.standard_normal((rows, width)).astype(BF16)) for rows in (slots, tokens, tokens))
    gate_weight = layer.put((rng.standard_normal(width) / np.sqrt(width)).astype(BF16))
    routed = {"y": y, "slots": layer.put(place), "weights": layer.routing(tokens)[1]}
    added = {"x": x, "gate_weight": gate_weight, "shared": shared}
    one, two = layer.empty(tokens, width), layer.empty(tokens, width)
    layer.kernel("moe_shared::moe_unpermute_shared_add")(**routed, **added, out=one)
    layer.kernel("moe::moe_unpermute_reduce_indexed")(**routed, out=two)
    layer.kernel("moe_shared::moe_shared_gate_add")(**added, out=two)
    layer.memory.wait()
    assert layer.memory.back(one).tobytes() == layer.memory.back(two).tobytes()


# Experts of a step in two launches


class Step:
    """A layer with a shared expert, and two ways from logits to its output: fused, and launch by launch."""

    experts, choices = 9, 4

    def __init__(self, kernels, hidden, intermediate, shared):
        self.kernels, self.memory = kernels, device_memory(0)
        self.hidden, self.intermediate, self.shared = hidden, intermediate, shared
        self.rng = np.random.default_rng(hidden + shared)
        sizes = {"E": self.experts, "H": hidden, "I": intermediate, "J": shared}
        routed = {"gate": ("E", "I", "H"), "up": ("E", "I", "H"), "down": ("E", "H", "I")}
        shapes = {**routed, "shared_gate": ("J", "H"), "shared_up": ("J", "H"), "shared_down": ("H", "J")}
        prepare = self.kernel("moe_fused_shared::moe_fused_shared_gate_up").prepare_weight
        self.w = {}
        for name, shape in shapes.items():
            logical = random_weight(WeightParam("w", "nvfp4", shape), sizes, self.rng)
            parts = (self.memory.to(logical.packed), self.memory.to(logical.block_scale), logical.global_scale_decode)
            self.w[name] = prepare(type(logical)(*parts, logical.layout))
        self.gate_weight = self.memory.to(self.rng.standard_normal(hidden).astype(BF16))

    def kernel(self, key):
        return self.kernels.kernel(*key.split("::"))

    def empty(self, *shape, dtype=BF16):
        return self.memory.to(np.full(shape, 77, dtype))

    def inputs(self, tokens, dtype=BF16):
        """Return new rows, and logits of which many are equal."""
        x = (self.rng.standard_normal((tokens, self.hidden)) / np.sqrt(self.hidden)).astype(BF16)
        return x, (np.round(self.rng.standard_normal((tokens, self.experts)) * 2) / 2).astype(dtype)

    def buffers(self, tokens):
        return {
            "ids": self.empty(tokens, self.choices, dtype=np.int32),
            "weights": self.empty(tokens, self.choices, dtype=np.float32),
            "act": self.empty(tokens, self.choices, self.intermediate),
            "act_shared": self.empty(tokens, self.shared),
            "out": self.empty(tokens, self.hidden),
        }

    def fused(self, x, logits, b):
        """Return both launches, which begin early."""
        gate = self.empty(len(x), dtype=np.float32)
        choice = {"logits": logits, "out_ids": b["ids"], "out_weights": b["weights"]}
        up = {"w_gate": self.w["gate"], "w_up": self.w["up"], "out": b["act"]}
        shared = {name: self.w[name] for name in ("shared_gate", "shared_up")}
        made = {"gate_weight": self.gate_weight, "out_shared": b["act_shared"], "out_gate": gate}
        routed = {"h": b["act"], "ids": b["ids"], "weights": b["weights"], "w_down": self.w["down"], "out": b["out"]}
        down = {"h_shared": b["act_shared"], "gate": gate, "shared_down": self.w["shared_down"]}
        family = "moe_fused_shared::moe_fused_shared"
        first = self.kernel(f"{family}_gate_up").prepare(x=x, **choice, **up, **shared, **made, overlap=True)
        return [first, self.kernel(f"{family}_down").prepare(**routed, **down, overlap=True)]

    def apart(self, x, logits, b):
        """Launch one by one."""
        rows = len(x)
        tier, pair = "" if rows == 1 else f"_batch{rows}", "moe_fused_batch2"
        w, shared = self.w, self.empty(rows, self.hidden)
        self.kernel("moe::moe_topk_softmax")(logits, self.choices, b["ids"], b["weights"])
        for start in range(0, rows, 2):
            part = slice(start, start + 2)
            act, ids = b["act"][part], b["ids"][part]
            self.kernel(f"{pair}::{pair}_gate_up")(x[part], ids, w["gate"], w["up"], act)
            self.kernel(f"{pair}::{pair}_down")(act, ids, b["weights"][part], w["down"], b["out"][part])
        dual = self.kernel(f"w4a16_gemv::w4a16_gemv_dual_silu{'_batch8' if rows > 3 else tier}")
        dual(x=x, w_gate=w["shared_gate"], w_up=w["shared_up"], out=b["act_shared"])
        self.kernel(f"w4a16_gemv::w4a16_gemv{tier}")(x=b["act_shared"], w=w["shared_down"], out=shared)
        self.kernel("moe_shared::moe_shared_gate_add")(x, self.gate_weight, shared, b["out"])


# Every split of K in the shared expert's GEMV: 8, 4, 20 in two ranks and 8 in two ranks.
@pytest.mark.parametrize(
    ("hidden", "intermediate", "shared"),
    [
        (2048, 512, 512), (2048, 512, 544), (2048, 48, 544), (256, 128, 128), (5120, 32, 48), (1040, 2048, 2048),
        (64, 2048, 2048), (64, 512, 6144), (48, 272, 512), (512, 16, 5120),
    ],
)  # fmt: skip
def test_fused_launches_have_the_bits_of_launches_one_by_one(layer, hidden, intermediate, shared):
    import cupy

    step, stream = Step(layer.kernels, hidden, intermediate, shared), cupy.cuda.Stream(non_blocking=True)
    for tokens in (1, 2, 3, 4):
        for dtype in (BF16, np.float32):
            x, logits = (step.memory.to(array) for array in step.inputs(tokens, dtype))
            fused, apart = step.buffers(tokens), step.buffers(tokens)
            launches = step.fused(x, logits, fused)
            for _ in range(3):  # other rows in the same buffers: an early launch finds stale data there
                x[...], logits[...] = (step.memory.to(array) for array in step.inputs(tokens, dtype))
                step.memory.wait()
                for launch in launches:
                    launch(stream)
                step.apart(x, logits, apart)
                step.memory.wait()
                for name, array in apart.items():
                    assert step.memory.back(fused[name]).tobytes() == step.memory.back(array).tobytes(), name


@pytest.mark.parametrize("experts", [9, 40, 256])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_choice_among_nan_and_infinities_takes_what_is_left_then_nothing(layer, experts, dtype):
    logits = np.full((3, experts), np.nan, dtype)
    logits[1, [2, 8]], logits[2, [1, 3, 5, 7]] = (-np.inf, -1), (-0.0, 0, -np.inf, 2)
    ids, weights = layer.empty(3, 5, dtype=np.int32), layer.empty(3, 5, dtype=np.float32)
    layer.kernel("moe::moe_topk_softmax")(layer.put(logits), 5, ids, weights)
    layer.memory.wait()
    assert layer.memory.back(ids).tolist() == [[0] * 5, [8, 2, 0, 0, 0], [7, 1, 3, 5, 0]]
    small = np.exp(-2) / (1 + 2 * np.exp(-2))
    expected = [[0] * 5, [1, 0, 0, 0, 0], [1 - 2 * small, small, small, 0, 0]]
    np.testing.assert_allclose(layer.memory.back(weights), expected, rtol=1e-6)
