"""Decode on a device: reduced models against the host's layers, and the state after a step and a boot."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.decode import DecodeEngine, Sampling
from kernel_muster.models.decode.generate import Generated
from kernel_muster.models.drafter import drafter_from_dims
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.proposers.dflash import DflashProposer
from kernel_muster.models.proposers.mtp import MtpProposer
from kernel_muster.models.reduced import reduced
from kernel_muster.models.weights.random_weights import RandomWeights
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract.nvfp4 import ROW_MAJOR, Nvfp4Weight
from kernel_muster.registry.errors import BootRefused
from kernel_muster.registry.selection.lookups import Lookups
from own_memory import device_bytes

pytestmark = pytest.mark.gpu

MODELS = ("qwen3.6-27b", "qwen3.6-35b-a3b")
SIZES = StateSizes(8, 64, 16)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9], [100, 200, 300, 400, 17, 18, 19]]
NEW = 12
# Both implementations round to BF16 at the same places, but sum in another order. So each rounding may differ by one
# unit in the last place, 2^-8 relative. Up to a logit there are at most 12 roundings in each of 4 layers (norm,
# projection, mixer, gate, residual), and two after them. Random weights have gain one.
ROUNDINGS = 12 * 4 + 2
BOUND = ROUNDINGS * 2.0**-8
# Of the two largest logits: below it either implementation may choose either.
MARGIN = 2.0**-6


def built(name: str, target: str, cache: str, **levers: str) -> tuple[Model, Lookups]:
    given = {"MUSTER_CACHE_DIR": cache, **levers}
    with km.boot(name, target=target, levers=given, stage="registered" if target == "cpu" else "loaded") as boot:
        model = build_from_dims(reduced(model_dims(boot.manifest)), boot.kernels, RandomWeights(1), 64)
    return model, boot.kernels


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, cache: str) -> Iterator[tuple[Model, DecodeEngine, Lookups]]:
    """Return the host's model, and an engine of the same model on the device."""
    host, _ = built(request.param, "cpu", cache)
    device, kernels = built(request.param, "cuda", cache)
    with DecodeEngine(device, SIZES, 256) as engine:
        yield host, engine, kernels


def bits(found: Generated) -> list[bytes]:
    return [b"".join(row.tobytes() for row in rows) for rows in found.logits]


def as_f64(row: Any) -> Any:
    return row.astype(np.float64)


def test_device_and_host_agree_within_their_roundings(pair: Any) -> None:
    host, engine, _ = pair
    with DecodeEngine(host, SIZES, 256) as reference:
        expected = reference.generate(PROMPTS, NEW, keep_logits=True)
    got = engine.generate(PROMPTS, NEW, keep_logits=True)
    for tokens, rows, other_tokens, others in zip(
        got.tokens, got.logits, expected.tokens, expected.logits, strict=True
    ):
        for at, (row, other) in enumerate(zip(rows, others, strict=True)):
            error = np.linalg.norm(as_f64(row) - as_f64(other)) / np.linalg.norm(as_f64(other))
            assert error <= BOUND
            if tokens[at] != other_tokens[at]:  # a near tie; the texts differ from here on
                second, largest = np.sort(as_f64(other))[-2:]
                assert largest - second <= MARGIN * abs(largest)
                break


def test_device_and_host_agree_about_a_prompt_that_attention_takes_in_tiles(pair: Any) -> None:
    host, engine, _ = pair
    prompt = [[(7 * at) % 500 for at in range(72)]]  # passes of 64 and 8 rows
    with DecodeEngine(host, SIZES, 256) as reference:
        (expected,) = reference.generate(prompt, 1, keep_logits=True).logits[0]
    (got,) = engine.generate(prompt, 1, keep_logits=True).logits[0]
    error = np.linalg.norm(as_f64(got) - as_f64(expected)) / np.linalg.norm(as_f64(expected))
    assert error <= (ROUNDINGS + 1) * 2.0**-8  # weights of attention are rounded too


def test_sequence_among_others_has_the_bits_of_a_sequence_alone(pair: Any) -> None:
    _, engine, _ = pair
    together = engine.generate(PROMPTS, NEW, keep_logits=True)
    alone = [engine.generate([prompt], NEW, keep_logits=True) for prompt in PROMPTS]
    assert [one.tokens[0] for one in alone] == together.tokens
    assert [bits(one)[0] for one in alone] == bits(together)


def test_replayed_graph_gives_the_bits_of_eager_layers(pair: Any) -> None:
    _, engine, _ = pair
    model = engine.model
    with model.memory.active():
        state = model.new_state(SIZES)
        one = state.open()
        last = None
        for done in model.prefill(state, [one], PROMPTS[:1]):
            last = model.greedy(done.logits)[-1]
        tokens, rows = [last], []
        for _ in range(NEW - 1):
            done = model.decode(state, [one], [tokens[-1]])
            tokens.append(model.greedy(done.logits)[0])
            rows.append(model.memory.get(done.logits)[0].tobytes())
    got = engine.generate(PROMPTS[:1], NEW, keep_logits=True)
    assert got.tokens == [tokens]
    assert [row.tobytes() for row in got.logits[0][1:]] == rows


def test_drafted_and_plain_decode_give_the_same_tokens(pair: Any) -> None:
    _, engine, kernels = pair
    plain = engine.generate(PROMPTS[:2], NEW, keep_logits=True)
    proposer = MtpProposer(engine.model, kernels.levers, 3, SIZES)
    drafted = engine.generate(PROMPTS[:2], NEW, keep_logits=True, proposer=proposer)
    assert drafted.verify_steps > 0
    # Two sequences with three drafts are 8 rows: GEMV kernels, with the bits of one row in each.
    assert drafted.tokens == plain.tokens


@pytest.mark.parametrize(
    "absent", ["gated_delta_rule::gated_delta_rule_verify_n", "causal_conv1d::causal_conv1d_verify_n"]
)
def test_drafts_change_no_token_where_rows_are_verified_one_by_one(cache: str, absent: str) -> None:
    levers = {"MUSTER_CACHE_DIR": cache, "MUSTER_DISABLE": absent}
    with km.boot(
        "qwen3.6-27b", target="cuda", levers=levers, stage="loaded", dangerously_allow_unresolved=[absent]
    ) as boot:
        model = build_from_dims(reduced(model_dims(boot.manifest)), boot.kernels, RandomWeights(1), 64)
    with DecodeEngine(model, SIZES, 256) as engine:
        plain = engine.generate(PROMPTS[:2], NEW)
        for _ in range(2):
            drafted = engine.generate(PROMPTS[:2], NEW, proposer=MtpProposer(model, boot.kernels.levers, 3, SIZES))
            assert drafted.verify_steps > 0
            assert drafted.tokens == plain.tokens


def test_block_diffusion_drafts_change_no_token(cache: str) -> None:
    model, _ = built("qwen3.6-35b-a3b", "cuda", cache)
    levers = {"MUSTER_CACHE_DIR": cache}
    with km.boot("qwen3.6-35b-a3b-dflash", target="cuda", levers=levers, stage="loaded") as boot:
        weights = RandomWeights(2, plain_norms=("norm", "norm.weight"))
        drafter = drafter_from_dims(reduced(model_dims(boot.manifest)), boot.kernels, weights, model, 64)
        proposer = DflashProposer(drafter, boot.levers, SIZES)
    with DecodeEngine(model, SIZES, 256) as engine:
        plain = engine.generate(PROMPTS[:1], NEW, keep_logits=True)
        drafted = engine.generate(PROMPTS[:1], NEW, proposer=proposer)
    assert drafted.verify_steps > 0
    # One sequence with four drafts: 5 rows, GEMV kernels.
    assert drafted.tokens == plain.tokens


def test_sampled_tokens_follow_the_seed_and_not_the_neighbours(pair: Any) -> None:
    _, engine, _ = pair
    how = Sampling(0.9, 30, 0.95, seed=4)
    first = engine.generate(PROMPTS, NEW, how).tokens
    assert engine.generate(PROMPTS, NEW, how).tokens == first
    assert engine.generate(PROMPTS[:1], NEW, how).tokens == first[:1]
    assert engine.generate(PROMPTS, NEW, Sampling(0.9, 1)).tokens == engine.generate(PROMPTS, NEW).tokens


def test_hot_path_allocates_nothing_and_looks_nothing_up(pair: Any) -> None:
    import cupy

    class Counting(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
        name, calls = "counting", 0

        def malloc_preprocess(self, **given: Any) -> None:
            self.calls += 1

        def alloc_preprocess(self, **given: Any) -> None:
            self.calls += 1

    _, engine, kernels = pair
    engine.prepare([4])
    live = [engine.state.open() for _ in range(4)]
    engine.enqueue(live, [1, 2, 3, 4])
    engine.tokens()
    with Counting() as hook:
        for _ in range(40):  # over more than one page
            engine.enqueue(live)
            engine.tokens()
        assert hook.calls == 0
        engine.model.memory.empty((16,), "u8")
        assert hook.calls > 0
    for one in live:
        engine.state.close(one)
    assert kernels._session.entries("late") == ()


@pytest.mark.parametrize("spec", [
    WeightSpec("a.q_proj", (96, 512), "nvfp4"), WeightSpec("a.experts", (3, 32, 64), "nvfp4"),
    WeightSpec("a.table", (40, 64), "bf16"), WeightSpec("a.gdn.norm", (128,), "array"),
])  # fmt: skip
def test_random_weights_have_the_same_bits_on_host_and_device(pair: Any, spec: WeightSpec) -> None:
    memory = pair[1].model.memory
    host, device = RandomWeights(5).find(spec), RandomWeights(5).on(memory).find(spec)
    if isinstance(host, Nvfp4Weight):
        assert memory.get(device.packed).tobytes() == host.packed.tobytes()
        assert memory.get(device.block_scale).tobytes() == host.block_scale.tobytes()
        assert device.layout == host.layout == ROW_MAJOR
    else:
        host, device = getattr(host, "values", host), getattr(device, "values", device)
        assert memory.get(device).tobytes() == host.tobytes()


@pytest.mark.parametrize("asked", ["tiled", "per_seq"])
def test_arms_on_gemv_kernels_have_the_bits_of_one_row(cache: str, asked: str) -> None:
    model, _ = built("qwen3.6-27b", "cuda", cache, MUSTER_QKV_ARM=asked)
    with DecodeEngine(model, SIZES, 256) as engine:
        together = engine.generate(PROMPTS, NEW, keep_logits=True)
        alone = [engine.generate([prompt], NEW, keep_logits=True) for prompt in PROMPTS]
        assert [bits(one)[0] for one in alone] == bits(together)
        arms = [layer.mixer.used[asked] for layer in model.layers if asked in layer.mixer.used]
    assert arms


def test_five_boots_and_a_refused_one_leave_nothing_behind(cache: str) -> None:
    import cupy

    def held_bytes() -> int:
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.cuda.Device().synchronize()
        own = device_bytes(cupy.cuda.Device().pci_bus_id)
        if own is not None:
            return own
        free, total = cupy.cuda.runtime.memGetInfo()
        return int(total - free)

    def one(seed: int) -> list[list[int]]:
        model, _ = built("qwen3.6-35b-a3b", "cuda", cache)
        with DecodeEngine(model, SIZES, 256) as engine:
            return engine.generate(PROMPTS, NEW).tokens

    def refused() -> None:
        levers = {"MUSTER_CACHE_DIR": cache, "MUSTER_DISABLE": "norm::rms_norm"}
        with pytest.raises(BootRefused), km.boot("qwen3.6-27b", target="cuda", levers=levers, stage="loaded") as boot:
            km.build_model(boot.manifest, boot.kernels)

    first = one(1)
    refused()
    threads, grown = set(threading.enumerate()), []
    # Where the driver names no process, memory of others counts too: they do not take as much in each of three rounds.
    for _ in range(1 if device_bytes(cupy.cuda.Device().pci_bus_id) is not None else 3):
        before = held_bytes()
        for _ in range(5):
            assert one(1) == first
            refused()
        assert set(threading.enumerate()) <= threads
        grown.append(held_bytes() - before)
    # The code of the last boot, and its weights, stay until others come: one boot's worth, never more.
    assert min(grown) <= 2 << 20
