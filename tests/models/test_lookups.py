"""The lookups of the constructors, written out: required (r), optional (o), chains with their members in order."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_muster.MODEL_toml import load_manifest, manifest_folder
from kernel_muster.models.build import build_model
from kernel_muster.models.drafter import build_drafter
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

Make = Callable[..., LookupSession]

NORMS = {"r norm::rms_norm", "r norm::rms_norm_residual"}
DENSE = {"r gemv::dense_gemv_bf16", "o gemv::dense_gemv_bf16_batchm", "r gemm::dense_gemm_bf16"}
EXACT = {f"r w4a16_gemv::w4a16_gemv{tier}" for tier in ("", "_batch2", "_batch3")}
BATCH = {f"o w4a16_gemv::w4a16_gemv_batch{rows}" for rows in (4, 5, 6, 7, 8, 16)}
WIDE = {"o w4a16_gemv::w4a16_gemv_batch256"}
TILED = ("", "_batch2", "_batch3")
DUAL = {f"r w4a16_gemv::w4a16_gemv_dual{tier}" for tier in TILED}
QGKV = {
    f"r w4a16_gemv::w4a16_gemv_qgkv{t} > w4a16_gemv::w4a16_gemv_{part}{t}" for t in TILED for part in ("qg", "dual")
}
SWIGLU = {
    "o w4a16_gemv::w4a16_gemv_dual_silu_batch8",
    *(f"r w4a16_gemv::w4a16_gemv_dual_silu{tier} > w4a16_gemv::w4a16_gemv_dual{tier}" for tier in TILED),
}


def gemms(*names: str) -> str:
    return " > ".join(f"w4a16::w4a16_gemm{name}" for name in names)


T = f"r {gemms('_t_p3', '_t', '_t_m128', '')}"
M128 = f"r {gemms('_t_m128', '_t_p3', '_t', '')}"
N64 = f"r {gemms('_t_k64_n64_p3', '_t_k64_p3', '_t_k64')}"
SHALLOW, DEEP = {T, M128}, {N64}  # by the K of the layer's weights
GATE = {"r residual_add::sigmoid_gate_mul", "r residual_add::sigmoid_gate_mul_batched"}
FP4 = "o w4a4::w4a4_gemm_mfast"
SPLIT = {"r ssm_preprocess::deinterleave_qg"}
APPEND = "kv_cache::kv_cache_append"
PLAIN = {"r rope::qk_norm_rope_append > rope::rope_forward"}
#: Tokens with three positions, whose parts have separate lookups.
THREE = {
    "o rope::rope_mrope_interleaved",
    f"r {APPEND}",
    "r paged_decode::paged_decode_attn_gated > paged_decode::paged_decode_attn",
}
PREFILL_MMA = "o prefill_paged::prefill_paged_attn_mma"
CHUNKED_PREFILL = "o gated_delta_rule::gated_delta_rule_prefill_chunked"
PAGED = {"r prefill_paged::prefill_paged_attn", PREFILL_MMA}
FRESH = "r " + " > ".join(f"paged_decode::paged_decode_attn{form}" for form in ("_fresh", "_gated", ""))
# Lookups of every attention of a model, for all weights and positions.
MIXER = NORMS | PAGED | {FRESH} | PLAIN | GATE | SPLIT
PACKED = EXACT | BATCH | QGKV | SHALLOW | {FP4}
TEXT_ATTENTION = MIXER | PACKED | {f"r rope::qk_norm_rope_append > {APPEND}"}
ATTENTION = MIXER | PACKED | THREE
RULE = {
    "r causal_conv1d::causal_conv1d_update",
    "r causal_conv1d::causal_conv1d_update_prefill",
    "r causal_conv1d::causal_conv1d_verify_n > causal_conv1d::causal_conv1d_update",
    *(f"r gated_delta_rule::gated_delta_rule_{form}" for form in ("prefill", "chunk2", "chunk3")),
    "r " + " > ".join(f"gated_delta_rule::gated_delta_rule_decode{form}" for form in ("_norm_strided", "_strided", "")),
    "r gated_delta_rule::gated_delta_rule_verify_n > gated_delta_rule::gated_delta_rule_decode",
    CHUNKED_PREFILL,
    "r ssm_preprocess::deinterleave_qkvz",
    "r ssm_preprocess::compute_gdn_gates",
}
GDN = NORMS | DENSE | EXACT | BATCH | WIDE | SHALLOW | RULE | {
    "r norm::rms_norm_gated", "r w4a16_gemv::w4a16_gemv_qkvz", "o w4a16_gemv::w4a16_gemv_gdn_in",
}  # fmt: skip
FFN = EXACT | BATCH | SWIGLU | SHALLOW | DEEP | {"r silu::silu_mul", "o w4a4::w4a4_gemm"}
GROUPED = {
    "r moe::moe_sort_by_expert",
    *(f"r moe_w4a16::moe_w4a16_grouped_{f}_k64 > moe_w4a16::moe_w4a16_grouped_{f}" for f in ("gate_up", "down")),
}
ROUTED = GROUPED | {"r gemm::dense_gemm_bf16", "r moe::moe_topk_softmax"}
PAIRS = {f"moe_fused_batch{n}::moe_fused_batch{n}_{f}" for n in (2, 3) for f in ("gate_up", "down")}
GATE_ADD, UNPERMUTE = "moe_shared::moe_shared_gate_add", "moe::moe_unpermute_reduce_indexed"
FUSED = {
    f"r moe_fused_shared::moe_fused_shared_{f} > {part}" for f in ("gate_up", "down") for part in (*PAIRS, GATE_ADD)
}
COMBINE = {f"r moe_shared::moe_unpermute_shared_add > {part}" for part in (UNPERMUTE, GATE_ADD)}
MOE = ROUTED | EXACT | BATCH | WIDE | SWIGLU | SHALLOW | FUSED | COMBINE | {"r moe::moe_silu_mul"}
HEAD = {
    "r w4a16_gemv::w4a16_gemv", "o w4a16_gemv::w4a16_gemv_batch2", "o w4a16_gemv::w4a16_gemv_batch3",
    *BATCH, "r argmax::argmax_bf16",
}  # fmt: skip
EMBEDDING = {"r embedding::gather"}
SAMPLER = {"o sampling::sample_top_k_top_p", "o sampling::verify_greedy"}
TOP = HEAD | EMBEDDING | SAMPLER
BLOCK = NORMS | EXACT | BATCH | DUAL | SHALLOW | {
    FP4, "r rope::rope_yarn", f"r {APPEND}", "r paged_decode::paged_decode_attn",
}  # fmt: skip
# 17 rows and more, none of a prompt.
BLOCK_FFN = SHALLOW | DEEP | {"r silu::silu_mul"}
CONTEXT = EXACT | BATCH | DEEP | {M128}


def manifest(name: str, **changes: Any) -> Any:
    """Return a shipped manifest's model table, four layers deep."""
    loaded, findings = load_manifest(manifest_folder() / name / "MODEL.toml")
    assert loaded is not None
    assert findings == []
    return SimpleNamespace(model=loaded.model.model_copy(update={"num_layers": 4, **changes}), dflash=loaded.dflash)


def build(make_session: Make, name: str, without: tuple[str, ...] = (), **levers: object) -> Lookups:
    kernels = Lookups(make_session(without, **levers))
    (build_drafter if "dflash" in name else build_model)(manifest(name), kernels)
    return kernels


def of_layer(rows: Any, layer: str) -> set[str]:
    return {question for question, row in rows.items() if layer in row.layers}


@pytest.mark.parametrize(("name", "layer", "expected"), [
    ("qwen3.6-35b-a3b", "layers.0.gdn", GDN),
    ("qwen3.6-35b-a3b", "layers.3.attn", ATTENTION),
    ("qwen3.6-35b-a3b", "layers.0.moe", MOE),
    ("qwen3.6-35b-a3b", "layers.3.moe", MOE),
    ("qwen3.6-35b-a3b", "lm_head", HEAD),
    ("qwen3.6-35b-a3b", "embedding", EMBEDDING),
    ("qwen3.6-27b", "layers.2.gdn", GDN | DEEP),
    ("qwen3.6-27b", "layers.3.attn", ATTENTION | DEEP),
    ("qwen3.6-27b", "layers.1.ffn", FFN),
    ("qwen3.6-27b", "lm_head", HEAD),
    ("holo-3.1-35b-a3b", "layers.3.attn", ATTENTION),
    ("qwen3.6-35b-a3b", "final_norm", NORMS),
    ("qwen3.6-35b-a3b", "sampler", SAMPLER),
    ("qwen3.6-35b-a3b", "mtp", EXACT | BATCH | WIDE | SHALLOW | {"r norm::rms_norm"}),
    ("qwen3.6-27b", "mtp", EXACT | BATCH | WIDE | DEEP | {M128, "r norm::rms_norm"}),
    ("qwen3.6-35b-a3b", "mtp.0.attn", ATTENTION),
    ("qwen3.6-35b-a3b", "mtp.0.moe", MOE),
    ("qwen3.6-27b", "mtp.0.ffn", FFN),
    ("ornith-1.0-35b", "mtp.0.attn", ATTENTION),
    ("qwen3.6-35b-a3b-dflash", "layers.1.attn", BLOCK),
    ("qwen3.6-35b-a3b-dflash", "layers.1.ffn", BLOCK_FFN),
    ("qwen3.6-35b-a3b-dflash", "context", CONTEXT),
])  # fmt: skip
def test_layer_looks_up_exactly_its_table(make_session: Make, asked: Any, name: str, layer: str, expected: Any) -> None:
    assert of_layer(asked(build(make_session, name)), layer) == expected


@pytest.mark.parametrize(("name", "expected"), [
    ("qwen3.6-35b-a3b", ATTENTION | GDN | MOE | TOP),
    ("qwen3.6-27b", ATTENTION | GDN | FFN | TOP),
    ("holo-3.1-35b-a3b", ATTENTION | GDN | MOE | TOP),
    ("qwen3.6-35b-a3b-dflash", BLOCK | BLOCK_FFN | CONTEXT | HEAD | EMBEDDING),
])  # fmt: skip
def test_model_looks_up_nothing_else_and_labels_every_layer(
    make_session: Make, asked: Any, name: str, expected: set[str]
) -> None:
    rows = asked(build(make_session, name))
    assert set(rows) == expected
    assert {layer for row in rows.values() for layer in row.layers} == labels(name)


def labels(name: str) -> set[str]:
    top = {"lm_head", "embedding", "final_norm"}
    if "dflash" in name:
        own = {f"layers.{i}.{part}" for i in range(4) for part in ("attn", "ffn")}
        return top | own | {"context", "context.norm"}
    ffn = "moe" if "35b" in name else "ffn"
    mixers = {"layers.0.gdn", "layers.1.gdn", "layers.2.gdn", "layers.3.attn"}
    mtp = set() if "holo" in name else {"mtp", "mtp.0.attn", f"mtp.0.{ffn}", "mtp.norm"}
    return top | mixers | mtp | {f"layers.{i}.{ffn}" for i in range(4)} | {"sampler"}


def test_dispatch_sites_are_lines_of_layers_and_not_of_helpers(make_session: Make, asked: Any) -> None:
    for name in ("qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3.6-35b-a3b-dflash"):
        for row in asked(build(make_session, name)).values():
            assert row.sites
            assert all(re.match(r"models/(layers|ffn|heads)/", site) for site in row.sites)
            helpers = ("families.py", "tiles.py", "moe_kernels.py")
            assert not any(helper in site for site in row.sites for helper in helpers)


@pytest.mark.parametrize(("lever", "gone", "left"), [
    ("NO_TGEMM_PIPELINE3", {T, M128}, {f"r {gemms('_t', '_t_m128', '')}", f"r {gemms('_t_m128', '_t', '')}"}),
    ("NO_K64_PIPELINE3", {N64}, {f"r {gemms('_t_k64_n64_p3', '_t_k64')}"}),
    ("NO_K64_N64", {N64}, {f"r {gemms('_t_k64_p3', '_t_k64')}"}),
    ("NO_PREFILL_MMA", {PREFILL_MMA}, set()),
    ("NO_CHUNKED_PREFILL", {CHUNKED_PREFILL}, set()),
])  # fmt: skip
def test_kill_switch_issues_no_lookup_and_off_keeps_it(
    make_session: Make, asked: Any, lever: str, gone: set[str], left: set[str]
) -> None:
    everything = ATTENTION | GDN | FFN | TOP
    killed = set(asked(build(make_session, "qwen3.6-27b", **{lever: "1"})))
    assert killed == (everything - gone) | left
    assert set(asked(build(make_session, "qwen3.6-27b", **{lever: "0"}))) == everything


@pytest.mark.parametrize(("name", "levers", "key"), [
    ("qwen3.6-27b", {"W4A16_NARROW_BLOCKS": 0}, f"r {gemms('_t_k64_p3', '_t_k64')}"),
    ("qwen3.6-35b-a3b", {"W4A16_K64_MIN_K": 2048}, N64),
    ("qwen3.6-35b-a3b", {"W4A16_M128_ABOVE": 0}, M128),
])  # fmt: skip
def test_edges_decide_which_gemms_are_asked_for(
    make_session: Make, asked: Any, name: str, levers: dict[str, int], key: str
) -> None:
    tiles = {one for one in asked(build(make_session, name, **levers)) if "w4a16::" in one}
    assert key in tiles
    assert (T in tiles) is ("W4A16_M128_ABOVE" not in levers)
    assert (N64 in tiles) is ("W4A16_K64_MIN_K" in levers)


@pytest.mark.parametrize(("asked_for", "key"), [
    ("v2", "o w4a16_v2::w4a16_gemm_t_m128_v2"), ("v3", "o w4a16_v3::w4a16_gemm_t_m128_v3"), ("v1", None),
])  # fmt: skip
def test_variant_is_looked_up_only_when_asked_for(
    make_session: Make, asked: Any, asked_for: str, key: str | None
) -> None:
    rows = asked(build(make_session, "qwen3.6-27b", W4A16_VARIANT=asked_for))
    variants = {question for question in rows if "_v2" in question or "_v3" in question}
    assert variants == ({key} if key else set())
    assert all(rows[question].requested_by == "MUSTER_W4A16_VARIANT" for question in variants)


def test_fp32_routing_asks_for_its_kernel_in_the_router_place(make_session: Make, asked: Any) -> None:
    rows = asked(build(make_session, "qwen3.6-35b-a3b", FP32_ROUTING=True))
    row = rows["o moe::moe_router_logits_f32"]
    assert row.requested_by == "MUSTER_FP32_ROUTING"
    assert not any(layer.endswith(".moe") for layer in rows["r gemm::dense_gemm_bf16"].layers)
    assert "mtp.0.moe" in row.layers


def test_requantising_asks_for_the_quantiser_in_attention_only(make_session: Make, asked: Any) -> None:
    kernels = build(make_session, "ornith-1.0-35b", FP4_PROJ_DECODE=True)
    quantiser = "o quantize_nvfp4::quantize_bf16_to_nvfp4"
    assert of_layer(asked(kernels), "layers.3.attn") == ATTENTION | {quantiser}
    assert set(asked(kernels)[quantiser].layers) == {"layers.3.attn"}
    assert kernels._session.requests == ()
    assert kernels.layouts.missing == ()


def test_bf16_attention_that_is_kept_asks_for_no_nvfp4_kernel(make_session: Make, asked: Any) -> None:
    kept = of_layer(asked(build(make_session, "ornith-1.0-35b")), "layers.3.attn")
    assert kept == MIXER | DENSE | THREE


def test_ungated_attention_asks_for_no_gate(make_session: Make, asked: Any) -> None:
    attention = manifest("qwen3.6-27b").model.attention.model_copy(update={"gated": False})
    kernels = Lookups(make_session())
    build_model(manifest("qwen3.6-27b", attention=attention), kernels)
    plain = NORMS | PAGED | PLAIN | EXACT | BATCH | DUAL | SHALLOW | DEEP | {FP4, "r paged_decode::paged_decode_attn"}
    assert of_layer(asked(kernels), "layers.3.attn") == plain | {"o rope::rope_mrope_interleaved", f"r {APPEND}"}


def test_rope_without_interleaved_positions_asks_for_the_cache_behind_the_launch_that_fills_it(
    make_session: Make, asked: Any
) -> None:
    rope = manifest("qwen3.6-27b").model.rope.model_copy(update={"mrope_interleaved": False})
    kernels = Lookups(make_session())
    build_model(manifest("qwen3.6-27b", rope=rope), kernels)
    assert of_layer(asked(kernels), "layers.3.attn") == TEXT_ATTENTION | DEEP


def test_layer_without_ffn_asks_for_the_addition_to_the_residual(make_session: Make, asked: Any) -> None:
    kernels = Lookups(make_session())
    build_model(manifest("qwen3.6-27b", ffn="none", mtp=None), kernels)
    assert of_layer(asked(kernels), "layers.3.attn") == ATTENTION | DEEP | {"r residual_add::bf16_residual_add"}


def test_sigmoid_router_asks_for_the_sigmoid_alone_and_no_shared_expert_for_none(
    make_session: Make, asked: Any
) -> None:
    changes = {"router": "sigmoid", "shared_intermediate_size": None}
    moe = manifest("qwen3.6-35b-a3b").model.moe.model_copy(update=changes)
    kernels = Lookups(make_session())
    build_model(manifest("qwen3.6-35b-a3b", moe=moe), kernels)
    routed = ROUTED - {"r moe::moe_topk_softmax"} | {f"r {key}" for key in (*PAIRS, UNPERMUTE, "moe::moe_topk_sigmoid")}
    assert of_layer(asked(kernels), "layers.0.moe") == routed


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "qwen3.6-27b"])
def test_every_layout_is_planned_and_only_the_fp4_tiles_are_absent(make_session: Make, asked: Any, name: str) -> None:
    kernels = build(make_session, name)
    assert kernels.layouts.missing == ()
    keys = {str(key) for row in asked(kernels).values() for key in row.members}
    registered = {str(key) for key in kernels.catalog.by_key}
    assert keys - registered == ({"w4a4::w4a4_gemm_mfast"} | ({"w4a4::w4a4_gemm"} if "27b" in name else set()))


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "qwen3.6-27b"])
def test_model_is_built_to_the_end_without_any_one_kernel(make_session: Make, asked: Any, name: str) -> None:
    everything = asked(build(make_session, name))
    for key in sorted({str(key) for row in everything.values() for key in row.members}):
        assert set(asked(build(make_session, name, without=(key,)))) == set(everything)


def test_every_question_names_what_reaches_its_kernel(make_session: Make, asked: Any) -> None:
    for name in ("qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3.6-35b-a3b-dflash", "ornith-1.0-35b"):
        for levers in ({}, {"W4A16_VARIANT": "v3", "FP32_ROUTING": "35b" in name}, {"FP4_PROJ_DECODE": True}):
            rows = asked(build(make_session, name, **levers))
            assert [question for question, row in rows.items() if not row.reached_by] == []
