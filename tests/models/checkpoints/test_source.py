from collections.abc import Callable
from typing import Any

import kernel_muster as km
import ml_dtypes
import numpy as np
import pytest
from kernel_muster.models.checkpoints import CheckpointError, CheckpointWeights, WeightReport, open_checkpoint
from kernel_muster.models.checkpoints.names import Names
from kernel_muster.models.weights.source import PlanOnly, WeightSpec
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.errors import UsageError

Same = Callable[[Nvfp4Weight, Nvfp4Weight], None]
H, V, KH, DK, VH, DV = 32, 24, 2, 8, 4, 16
GDN = {
    "linear_num_key_heads": KH, "linear_key_head_dim": DK, "linear_num_value_heads": VH, "linear_value_head_dim": DV,
}  # fmt: skip
QKV, Z = 2 * KH * DK + VH * DV, VH * DV
PREFIXES = ["model.", "model.language_model.", "language_model.model."]


def source(disk: Any, tensors: Any, quantization: Any = None, requantise: Any = (), **config: Any) -> CheckpointWeights:
    names = {name for name in tensors if name.endswith("embed_tokens.weight")}
    if not names:
        tensors = tensors | {"model.embed_tokens.weight": disk.values(V, H)}
    return CheckpointWeights(open_checkpoint(disk.write(tensors, quantization, **(GDN | config))), requantise)


def spec(name: str, *shape: int, quant: str = "nvfp4") -> WeightSpec:
    return WeightSpec(name, shape, quant)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("layers.3.attn.q_proj", "layers.3.self_attn.q_proj"),
        ("layers.3.attn.o_proj", "layers.3.self_attn.o_proj"),
        ("layers.10.gdn.out_proj", "layers.10.linear_attn.out_proj"),
        ("layers.0.ffn.gate_proj", "layers.0.mlp.gate_proj"),
        ("layers.0.moe.shared_expert.down_proj", "layers.0.mlp.shared_expert.down_proj"),
    ],
)
def test_projection_is_found_under_the_name_of_checkpoints(
    disk: Any, same: Same, prefix: str, ours: str, theirs: str
) -> None:
    weight = disk.weight(6, H)
    tensors = disk.modelopt(prefix + theirs, weight) | {f"{prefix}embed_tokens.weight": disk.values(V, H)}
    found = source(disk, tensors, disk.mo_config())
    same(found.find(spec(ours, 6, H)), weight)
    assert found.quant_of(ours) == "nvfp4"


@pytest.mark.parametrize(
    ("ours", "theirs", "stored", "asked"),
    [
        ("embedding.table", "model.embed_tokens.weight", (V, H), (V, H)),
        ("layers.1.attn.input_norm", "model.layers.1.input_layernorm.weight", (H,), (H,)),
        ("layers.1.gdn.post_norm", "model.layers.1.post_attention_layernorm.weight", (H,), (H,)),
        ("layers.1.attn.q_norm", "model.layers.1.self_attn.q_norm.weight", (16,), (16,)),
        ("layers.1.gdn.norm", "model.layers.1.linear_attn.norm.weight", (DV,), (DV,)),
        ("layers.1.gdn.conv1d", "model.layers.1.linear_attn.conv1d.weight", (QKV, 1, 4), (QKV, 4)),
        ("layers.1.moe.shared_expert_gate", "model.layers.1.mlp.shared_expert_gate.weight", (1, H), (H,)),
        ("final_norm.weight", "model.norm.weight", (H,), (H,)),
        ("mtp.embedding_norm", "mtp.pre_fc_norm_embedding.weight", (H,), (H,)),
        ("mtp.hidden_norm", "mtp.pre_fc_norm_hidden.weight", (H,), (H,)),
        ("mtp.norm.weight", "mtp.norm.weight", (H,), (H,)),
        ("mtp.0.attn.q_norm", "mtp.layers.0.self_attn.q_norm.weight", (16,), (16,)),
    ],
)
def test_array_is_found_in_the_shape_that_layers_ask_for(
    disk: Any, ours: str, theirs: str, stored: Any, asked: Any
) -> None:
    values = disk.values(*stored)
    got = source(disk, {theirs: values}, disk.ct_config()).find(spec(ours, *asked, quant="array"))
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, values.reshape(asked))


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_decay_parameters_are_fp32(disk: Any, name: str, dtype: Any) -> None:
    stored = np.array([0.1, -3.7, 2.0, 5.5]).astype(dtype)
    ours = {"A_log": "a_log"}.get(name, name)
    found = source(disk, {f"model.layers.0.linear_attn.{name}": stored})
    got = found.find(spec(f"layers.0.gdn.{ours}", VH, quant="array"))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, stored.astype(np.float32))


def test_norm_in_fp32_is_narrowed_only_where_nothing_is_lost(disk: Any) -> None:
    name, ask = "model.layers.0.input_layernorm.weight", spec("layers.0.attn.input_norm", 2, quant="array")
    got = source(disk, {name: np.array([1.5, -0.25], np.float32)}).find(ask)
    np.testing.assert_array_equal(got, np.array([1.5, -0.25], ml_dtypes.bfloat16))
    with pytest.raises(CheckpointError, match="expected BF16, or FP32 values that are BF16 exactly"):
        source(disk, {name: np.array([1.5, 0.1], np.float32)}).find(ask)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("ours", "theirs", "quant"), [
    ("layers.0.attn.input_norm", "input_layernorm.weight", "array"),
    ("layers.0.gdn.dt_bias", "linear_attn.dt_bias", "array"),
    ("layers.0.attn.q_proj", "self_attn.q_proj.weight", "bf16"),
    ("layers.0.moe.experts.down_proj", "mlp.experts.down_proj", "bf16"),
])  # fmt: skip
def test_value_that_is_no_number_is_refused_with_its_place(
    disk: Any, wrong: float, dtype: Any, ours: str, theirs: str, quant: str
) -> None:
    shape = {"array": (4,), "bf16": (3, 4)}[quant] if "experts" not in ours else (2, 3, 4)
    values = disk.values(*shape).astype(dtype if quant == "array" else ml_dtypes.bfloat16)
    values[(-1,) * len(shape)] = wrong
    name = f"model.layers.0.{theirs}"
    with pytest.raises(CheckpointError) as raised:
        source(disk, {name: values}).find(spec(ours, *shape, quant=quant))
    last = [size - 1 for size in shape]
    assert str(raised.value).endswith(f"{name}: expected finite numbers, got {wrong} at {last}")


def test_value_that_is_no_number_is_found_far_behind_in_a_large_tensor(disk: Any) -> None:
    values = np.zeros((3, 1 << 20), ml_dtypes.bfloat16)
    values[2, 7] = np.nan
    with pytest.raises(CheckpointError, match=r"got nan at \[2, 7\]"):
        source(disk, {"model.layers.0.self_attn.q_proj.weight": values}).find(
            spec("layers.0.attn.q_proj", 3, 1 << 20, quant="bf16")
        )


def test_rate_of_zero_may_be_stored_as_its_logarithm(disk: Any) -> None:
    stored = np.array([0.5, -np.inf, 1.0, 2.0], np.float32)
    found = source(disk, {"model.layers.0.linear_attn.A_log": stored})
    np.testing.assert_array_equal(found.find(spec("layers.0.gdn.a_log", VH, quant="array")), stored)
    wrong = source(disk, {"model.layers.0.linear_attn.A_log": -stored})
    with pytest.raises(CheckpointError, match=r"A_log: expected finite numbers, got inf at \[1\]"):
        wrong.find(spec("layers.0.gdn.a_log", VH, quant="array"))


def test_gdn_norm_in_fp32_stays(disk: Any) -> None:
    stored = np.full(DV, 0.1, np.float32)
    got = source(disk, {"model.layers.0.linear_attn.norm.weight": stored}).find(
        spec("layers.0.gdn.norm", DV, quant="array")
    )
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, stored)


def gdn_parts(disk: Any, quant: str) -> tuple[dict[str, Any], Any, Any]:
    """Return separate projections in one format, and their exact values."""
    whole = disk.weight(QKV + Z, H)
    at = "model.layers.0.linear_attn.in_proj_"
    if quant == "bf16":
        values = disk.values(QKV + Z, H)
        return {f"{at}qkv.weight": values[:QKV], f"{at}z.weight": values[QKV:]}, values[:QKV], values[QKV:]
    qkv, z = (
        Nvfp4Weight(whole.packed[rows].copy(), whole.block_scale[rows].copy(), whole.global_scale_decode)
        for rows in (slice(0, QKV), slice(QKV, None))
    )
    tensors = disk.modelopt(f"{at}qkv", qkv) | disk.modelopt(f"{at}z", z)
    return tensors, nvfp4.dequantize(qkv), nvfp4.dequantize(z)


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
def test_separate_gdn_inputs_are_grouped_as_our_layer_splits_them(disk: Any, quant: str) -> None:
    tensors, qkv, z = gdn_parts(disk, quant)
    found = source(disk, tensors, disk.mo_config() if quant == "nvfp4" else None)
    weight = found.find(spec("layers.0.gdn.qkvz_proj", QKV + Z, H, quant=quant))
    fused = nvfp4.dequantize(weight) if quant == "nvfp4" else weight.values.astype(np.float64)
    values = VH // KH * DV
    q, k, v, gate = np.split(fused.reshape(KH, -1, H), [DK, 2 * DK, 2 * DK + values], axis=1)
    np.testing.assert_array_equal(np.concatenate([part.reshape(-1, H) for part in (q, k, v)]), qkv)
    np.testing.assert_array_equal(gate.reshape(-1, H), z)
    assert found.quant_of("layers.0.gdn.qkvz_proj") == quant


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("mtp.fc", "mtp.fc"),
        ("mtp.0.attn.k_proj", "mtp.layers.0.self_attn.k_proj"),
        ("mtp.0.ffn.up_proj", "mtp.layers.0.mlp.up_proj"),
    ],
)
def test_mtp_head_lies_beside_the_text_model(disk: Any, same: Same, ours: str, theirs: str) -> None:
    weight = disk.weight(6, H)
    tensors = disk.modelopt(theirs, weight) | {"model.language_model.embed_tokens.weight": disk.values(V, H)}
    same(source(disk, tensors, disk.mo_config()).find(spec(ours, 6, H)), weight)


def test_gdn_inputs_with_different_global_scales_are_refused(disk: Any) -> None:
    at = "model.layers.0.linear_attn.in_proj_"
    tensors = disk.modelopt(f"{at}qkv", disk.weight(QKV, H)) | disk.modelopt(f"{at}z", disk.weight(Z, H, seed=1))
    with pytest.raises(CheckpointError, match=r"in_proj_qkv \| in_proj_z: expected parts of one weight, got global"):
        source(disk, tensors, disk.mo_config()).find(spec("layers.0.gdn.qkvz_proj", QKV + Z, H))


def test_gdn_inputs_of_two_formats_are_named_and_refused(disk: Any) -> None:
    at = "model.layers.0.linear_attn.in_proj_"
    tensors = disk.modelopt(f"{at}qkv", disk.weight(QKV, H)) | {f"{at}z.weight": disk.values(Z, H)}
    found = source(disk, tensors, disk.mo_config(f"{at}z"))
    assert found.quant_of("layers.0.gdn.qkvz_proj") == "bf16 and nvfp4"
    with pytest.raises(CheckpointError, match="quantisations differ"):
        found.find(spec("layers.0.gdn.qkvz_proj", QKV + Z, H))


def test_fused_gdn_inputs_are_taken_as_they_are(disk: Any, same: Same) -> None:
    weight = disk.weight(QKV + Z, H)
    tensors = disk.compressed_tensors("model.layers.0.linear_attn.in_proj_qkvz", weight, encode=2048.0)
    got = source(disk, tensors, disk.ct_config()).find(spec("layers.0.gdn.qkvz_proj", QKV + Z, H))
    same(got, Nvfp4Weight(weight.packed, weight.block_scale, np.asarray(np.float32(2.0**-11))))


def test_beta_and_alpha_are_all_of_beta_then_all_of_alpha(disk: Any) -> None:
    b, a = disk.values(VH, H), disk.values(VH, H, seed=1)
    at, ask = "model.layers.0.linear_attn.in_proj_", spec("layers.0.gdn.ba_proj", 2 * VH, H, quant="bf16")
    separate = source(disk, {f"{at}b.weight": b, f"{at}a.weight": a}).find(ask)
    each = VH // KH
    grouped = np.concatenate([part[k * each : (k + 1) * each] for k in range(KH) for part in (b, a)])
    fused = source(disk, {f"{at}ba.weight": grouped}).find(ask)
    for got in (separate, fused):
        np.testing.assert_array_equal(got.values, np.concatenate([b, a]))


@pytest.mark.parametrize(
    "change", [{"linear_num_key_heads": 0}, {"linear_key_head_dim": "8"}, {"linear_num_value_heads": 3}]
)
def test_gdn_sizes_that_make_no_sense_are_refused(disk: Any, change: Any) -> None:
    tensors, _, _ = gdn_parts(disk, "bf16")
    with pytest.raises(CheckpointError, match=r"config\.json: expected linear_"):
        source(disk, tensors, **change).find(spec("layers.0.gdn.qkvz_proj", QKV + Z, H, quant="bf16"))
    with pytest.raises(CheckpointError, match=f"expected {QKV + Z + 32} rows, as config.json says, got {QKV + Z} rows"):
        source(disk, tensors, linear_key_head_dim=2 * DK).find(spec("layers.0.gdn.qkvz_proj", QKV + Z, H, quant="bf16"))


def expert_tensors(disk: Any, count: int = 3) -> tuple[dict[str, Any], list[Nvfp4Weight]]:
    weights = [disk.weight(16, H, seed=index) for index in range(count)]
    tensors: dict[str, Any] = {}
    for index, weight in enumerate(weights):
        tensors |= disk.modelopt(f"model.layers.0.mlp.experts.{index}.up_proj", weight)
    return tensors, weights


def test_experts_are_stacked_with_their_own_global_scales(disk: Any, same: Same) -> None:
    tensors, weights = expert_tensors(disk)
    got = source(disk, tensors, disk.mo_config()).find(spec("layers.0.moe.experts.up_proj", 3, 16, H))
    assert got.shape == (3, 16, H)
    assert len(set(got.global_scale_decode.tolist())) == 3
    for index, weight in enumerate(weights):
        same(got[index], weight)


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_experts_is_refused(disk: Any, count: int) -> None:
    tensors, _ = expert_tensors(disk)
    message = (
        "expected experts 0 to 1, got one of number 2" if count == 2 else r"experts\.3\.up_proj.*none of that name"
    )
    with pytest.raises(CheckpointError, match=message):
        source(disk, tensors, disk.mo_config()).find(spec("layers.0.moe.experts.up_proj", count, 16, H))


def test_experts_that_are_not_alike_are_refused(disk: Any) -> None:
    tensors, _ = expert_tensors(disk)
    tensors |= disk.modelopt("model.layers.0.mlp.experts.1.up_proj", disk.weight(32, H))
    with pytest.raises(CheckpointError, match=r"experts\.\*\.up_proj: expected experts that are alike"):
        source(disk, tensors, disk.mo_config()).find(spec("layers.0.moe.experts.up_proj", 3, 16, H))


def test_bf16_experts_come_one_by_one_or_in_one_tensor(disk: Any) -> None:
    gate_up, down = disk.values(3, 32, H), disk.values(3, H, 16)
    base = "model.layers.0.mlp.experts"
    whole = source(disk, {f"{base}.gate_up_proj": gate_up, f"{base}.down_proj": down}, disk.ct_config())
    for name, wanted in (("gate", gate_up[:, :16]), ("up", gate_up[:, 16:]), ("down", down)):
        got = whole.find(spec(f"layers.0.moe.experts.{name}_proj", *wanted.shape, quant="bf16"))
        np.testing.assert_array_equal(got.values, wanted)
    assert whole.quant_of("layers.0.moe.experts.up_proj") == "bf16"
    single = source(disk, {f"{base}.{index}.down_proj.weight": down[index] for index in range(3)})
    got = single.find(spec("layers.0.moe.experts.down_proj", 3, H, 16, quant="bf16"))
    np.testing.assert_array_equal(got.values, down)


def test_bf16_is_requantised_only_where_asked(disk: Any, same: Same) -> None:
    q, o = disk.values(6, H), disk.values(H, 16)
    tensors = {"model.layers.0.self_attn.q_proj.weight": q, "model.layers.0.self_attn.o_proj.weight": o}
    found = source(disk, tensors, requantise=["layers.*.attn.q_proj"])
    same(found.find(spec("layers.0.attn.q_proj", 6, H)), nvfp4.quantize(q))
    assert found.quant_of("layers.0.attn.q_proj") == "nvfp4"
    assert found.quant_of("layers.0.attn.o_proj") == "bf16"
    with pytest.raises(CheckpointError, match=r"expected nvfp4 \(32, 16\).*got bf16.*; ask for it to be requantised"):
        found.find(spec("layers.0.attn.o_proj", H, 16))
    assert found.find(spec("layers.0.attn.q_proj", 6, H, quant="bf16")).quant == "bf16"
    assert found.report().requantised == ("layers.0.attn.q_proj",)


def test_experts_are_requantised_one_by_one(disk: Any, same: Same) -> None:
    down = disk.values(3, H, 16) * np.array([1, 8, 64], ml_dtypes.bfloat16)[:, None, None]
    tensors = {"model.layers.0.mlp.experts.down_proj": down}
    got = source(disk, tensors, requantise=["*.experts.*"]).find(spec("layers.0.moe.experts.down_proj", 3, H, 16))
    for index in range(3):
        same(got[index], nvfp4.quantize(down[index]))


def test_patterns_that_no_weight_has_the_name_of_are_known(disk: Any) -> None:
    tensors = {"model.layers.0.self_attn.q_proj.weight": disk.values(6, H)}
    found = source(disk, tensors, requantise=["layers.*.attn.q_proj", "layers.*.atn.*"])
    assert found.unmatched == ("layers.*.attn.q_proj", "layers.*.atn.*")
    assert found.quant_of("layers.0.attn.q_proj") == "nvfp4"
    assert found.unmatched == ("layers.*.atn.*",)


def test_one_pattern_is_not_taken_for_its_letters(disk: Any) -> None:
    with pytest.raises(UsageError, match=r"requantise is 'layers\.\*', expected several patterns: \['layers\.\*'\]"):
        source(disk, {"model.layers.0.self_attn.q_proj.weight": disk.values(6, H)}, requantise="layers.*")


@pytest.mark.parametrize("requantise", [None, 5, [5], b"layers.*", iter(["layers.*"])])
def test_patterns_that_are_no_texts_are_refused(disk: Any, requantise: Any) -> None:
    with pytest.raises(UsageError, match=r"requantise is .*, expected several patterns, each of them text"):
        source(disk, {}, requantise=requantise)


@pytest.mark.parametrize("checkpoint", [None, "folder", {}])
def test_weights_of_what_is_no_checkpoint_are_refused(checkpoint: Any) -> None:
    message = f"checkpoint is {type(checkpoint).__name__}, expected what open_checkpoint returns"
    with pytest.raises(UsageError, match=message):
        CheckpointWeights(checkpoint)


def test_request_to_requantise_what_is_nvfp4_is_refused(disk: Any) -> None:
    tensors = disk.modelopt("model.layers.0.self_attn.q_proj", disk.weight(6, H))
    with pytest.raises(
        CheckpointError, match="expected bf16 weights to requantise, as asked, got nvfp4 weights already"
    ):
        source(disk, tensors, disk.mo_config(), requantise=["*"]).find(spec("layers.0.attn.q_proj", 6, H))


def test_weight_of_another_shape_is_refused(disk: Any) -> None:
    tensors = disk.modelopt("model.layers.0.self_attn.q_proj", disk.weight(6, H))
    message = r"self_attn\.q_proj: expected nvfp4 \(8, 32\) for layers\.0\.attn\.q_proj, got nvfp4 \(6, 32\)"
    with pytest.raises(CheckpointError, match=message):
        source(disk, tensors, disk.mo_config()).find(spec("layers.0.attn.q_proj", 8, H))


@pytest.mark.parametrize("name", ["layers.0.attn.r_proj", "layers.x.attn.q_proj", "other", "layers.0.ffn.qkvz_proj"])
def test_unknown_name_is_refused(disk: Any, name: str) -> None:
    found = source(disk, {})
    assert found.quant_of(name) is None
    with pytest.raises(CheckpointError, match="expected a weight that checkpoints have, got an unknown one"):
        found.find(spec(name, 2, H))


def test_tied_head_is_the_embedding(disk: Any) -> None:
    table = disk.values(V, H)
    ask = spec("lm_head.weight", V, H, quant="bf16")
    tied = source(disk, {"model.embed_tokens.weight": table}, disk.ct_config(), tie_word_embeddings=True)
    np.testing.assert_array_equal(tied.find(ask).values, table)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected a tensor, got none"):
        source(disk, {"model.embed_tokens.weight": table}).find(ask)


EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(("config", "is_tied"), [
    ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}, True),
    ({"text_config": {"tie_word_embeddings": True}}, True),
    ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": None}}, True),
    ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, False),
    ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
    ({"tie_word_embeddings": 1}, False),
])  # fmt: skip
def test_absent_head_is_the_embedding_only_where_no_level_of_the_config_contradicts(
    disk: Any, config: dict[str, Any], is_tied: bool
) -> None:
    table, ask = disk.values(V, H), spec("lm_head.weight", V, H, quant="bf16")
    found = source(disk, {EMBED: table}, **config)
    if is_tied:
        np.testing.assert_array_equal(found.find(ask).values, table)
        return
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight: expected a (tensor|head: the levels of config\.json di)"
    ):
        found.find(ask)


def test_refusal_of_an_absent_head_shows_both_levels(disk: Any) -> None:
    config = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}
    with pytest.raises(
        CheckpointError, match=r"disagree \(tie_word_embeddings true, text_config\.tie_word_embeddings fa"
    ):
        source(disk, {EMBED: disk.values(V, H)}, **config).find(spec("lm_head.weight", V, H, quant="bf16"))


def test_head_of_an_untied_checkpoint_is_read_whatever_the_nested_level_says(disk: Any) -> None:
    table, head = disk.values(V, H), disk.values(V, H, seed=1)
    config = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
    found = source(disk, {EMBED: table, "lm_head.weight": head}, **config)
    np.testing.assert_array_equal(found.find(spec("lm_head.weight", V, H, quant="bf16")).values, head)
    np.testing.assert_array_equal(found.find(spec("embedding.table", V, H, quant="array")), table)


@pytest.mark.parametrize("name", ["lm_head.weight", "embedding.table"])
def test_head_beside_a_tied_embedding_must_have_its_values(disk: Any, name: str) -> None:
    table, ask = disk.values(V, H), spec(name, V, H, quant="array" if "table" in name else "bf16")
    same = source(disk, {EMBED: table, "lm_head.weight": table}, tie_word_embeddings=True).find(ask)
    np.testing.assert_array_equal(getattr(same, "values", same), table)
    other = source(disk, {EMBED: table, "lm_head.weight": disk.values(V, H, seed=1)}, tie_word_embeddings=True)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight: expected the values of model\.embed_tokens\.weight, to w"
    ):
        other.find(ask)


def test_checkpoint_without_one_text_model_is_refused(disk: Any) -> None:
    table = disk.values(V, H)
    for names in (["other.weight"], ["model.embed_tokens.weight", "model.language_model.embed_tokens.weight"]):
        with pytest.raises(
            CheckpointError, match=f"expected one text model.*got {len(names) if len(names) > 1 else 0}"
        ):
            CheckpointWeights(open_checkpoint(disk.write(dict.fromkeys(names, table))))


def test_drafter_begins_at_its_layers_and_has_no_embedding(disk: Any) -> None:
    tensors = {"fc.weight": disk.values(H, 3 * H), "hidden_norm.weight": disk.values(H), "norm.weight": disk.values(H)}
    tensors |= {"layers.2.self_attn.k_norm.weight": disk.values(16), "layers.2.mlp.up_proj.weight": disk.values(8, H)}
    found = CheckpointWeights(open_checkpoint(disk.write(tensors)))
    assert found.find(spec("context.fc", H, 3 * H, quant="bf16")).shape == (H, 3 * H)
    assert found.find(spec("layers.2.ffn.up_proj", 8, H, quant="bf16")).shape == (8, H)
    for ours, theirs in (
        ("context.norm.weight", "hidden_norm.weight"),
        ("final_norm.weight", "norm.weight"),
        ("layers.2.attn.k_norm", "layers.2.self_attn.k_norm.weight"),
    ):
        got = found.find(spec(ours, *tensors[theirs].shape, quant="array"))
        np.testing.assert_array_equal(got, tensors[theirs])
    assert found.report().unused == ()


class Recorder(PlanOnly):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def find(self, spec: WeightSpec) -> None:
        self.names.add(spec.name)


@pytest.mark.parametrize("model", ["qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.6-35b-a3b-dflash"])
def test_every_weight_that_a_model_asks_for_has_a_name_in_checkpoints(disk: Any, model: str) -> None:
    recorder = Recorder()
    with km.boot(model, target="cpu") as boot:
        km.build_model(boot.manifest, boot.kernels, weights=recorder)
    names = Names(open_checkpoint(disk.write({"model.embed_tokens.weight": disk.values(V, H)})))
    assert len(recorder.names) > 90
    assert {name for name in recorder.names if names.recipe(name) is None} == set()


def test_report_counts_what_was_used_and_what_was_not(disk: Any) -> None:
    module = "model.layers.0.self_attn.q_proj"
    tensors = disk.modelopt(module, disk.weight(6, H))
    tensors |= {f"{module}.input_scale": np.ones((), np.float32), "mtp.layers.0.x.weight": disk.values(2, 2)}
    tensors |= {"model.visual.a.weight": disk.values(2, 2), "model.visual.b.weight": disk.values(2, 2)}
    found = source(disk, tensors, disk.mo_config())
    found.find(spec("layers.0.attn.q_proj", 6, H))
    with pytest.raises(CheckpointError):
        found.find(spec("layers.0.attn.k_proj", 6, H))
    assert found.report() == WeightReport(
        used=(f"{module}.weight", f"{module}.weight_scale", f"{module}.weight_scale_2"),
        activation_scales=(f"{module}.input_scale",),
        unused=("model.embed_tokens.weight", "model.visual.a.weight", "model.visual.b.weight", "mtp.layers.0.x.weight"),
        missing=("model.layers.0.self_attn.k_proj.weight",),
        requantised=(),
    )
    assert found.report().lines() == [
        "3 tensors used, 1 activation or cache scales not needed",
        "unused: 1 below model.embed_tokens",
        "unused: 2 below model.visual",
        "unused: 1 below mtp.layers",
        "missing: model.layers.0.self_attn.k_proj.weight",
    ]
