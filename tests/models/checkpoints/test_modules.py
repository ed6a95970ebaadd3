import json
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.models.checkpoints import (
    CheckpointError,
    LogicalWeights,
    UnsupportedQuantError,
    fuse,
    fuse_problem,
    open_checkpoint,
)
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import UsageError

Same = Callable[[Nvfp4Weight, Nvfp4Weight], None]
M = "model.layers.0.mlp.up_proj"


def logical(disk: Any, tensors: Any, quantization: Any = None, **config: Any) -> LogicalWeights:
    return LogicalWeights(open_checkpoint(disk.write(tensors, quantization, **config)))


def refused(disk: Any, tensors: Any, quantization: Any, message: str, module: str = M) -> CheckpointError:
    with pytest.raises(CheckpointError, match=message) as caught:
        logical(disk, tensors, quantization).load(module)
    return caught.value


def test_compressed_tensors_weight_divides_by_its_global_scale(disk: Any, same: Same) -> None:
    weight = disk.weight(5, 32)
    got = logical(disk, disk.compressed_tensors(M, weight, encode=2560.0), disk.ct_config()).load(M)
    same(got, Nvfp4Weight(weight.packed, weight.block_scale, np.asarray(np.float32(1) / np.float32(2560))))


def test_modelopt_weight_multiplies_by_its_global_scale(disk: Any, same: Same) -> None:
    weight = disk.weight(5, 32)
    same(logical(disk, disk.modelopt(M, weight), disk.mo_config()).load(M), weight)


@pytest.mark.parametrize("style", ["compressed_tensors", "modelopt"])
def test_loaded_bytes_are_views_of_the_file(disk: Any, style: str) -> None:
    config = disk.ct_config() if style == "compressed_tensors" else disk.mo_config()
    source = logical(disk, getattr(disk, style)(M, disk.weight(5, 32)), config)
    first, again = source.load(M), source.load(M)
    assert np.shares_memory(first.packed, again.packed)
    assert np.shares_memory(first.block_scale, again.block_scale)


def transforms(*locations: str) -> dict[str, Any]:
    group = {"type": "hadamard", "apply": [{"location": one, "targets": ["Linear"]} for one in locations]}
    return {"transform_config": {"config_groups": {"R4": group}}}


def test_plain_weight_without_any_config_is_bf16(disk: Any) -> None:
    values = disk.values(3, 7)
    got = logical(disk, {f"{M}.weight": values}).load(M)
    assert isinstance(got, Bf16Weight)
    np.testing.assert_array_equal(got.values, values)


@pytest.mark.parametrize(
    "ignore", [M, r"re:.*mlp\..*", r"re:model\.layers", "model.language_model.layers.0.mlp.up_proj"]
)
def test_compressed_tensors_ignore_list_keeps_bf16(disk: Any, ignore: str) -> None:
    assert logical(disk, {f"{M}.weight": disk.values(3, 16)}, disk.ct_config(ignore)).quant(M) == "bf16"


@pytest.mark.parametrize("ignore", [M, "model.layers.0*", "model.layers.0.mlp", "*up_proj"])
def test_modelopt_ignore_list_keeps_bf16(disk: Any, ignore: str) -> None:
    assert logical(disk, {f"{M}.weight": disk.values(3, 16)}, disk.mo_config(ignore)).quant(M) == "bf16"


def test_ignored_names_match_whole_parts_only(disk: Any) -> None:
    tensors = {f"{M}.weight": disk.values(3, 16)}
    refused(disk, tensors, disk.mo_config("model.layers.0.ml"), "expected nvfp4, because")
    refused(disk, tensors, disk.ct_config("re:mlp"), "expected nvfp4, because")


def test_config_in_text_config_is_found(disk: Any) -> None:
    tensors = disk.compressed_tensors(M, disk.weight(2, 16))
    source = logical(disk, tensors, text_config={"quantization_config": disk.ct_config()})
    assert source.quant(M) == "nvfp4"


def test_configs_that_differ_are_refused(disk: Any) -> None:
    text = {"quantization_config": disk.mo_config()}
    with pytest.raises(CheckpointError, match="expected one quantization_config, got two that differ"):
        logical(disk, disk.modelopt(M, disk.weight(2, 16)), disk.ct_config(), text_config=text)


def test_older_modelopt_export_is_read_from_its_own_file(disk: Any) -> None:
    folder = disk.write(disk.modelopt(M, disk.weight(2, 16)) | {"lm_head.weight": disk.values(4, 16)})
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16,'
        ' "exclude_modules": ["lm_head"]}}'
    )
    source = LogicalWeights(open_checkpoint(folder))
    assert (source.quant(M), source.quant("lm_head")) == ("nvfp4", "bf16")


def test_two_files_of_quantisation_must_agree(disk: Any) -> None:
    folder = disk.write(disk.modelopt(M, disk.weight(4, 16)), disk.mo_config())
    beside = folder / "hf_quant_config.json"
    for algorithm in ("NVFP4", "FP8"):
        beside.write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        if algorithm == "NVFP4":
            assert LogicalWeights(open_checkpoint(folder)).quant(M) == "nvfp4"
            continue
        with pytest.raises(
            CheckpointError, match=r"one quantisation, got nvfp4 in config\.json, fp8 in hf_quant_config"
        ):
            LogicalWeights(open_checkpoint(folder))
    beside.write_text("[]")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: expected a JSON object, got a list"):
        open_checkpoint(folder)


def test_quantisation_under_its_older_name_is_read(disk: Any) -> None:
    source = logical(disk, disk.compressed_tensors(M, disk.weight(4, 16)), compression_config=disk.ct_config())
    assert source.quant(M) == "nvfp4"


def test_mixed_precision_follows_the_list_of_layers(disk: Any) -> None:
    layers = {M: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    config = disk.mo_config(algorithm="MIXED_PRECISION") | {"quantized_layers": layers}
    tensors = disk.modelopt(M, disk.weight(2, 16)) | {
        "model.layers.0.self_attn.q_proj.weight": disk.values(4, 16).astype(ml_dtypes.float8_e4m3fn),
        "model.layers.0.self_attn.q_proj.weight_scale": np.ones((), np.float32),
        "model.layers.0.self_attn.o_proj.weight": disk.values(4, 16),
    }
    source = logical(disk, tensors, config)
    quants = [source.quant(name) for name in (M, "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj")]
    assert quants == ["nvfp4", "fp8", "bf16"]


NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
FP8_GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "format": "float-quantized"}
MXFP4_GROUP = {"weights": {"num_bits": 4, "type": "float", "group_size": 32}, "format": "mxfp4-pack-quantized"}


def test_fp8_weight_is_refused_by_name(disk: Any) -> None:
    tensors = {
        f"{M}.weight": disk.values(4, 32).astype(ml_dtypes.float8_e4m3fn),
        f"{M}.weight_scale": np.ones((4, 1), np.float32),
    }
    configs = [disk.ct_config(**FP8_GROUP), disk.mo_config(algorithm="FP8"), {"quant_method": "fp8"}]
    for config in configs:
        source = logical(disk, tensors, config)
        assert source.quant(M) == "fp8"
        message = r"up_proj\.weight: expected nvfp4 or bf16 weights, got fp8 \(.*\); nothing is requantised silently"
        with pytest.raises(UnsupportedQuantError, match=message) as caught:
            source.load(M)
        assert caught.value.quant == "fp8"


def test_mxfp4_weight_is_refused_by_name(disk: Any) -> None:
    tensors = {f"{M}.weight_packed": np.zeros((4, 16), np.uint8), f"{M}.weight_scale": np.zeros((4, 1), np.uint8)}
    source = logical(disk, tensors, disk.ct_config(**MXFP4_GROUP))
    assert source.quant(M) == "mxfp4"
    with pytest.raises(UnsupportedQuantError, match="got mxfp4"):
        source.load(M)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_plain_weight_that_is_not_bf16_is_not_rounded(disk: Any, dtype: Any) -> None:
    with pytest.raises(UnsupportedQuantError, match=r"expected nvfp4 or bf16 weights, got f(32|16)"):
        logical(disk, {f"{M}.weight": np.ones((3, 16), dtype)}).load(M)


@pytest.mark.parametrize(
    ("group", "quant"),
    [
        ({"weights": {"num_bits": 4, "type": "int", "group_size": 128}}, "'int' of 4 bits"),
        ({"weights": {"num_bits": 4, "type": "float", "group_size": 64}}, "fp4 in groups of 64"),
        ({"weights": {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": False}}, "nvfp4 with zero points"),
        ({"format": "naive-quantized"}, "nvfp4 in format 'naive-quantized'"),
        ({"weights": NVFP4_WEIGHTS | {"strategy": "channel"}}, "nvfp4 with scales by 'channel'"),
        ({"weights": NVFP4_WEIGHTS | {"dynamic": True}}, "nvfp4 with scales by 'tensor_group', dynamic"),
    ],
)
def test_group_that_is_not_quite_nvfp4_is_refused(disk: Any, group: Any, quant: str) -> None:
    source = logical(disk, disk.compressed_tensors(M, disk.weight(2, 16)), disk.ct_config(**group))
    assert source.quant(M) == quant
    with pytest.raises(UnsupportedQuantError, match="expected nvfp4 or bf16 weights"):
        source.load(M)


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "W4A16_AWQ", "new"])
def test_modelopt_algorithm_that_is_not_nvfp4_is_refused(disk: Any, algorithm: str) -> None:
    tensors = disk.modelopt(M, disk.weight(2, 16))
    with pytest.raises(UnsupportedQuantError, match=f"got '{algorithm}'"):
        logical(disk, tensors, disk.mo_config(algorithm=algorithm)).load(M)


def test_config_and_tensors_that_disagree_are_refused(disk: Any) -> None:
    packed, plain = disk.compressed_tensors(M, disk.weight(2, 16)), {f"{M}.weight": disk.values(2, 16)}
    refused(
        disk, packed, disk.ct_config(M), r"weight_packed: expected bf16, because config\.json ignores it, got nvfp4"
    )
    refused(disk, packed, None, r"expected bf16, because config\.json has no quantization_config, got nvfp4")
    refused(disk, plain, disk.ct_config(), r"expected nvfp4, because config\.json: config_groups\.group_0, got bf16")
    refused(disk, plain, disk.ct_config(targets=(M,)), r"expected nvfp4, because .*, got bf16 \(BF16 \[2, 16\]\)")
    refused(disk, packed, disk.mo_config(), "expected the tensors of modelopt, got the tensors of compressed-tensors")
    refused(disk, disk.modelopt(M, disk.weight(2, 16)), disk.ct_config(), "expected the tensors of compressed-tensors")


def test_router_is_no_linear_and_stays_bf16(disk: Any) -> None:
    router = "model.layers.0.mlp.gate"
    assert logical(disk, {f"{router}.weight": disk.values(4, 16)}, disk.ct_config()).quant(router) == "bf16"
    tensors = {f"{router}.weight": disk.values(4, 16)}
    refused(disk, tensors, disk.ct_config(targets=(router,)), "expected nvfp4", router)


def test_two_groups_that_mean_one_module_are_refused(disk: Any) -> None:
    config = disk.ct_config()
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"] | FP8_GROUP
    refused(disk, disk.compressed_tensors(M, disk.weight(2, 16)), config, "expected one quantisation of a module")


def test_named_target_beats_a_class(disk: Any) -> None:
    config = disk.ct_config(**FP8_GROUP)
    config["config_groups"]["group_1"] = disk.ct_config(targets=("re:.*up_proj",))["config_groups"]["group_0"]
    assert logical(disk, disk.compressed_tensors(M, disk.weight(2, 16)), config).quant(M) == "nvfp4"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "expected quantization_config as an object, got a list"),
        ({"quant_method": "gptq"}, "expected quant_method compressed-tensors or modelopt, got 'gptq'"),
        ({}, "got None"),
        ({"quant_method": ["x"]}, "expected quant_method compressed-tensors or modelopt, got a list"),
        ({"quant_method": {}}, "expected quant_method compressed-tensors or modelopt, got a table"),
        ({"quant_method": "compressed-tensors", "transform_config": 1}, "expected transform_config as an object"),
        ({"quant_method": "compressed-tensors"}, "expected config_groups as an object, got null"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": 1}}, r"expected config_groups\.g as an object"),
        ({"quant_method": "modelopt"}, "expected quant_algo as text, got null"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [3]}, r"expected ignore\[0\] as text"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "expected quantized_layers as an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": ["re:("]},
            "expected valid regular expressions after re:",
        ),
    ],
)
def test_malformed_config_is_refused(disk: Any, config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        logical(disk, {f"{M}.weight": disk.values(2, 16)}, config)


@pytest.mark.parametrize(("more", "said"), [
    (transforms("weight_input", "input"),
     r"expected transforms that weights hold already \(weight_input or weight_output\), got one of 'input' in "
     r"transform_config\.config_groups\.R4$"),
    (transforms("k_cache"), "got one of 'k_cache' in"),
    ({"transform_config": {"config_groups": {"R4": {"apply": {}}}}}, r"expected .*R4\.apply as a list"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format dense, got 'sparse-24-bitmask'"),
])  # fmt: skip
def test_work_that_is_left_for_each_pass_is_refused(disk: Any, more: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        logical(disk, disk.compressed_tensors(M, disk.weight(2, 16)), disk.ct_config() | more)


@pytest.mark.parametrize("more", [
    {"transform_config": {}, "sparsity_config": {}}, {"transform_config": None, "sparsity_config": {"format": "dense"}},
    transforms("weight_input", "weight_output"),
])  # fmt: skip
def test_transforms_that_weights_hold_already_are_no_matter(disk: Any, more: Any) -> None:
    source = logical(disk, disk.compressed_tensors(M, disk.weight(2, 16)), disk.ct_config() | more)
    assert source.load(M).shape == (2, 16)


def replace(tensors: Any, leaf: str, value: Any) -> Any:
    return tensors | {f"{M}.{leaf}": value}


def scales(*bits: int) -> Any:
    return np.array(bits, np.uint8).reshape(2, 1).view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        (
            "weight_scale",
            scales(0x38, 0x7F),
            r"weight_scale: expected scales of zero or more, got NaN at \[1, 0\], 1 in",
        ),
        ("weight_scale", scales(0xFF, 0x38), r"got NaN at \[0, 0\]"),
        ("weight_scale", scales(0x81, 0x38), r"got a negative scale at \[0, 0\]"),
        ("weight_scale", np.ones((2, 2), ml_dtypes.float8_e4m3fn), r"F8_E4M3 \[2, 1\], got F8_E4M3 \[2, 2\]"),
        ("weight_scale", np.ones((2, 1), np.float32), r"weight_scale: expected F8_E4M3 \[2, 1\], got F32 \[2, 1\]"),
        ("weight_packed", np.ones((2, 12), np.uint8), r"U8 \[N, K/2\], K a multiple of 16, got U8 \[2, 12\]"),
        ("weight_packed", np.ones((1, 2, 8), np.uint8), r"expected U8 \[N, K/2\]"),
        ("weight_global_scale", np.ones(2, np.float32), r"expected F32 \[\] or \[1\], got F32 \[2\]"),
        ("weight_global_scale", np.ones(1, np.float16), r"weight_global_scale: expected F32, got F16 \[1\]"),
        (
            "weight_zero_point",
            np.zeros((2, 1), np.uint8),
            r"weight_zero_point: expected only .*, got a tensor not read",
        ),
        ("bias", np.zeros(2, np.float32), "bias: expected only"),
        ("weight", np.zeros((2, 16), np.float32), "expected one weight of a module, got weight_packed beside it"),
    ],
)
def test_compressed_tensors_weight_that_is_not_right_is_refused(disk: Any, leaf: str, value: Any, message: str) -> None:
    tensors = replace(disk.compressed_tensors(M, disk.weight(2, 16)), leaf, value)
    error = refused(disk, tensors, disk.ct_config(), message)
    assert error.file.name == "model.safetensors"


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e-45, 3e38])
def test_compressed_tensors_global_scale_without_a_normal_inverse_is_refused(disk: Any, scale: float) -> None:
    tensors = disk.compressed_tensors(M, disk.weight(2, 16), encode=scale)
    refused(disk, tensors, disk.ct_config(), "expected a positive scale whose inverse is a normal FP32")


@pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf])
def test_modelopt_global_scale_that_is_no_scale_is_refused(disk: Any, scale: float) -> None:
    tensors = disk.modelopt(M, disk.weight(2, 16), decode=scale)
    refused(disk, tensors, disk.mo_config(), "weight_scale_2: expected a finite scale, zero or more")


def test_modelopt_smoothing_is_not_dropped_silently(disk: Any) -> None:
    tensors = replace(disk.modelopt(M, disk.weight(2, 16)), "pre_quant_scale", np.ones(16, np.float32))
    refused(disk, tensors, disk.mo_config(), "pre_quant_scale: expected only")


def test_negative_zero_and_subnormal_scales_are_exact(disk: Any) -> None:
    weight = Nvfp4Weight(
        np.arange(16, dtype=np.uint8).reshape(2, 8) * 17, np.array([[0x80], [0x01]], np.uint8), np.float32(1) * 3
    )
    got = nvfp4.dequantize(logical(disk, disk.modelopt(M, weight), disk.mo_config()).load(M))
    codes = nvfp4.decode_e2m1(nvfp4.unpack(weight.packed)).astype(np.float64)
    np.testing.assert_array_equal(got[1], codes[1] * 2.0**-9 * 3)
    assert not got[0].any()


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_global_scale"])
def test_missing_scale_is_named(disk: Any, leaf: str) -> None:
    tensors = disk.compressed_tensors(M, disk.weight(2, 16))
    del tensors[f"{M}.{leaf}"]
    refused(disk, tensors, disk.ct_config(), rf"{leaf}: expected a tensor, got none of that name")


def test_fuse_with_equal_global_scales_concatenates_rows(disk: Any) -> None:
    whole = disk.weight(6, 32)
    parts = {
        name: Nvfp4Weight(whole.packed[rows], whole.block_scale[rows], whole.global_scale_decode)
        for name, rows in (("q", slice(0, 3)), ("k", slice(3, 5)), ("v", slice(5, 6)))
    }
    fused = fuse(parts)
    assert isinstance(fused, Nvfp4Weight)
    np.testing.assert_array_equal(nvfp4.dequantize(fused), nvfp4.dequantize(whole))


def test_fuse_of_what_does_not_belong_together_is_refused(disk: Any) -> None:
    one, other, deep = disk.weight(2, 32), disk.weight(2, 32, seed=1), disk.weight(2, 48)
    plain = Bf16Weight(disk.values(2, 32))
    assert (fuse_problem({"gate": one, "up": other}) or "").startswith("global scales differ: gate ")
    assert fuse_problem({"gate": one, "up": plain}) == "quantisations differ: gate nvfp4, up bf16"
    assert fuse_problem({"gate": one, "up": deep}) == "shapes differ in K: gate [2, 32], up [2, 48]"
    with pytest.raises(UsageError, match=r"gate \| up cannot be one weight: global scales differ.*; keep them apart"):
        fuse({"gate": one, "up": other})


def test_fuse_of_bf16_concatenates_rows(disk: Any) -> None:
    one, other = disk.values(2, 5), disk.values(3, 5)
    fused = fuse({"b": Bf16Weight(one), "a": Bf16Weight(other)})
    assert isinstance(fused, Bf16Weight)
    np.testing.assert_array_equal(fused.values, np.concatenate([one, other]))
