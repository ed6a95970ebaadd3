from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.dims import AttentionDims, ModelDims, RopeDims
from kernel_muster.models.layers.attention import Attention
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.rotary import NormTurnAppend
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import KvCache
from kernel_muster.models.policy.attention import PREFILL_MMA_ROWS, QKV_ARMS
from kernel_muster.models.weights.source import SyntheticWeights, WeightSpec, fuse_rows
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.errors import UsageError

Make = Callable[..., LayerContext]
ROWS = [*range(1, 21), 33]
H, HEADS, KV, D = 48, 4, 2, 16
LABEL = "layers.0.test"
EDGE, PAGE = PREFILL_MMA_ROWS.value, 16


def dims(gated: bool = True, quant: Any = "nvfp4", head_dim: int = D) -> tuple[ModelDims, AttentionDims]:
    own = AttentionDims(HEADS, KV, head_dim, gated, quant)
    return ModelDims("tiny", H, 32, ("attn",), "none", "nvfp4", 1e-6, 1.0, own, None, 0, None, 0), own


def attention(ctx: LayerContext, gated: bool = True, quant: Any = "nvfp4") -> Attention:
    return Attention(ctx, *dims(gated, quant))


def assert_qkv(layer: Attention, exact: Any, x: Any, found: Any, weights: dict[str, Any]) -> None:
    q, bound = exact.project(x, weights["q_proj"])
    if layer.dims.gated:
        shape = (len(x), HEADS, 2, D)
        for position, part in enumerate((found.q, found.gate)):
            half = [a.reshape(shape)[:, :, position].reshape(len(x), -1) for a in (q, bound)]
            exact.assert_close(part, *half)
    else:
        assert found.gate is None
        exact.assert_close(found.q, q, bound)
    exact.assert_close(found.k, *exact.project(x, weights["k_proj"]))
    exact.assert_close(found.v, *exact.project(x, weights["v_proj"]))


def joined(found: Any) -> Any:
    return np.concatenate([part for part in (found.q, found.gate, found.k, found.v) if part is not None], axis=1)


def found_weights(layer: Attention, exact: Any) -> dict[str, Any]:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {name: exact.weight(w) for name, w in zip(names, layer.linears.each, strict=True)}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
def test_qkv_and_output_by_policy_match_float64(make_context: Make, exact: Any, rows: int, phase: Any) -> None:
    layer = attention(make_context())
    weights, x = found_weights(layer, exact), exact.rows(rows, H)
    found = layer.qkv(x, phase)
    assert_qkv(layer, exact, x, found, weights)
    attended = exact.rows(rows, HEADS * D, 1)
    gated = attended.astype(np.float64) / (1 + np.exp(-found.gate.astype(np.float64)))
    expected = exact.project(gated, weights["o_proj"], 2.0**-8 * np.abs(gated) + 1e-6)
    exact.assert_close(layer.output(attended, found.gate, phase), *expected)


@pytest.mark.parametrize("rows", [1, 4, 8, 17])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
@pytest.mark.parametrize("arm", QKV_ARMS)
def test_every_arm_matches_float64_for_every_kind(
    make_context: Make, exact: Any, rows: int, gated: bool, quant: str, arm: Any
) -> None:
    layer = attention(make_context(), gated, quant)
    weights, x = found_weights(layer, exact), exact.rows(rows, H)
    assert_qkv(layer, exact, x, layer.qkv(x, "decode", arm), weights)
    attended = exact.rows(rows, HEADS * D, 1)
    exact.assert_close(layer.output(attended, None, "decode", arm), *exact.project(attended, weights["o_proj"]))


@pytest.mark.parametrize("rows", [4, 5, 8])
@pytest.mark.parametrize("arm", ["tiled", "tiers", "per_seq"])
def test_gemv_arms_are_bit_identical_to_one_row_at_a_time(make_context: Make, exact: Any, rows: int, arm: Any) -> None:
    layer = attention(make_context())
    x = exact.rows(rows, H)
    one_by_one = np.concatenate([joined(layer.qkv(x[m : m + 1], "decode")) for m in range(rows)])
    assert joined(layer.qkv(x, "decode", arm)).tobytes() == one_by_one.tobytes()


@pytest.mark.parametrize(("rows", "arm", "launches"), [
    (1, "single", {"qgkv1": 1}), (3, "fused", {"qgkv3": 1}), (8, "tiled", {"qgkv3": 2, "qgkv2": 1}),
    (4, "tiled", {"qgkv3": 1, "qgkv1": 1}), (4, "per_seq", {"qgkv1": 4}), (4, "tiers", {}), (4, "wide", {}),
])  # fmt: skip
def test_qkv_tiles_go_through_the_fused_launches(
    make_context: Make, exact: Any, rows: int, arm: Any, launches: dict[str, int]
) -> None:
    layer = attention(make_context())
    layer.qkv(exact.rows(rows, H), "decode", arm)
    assert layer.used == {arm: 1, **launches}
    alone = {"tiers": {"gemv4": 1}, "wide": {"t": 1}}.get(arm, {})
    assert layer.linears.q.used == layer.linears.v.used == alone


def test_qkv_without_the_launch_for_all_has_the_same_bits_from_two(make_context: Make, exact: Any) -> None:
    without = tuple(f"w4a16_gemv::w4a16_gemv_qgkv{tier}" for tier in ("", "_batch2", "_batch3"))
    layer, apart = attention(make_context()), attention(make_context(without=without))
    x = exact.rows(8, H)
    assert joined(apart.qkv(x, "decode", "tiled")).tobytes() == joined(layer.qkv(x, "decode", "tiled")).tobytes()
    assert apart.used == {"tiled": 1, "qg3": 2, "dual3": 2, "qg2": 1, "dual2": 1}


def test_tiled_output_reads_the_weight_once_a_tile(make_context: Make, exact: Any) -> None:
    layer = attention(make_context())
    layer.output(exact.rows(8, HEADS * D), None, "decode")
    assert layer.linears.o.used == {"gemv3": 2, "gemv2": 1}


@pytest.mark.parametrize(("asked", "launches"), [
    ("auto", {"gemv3": 2, "gemv2": 1}), ("tiled", {"gemv3": 2, "gemv2": 1}), ("wide", {"t": 1}),
    ("per_seq", {"gemv1": 8}),
])  # fmt: skip
def test_qkv_arm_lever_governs_the_output_projection_too(
    make_context: Make, exact: Any, asked: str, launches: dict[str, int]
) -> None:
    layer = attention(make_context(QKV_ARM=asked))
    layer.output(exact.rows(8, HEADS * D), None, "decode")
    assert layer.linears.o.used == launches
    assert layer.arm(8, "decode") == ("tiled" if asked == "auto" else asked)


def test_tiles_need_three_rows_of_scratch_whatever_the_batch(make_context: Make, exact: Any) -> None:
    layer = attention(make_context(max_rows=3))
    layer.qkv(exact.rows(33, H), "decode", "tiled")
    with pytest.raises(Exception, match=r"attn\.fused: qkv\.wide needs"):
        layer.qkv(exact.rows(33, H), "decode", "wide")


def test_requantised_weights_match_the_quantiser_and_get_their_transposed_copy(make_context: Make, exact: Any) -> None:
    ctx = make_context(FP4_PROJ_DECODE=True)
    layer = attention(ctx, quant="bf16")
    source = SyntheticWeights(3)

    def requantised(name: str, rows: int, columns: int) -> Any:
        stored = source.find(WeightSpec(f"{LABEL}.{name}", (rows, columns), "bf16"))
        return nvfp4.dequantize(nvfp4.quantize(stored.values))

    weights = {
        "q_proj": requantised("q_proj", 2 * HEADS * D, H),
        "k_proj": requantised("k_proj", KV * D, H),
        "v_proj": requantised("v_proj", KV * D, H),
    }
    for rows, arm in ((1, "single"), (8, "tiled"), (8, "wide")):
        x = exact.rows(rows, H)
        assert_qkv(layer, exact, x, layer.qkv(x, "decode", arm), weights)
    built = {copy.layout for copy in ctx.kernels.layouts.copies if copy.weight == f"{LABEL}.q_proj" and copy.is_built}
    assert built == {"nvfp4_row_major", "nvfp4_transposed"}
    assert ctx.kernels.layouts.missing == ()


def equal_scales() -> dict[str, Any]:
    """Weights whose three input projections share one global scale, as a checkpoint with a fused q|k|v has them."""
    source, found = SyntheticWeights(3), {}
    shapes = {"q_proj": (2 * HEADS * D, H), "k_proj": (KV * D, H), "v_proj": (KV * D, H), "o_proj": (H, HEADS * D)}
    for name, shape in shapes.items():
        weight = source.find(WeightSpec(f"{LABEL}.{name}", shape, "nvfp4"))
        found[f"{LABEL}.{name}"] = Nvfp4Weight(weight.packed, weight.block_scale, np.array(0.001, np.float32))
    for name in ("input_norm", "post_norm"):
        found[f"{LABEL}.{name}"] = source.find(WeightSpec(f"{LABEL}.{name}", (H,), "array"))
    return found


@pytest.mark.parametrize("rows", [4, 33])
def test_equal_global_scales_share_one_copy_for_the_wide_arm(make_context: Make, exact: Any, rows: int) -> None:
    weights = equal_scales()
    ctx = make_context(weights)
    layer = attention(ctx)
    x = exact.rows(rows, H)
    plain = {name.removeprefix(f"{LABEL}."): nvfp4.dequantize(w) for name, w in weights.items() if "proj" in name}
    assert_qkv(layer, exact, x, layer.qkv(x, "decode", "wide"), plain)
    assert_qkv(layer, exact, x, layer.qkv(x, "decode", "tiled"), plain)
    assert layer.linears.fused is not None
    assert layer.linears.fused.used == {"t": 1}
    copies = {copy.weight for copy in ctx.kernels.layouts.copies if copy.layout == "nvfp4_transposed"}
    assert copies == {f"{LABEL}.qkv_proj", f"{LABEL}.o_proj"}


def test_unequal_global_scales_are_never_fused(make_context: Make) -> None:
    layer = attention(make_context())
    assert layer.linears.fused is None
    assert fuse_rows([nvfp4.quantize(np.ones((1, 16))), nvfp4.quantize(np.full((1, 16), 2.0))]) is None


def test_weights_as_found_beat_the_manifest(make_context: Make) -> None:
    layer = attention(make_context(equal_scales()), quant="bf16")
    assert layer.linears.q.weight.spec.quant == "nvfp4"


def test_fp8_weights_are_refused_and_never_requantised(make_context: Make) -> None:
    class Fp8:
        quant, shape = "fp8", (128, 48)

    with pytest.raises(UsageError, match="q_proj is quantised as fp8, expected nvfp4 or bf16"):
        attention(make_context({f"{LABEL}.q_proj": Fp8()}))


@pytest.mark.parametrize(
    ("head_dim", "is_cpu", "asks"), [(256, False, True), (96, False, False), (96, True, True), (64, False, True)]
)
def test_attention_in_one_launch_is_asked_for_where_its_kernel_takes_the_heads(head_dim, is_cpu, asks) -> None:
    asked: list[str] = []

    def keep(*members: tuple[str, str], **_: object) -> None:
        asked.append(members[0][1])

    target = SimpleNamespace(is_cpu=is_cpu)
    kernels = SimpleNamespace(target=target, first_of=keep)
    model, own = dims(head_dim=head_dim)
    own = replace(own, qk_norm=True, rope=RopeDims(1e7, 16))
    NormTurnAppend(SimpleNamespace(kernels=kernels), model, own, None, None)  # type: ignore[arg-type]
    first = "paged_decode_attn_fresh" if asks else "paged_decode_attn_gated"
    assert asked == ["qk_norm_rope_append", "qk_norm_rope_append", first]


@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
@pytest.mark.parametrize("gated", [True, False])
def test_no_rows_give_no_rows(make_context: Make, exact: Any, phase: Any, gated: bool) -> None:
    layer = attention(make_context(), gated)
    none = np.zeros(0, np.int32)
    batch = Batch(phase, none, none, np.zeros(1, np.int32), none, np.zeros((0, 1), np.int32), none, none)
    cache = KvCache(layer.dims, 4, PAGE)
    assert layer.forward(exact.rows(1, H)[:0], batch, cache).shape == (0, H)


def test_norms_match_float64(make_context: Make, exact: Any) -> None:
    layer = attention(make_context())
    x, residual = exact.rows(5, H), exact.rows(5, H, 1)
    weight = SyntheticWeights(3).find(WeightSpec(f"{LABEL}.post_norm", (H,), "array")).astype(np.float64)
    total = (x.astype(np.float64) + residual.astype(np.float64)).astype(x.dtype)
    out = np.empty_like(x)
    layer.post_norm.add(x, residual, out)
    assert residual.tobytes() == total.tobytes()
    wide = total.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * (1 + weight)
    exact.assert_close(out, expected, 2.0**-8 * np.abs(expected) + 1e-5)
    layer.post_norm.forward(total, again := np.empty_like(x))
    assert again.tobytes() == out.tobytes()
    layer.leave(x, residual := total.copy())
    exact.assert_close(residual, wide + x.astype(np.float64), 2.0**-8 * np.abs(wide + x.astype(np.float64)))


MMA = "prefill_paged::prefill_paged_attn_mma"


def prompt(rows: int, phase: Any) -> Batch:
    """Return a batch of one sequence in the first pages of a cache."""
    at, none = np.arange(rows, dtype=np.int32), np.zeros(1, np.int32)
    pages = np.arange(-(-rows // PAGE), dtype=np.int32)[None]
    ends, length = np.array([0, rows], np.int32), np.array([rows], np.int32)
    return Batch(phase, at, at, ends, at, pages, length, none)


@pytest.mark.parametrize(("head_dim", "rows", "phase", "more", "arm"), [
    (128, EDGE, "prefill", {}, "mma"), (128, EDGE - 1, "prefill", {}, "rows"), (128, EDGE, "verify", {}, "rows"),
    (D, EDGE, "prefill", {}, "rows"), (128, EDGE, "prefill", {"NO_PREFILL_MMA": True}, "rows"),
    (128, EDGE, "prefill", {"without": (MMA,)}, "rows"),
])  # fmt: skip
def test_prompts_are_attended_in_tiles_where_there_are_any_and_else_row_by_row(
    make_context: Make, exact: Any, head_dim: int, rows: int, phase: Any, more: dict[str, Any], arm: str
) -> None:
    layer = Attention(make_context(max_rows=rows, **more), *dims(head_dim=head_dim))
    batch = prompt(rows, phase)
    assert layer.prefill_arm(batch) == arm
    cache = KvCache(layer.dims, -(-rows // PAGE), PAGE)
    mixed = layer.forward(exact.rows(rows, H), batch, cache)
    assert mixed.shape == (rows, H)
    assert np.isfinite(mixed.astype(np.float32)).all()
