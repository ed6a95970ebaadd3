"""Checkpoints of small Qwen3.5 models, written by transformers, compressed-tensors and ModelOpt themselves."""

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.checkpoints import CheckpointError, CheckpointWeights, LogicalWeights, open_checkpoint
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
HIDDEN, EXPERTS = 32, 4
SIZES = {
    "vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
KEPT = ["lm_head", r"re:.*linear_attn\.in_proj_[ab]$", r"re:.*shared_expert_gate$"]

# The weights of our layers: name, shape, and whether it is a projection quantised by the libraries.
ATTENTION = [
    ("layers.1.attn.q_proj", (64, 32), True), ("layers.1.attn.k_proj", (16, 32), True),
    ("layers.1.attn.v_proj", (16, 32), True), ("layers.1.attn.o_proj", (32, 32), True),
]  # fmt: skip
GDN = [("layers.0.gdn.out_proj", (32, 32), True), ("layers.0.gdn.ba_proj", (8, 32), False)]
DENSE = [(f"layers.{i}.ffn.{n}_proj", (48, 32), True) for i in (0, 1) for n in ("gate", "up")] + [
    (f"layers.{i}.ffn.down_proj", (32, 48), True) for i in (0, 1)
]
EXPERT = [(f"layers.0.moe.experts.{n}_proj", (4, 16, 32), True) for n in ("gate", "up")] + [
    ("layers.0.moe.experts.down_proj", (4, 32, 16), True), ("layers.0.moe.router", (4, 32), False),
    ("layers.0.moe.shared_expert.gate_proj", (16, 32), True), ("layers.0.moe.shared_expert.down_proj", (32, 16), True),
]  # fmt: skip
HEAD = [("lm_head.weight", (64, 32), False)]
ARRAYS = [
    ("embedding.table", (64, 32)), ("layers.0.gdn.input_norm", (32,)), ("layers.0.gdn.post_norm", (32,)),
    ("layers.0.gdn.norm", (8,)), ("layers.1.attn.input_norm", (32,)), ("layers.1.attn.post_norm", (32,)),
    ("layers.1.attn.q_norm", (16,)), ("layers.1.attn.k_norm", (16,)), ("layers.0.gdn.conv1d", (64, 4)),
    ("layers.0.gdn.a_log", (4,)), ("layers.0.gdn.dt_bias", (4,)), ("final_norm.weight", (32,)),
]  # fmt: skip


def small_model(kind: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "moe":
        config = transformers.Qwen3_5MoeTextConfig(**SIZES, **MOE)
        model = transformers.Qwen3_5MoeForCausalLM(config)
    else:
        config = transformers.Qwen3_5TextConfig(intermediate_size=48, **SIZES)
        model = transformers.Qwen3_5ForCausalLM(config)
    model.config.architectures = [type(model).__name__]  # ModelOpt reads it, and only from_pretrained sets it
    return model.to(torch.bfloat16)


def compressed_tensors_folder(kind: str, folder: Path) -> Path:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = small_model(kind)
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    quantization.apply_quantization_config(
        model, quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=KEPT)
    )
    for module in model.modules():
        if hasattr(module, "weight_global_scale"):
            values = module.weight.data.float()
            encode = utils.generate_gparam(values.min(), values.max())
            groups = values.reshape(values.shape[0], -1, 16)
            least, most = groups.amin(-1), groups.amax(-1)
            scale, _ = utils.calculate_qparams(least, most, module.quantization_scheme.weights, global_scale=encode)
            module.weight_global_scale.data.copy_(encode)
            module.weight_scale.data.copy_(scale)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def modelopt_folder(kind: str, folder: Path, algorithm: str = "NVFP4_DEFAULT_CFG") -> Path:
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("modelopt.torch.quantization")
    export = pytest.importorskip("modelopt.torch.export")
    model = small_model(kind)
    tokens = torch.arange(16).reshape(1, 16)
    quantization.quantize(model, getattr(quantization, algorithm), lambda calibrated: calibrated(tokens))
    export.export_hf_checkpoint(model, export_dir=folder)
    return folder


MAKERS: dict[str, Callable[..., Path]] = {
    "compressed-tensors": compressed_tensors_folder,
    "modelopt": modelopt_folder,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def make(library: str, kind: str) -> Path:
        if (library, kind) not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[library, kind] = MAKERS[library](kind, tmp_path_factory.mktemp(f"{library}_{kind}"))
                gc.collect()
        return made[library, kind]

    return make


def stored(folder: Path) -> dict[str, Any]:
    """Read every tensor with the format's own library."""
    torch_files = pytest.importorskip("safetensors.torch")
    tensors: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= torch_files.load_file(file)
    return tensors


def parts_of(tensors: dict[str, Any], module: str) -> dict[str, Any]:
    return {name.removeprefix(f"{module}."): value for name, value in tensors.items() if name.startswith(f"{module}.")}


def quantised_modules(folder: Path) -> list[str]:
    return sorted(name.removesuffix(".weight_scale") for name in stored(folder) if name.endswith(".weight_scale"))


def bits(values: Any) -> Any:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


# compressed-tensors quantises modules, and transformers holds all experts in one parameter: dense only.
@pytest.mark.parametrize(
    ("library", "kind"), [("compressed-tensors", "dense"), ("modelopt", "dense"), ("modelopt", "moe")]
)
def test_every_tensor_of_a_real_checkpoint_is_found(
    folder_of: Callable[[str, str], Path], library: str, kind: str
) -> None:
    source = CheckpointWeights(open_checkpoint(folder_of(library, kind)))
    ffn = DENSE if kind == "dense" else EXPERT
    for name, shape, is_quantised in [*ATTENTION, *GDN, *ffn, *HEAD]:
        quant = "nvfp4" if is_quantised else "bf16"
        assert source.quant_of(name) == quant
        assert source.find(WeightSpec(name, shape, quant)).shape == shape
    for name, shape in ARRAYS:
        assert source.find(WeightSpec(name, shape, "array")).shape == shape
    report = source.report()
    assert report.missing == ()
    rest = [name for name in report.unused if "in_proj_qkv" not in name and "in_proj_z" not in name]
    if kind == "moe":
        others = ("layers.1.mlp", "shared_expert.up_proj", "shared_expert_gate")
        rest = [name for name in rest if not any(part in name for part in others)]
    assert [name for name in rest if not name.endswith(("layers.1.input_layernorm.weight", "visual"))] == []


def test_modelopt_dequantises_to_the_same_bits(folder_of: Callable[[str, str], Path]) -> None:
    folder = folder_of("modelopt", "dense")
    torch = pytest.importorskip("torch")
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    logical, tensors = LogicalWeights(open_checkpoint(folder)), stored(folder)
    modules = quantised_modules(folder)
    assert len(modules) == 13
    for module in modules:
        part, weight = parts_of(tensors, module), logical.load(module)
        assert isinstance(weight, Nvfp4Weight)
        shape = torch.Size(weight.shape)
        oracle = qtensor.NVFP4QTensor(shape, torch.float32, part["weight"])
        scales = {"scale": part["weight_scale"], "double_scale": part["weight_scale_2"], "block_sizes": {-1: 16}}
        theirs = oracle.dequantize(dtype=torch.float32, **scales).numpy()
        # The library rounds scale * global_scale to FP32, then the product: two roundings of our exact value.
        exact = nvfp4.dequantize(weight)
        step = nvfp4.decode_e4m3(weight.block_scale) * weight.global_scale_decode
        codes = nvfp4.decode_e2m1(nvfp4.unpack(weight.packed))
        # Its table has no negative zero; adding zero removes the sign from ours.
        np.testing.assert_array_equal(bits(theirs), bits(codes * np.repeat(step, 16, axis=1) + np.float32(0)))
        assert (np.abs(theirs - exact) <= 2.0**-23 * np.abs(exact)).all()


def compressed_tensors_values(part: dict[str, Any], dtype: Any) -> Any:
    """Dequantise a module as the library does, in its own order of roundings, BF16 or FP32."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    packed = part["weight_packed"]
    codes = helpers.unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype)
    scale, whole = part["weight_scale"].to(dtype), part["weight_global_scale"]
    return forward.dequantize(codes, scale, args=args, global_scale=whole, dtype=dtype)


def test_compressed_tensors_dequantises_to_the_same_values(folder_of: Callable[[str, str], Path]) -> None:
    folder = folder_of("compressed-tensors", "dense")
    torch = pytest.importorskip("torch")
    logical, tensors = LogicalWeights(open_checkpoint(folder)), stored(folder)
    modules = quantised_modules(folder)
    assert len(modules) == 13
    for module in modules:
        part, weight = parts_of(tensors, module), logical.load(module)
        assert isinstance(weight, Nvfp4Weight)
        exact = nvfp4.dequantize(weight)
        # Theirs rounds scale / global_scale and then the product; ours rounded 1 / global_scale: three in all.
        theirs = compressed_tensors_values(part, torch.float32).numpy()
        assert (np.abs(theirs - exact) <= 3.01 * 2.0**-24 * np.abs(exact)).all()
        # In BF16 that shows only for values this close to the middle of two.
        narrow = compressed_tensors_values(part, torch.bfloat16).float().numpy()
        low, high = (torch.from_numpy(exact * (1 + side * 2.0**-22)).bfloat16().float().numpy() for side in (-1, 1))
        assert ((narrow == low) | (narrow == high)).all()
        assert (narrow == torch.from_numpy(exact).bfloat16().float().numpy()).mean() > 0.999


def test_compressed_tensors_with_a_power_of_two_gives_the_same_bits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    files = pytest.importorskip("safetensors.torch")
    compressors = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    torch.manual_seed(1)
    values = torch.randn(24, 64, dtype=torch.bfloat16)
    encode = torch.tensor([512.0])
    scale = (values.float().reshape(24, 4, 16).abs().amax(-1) / 6 * encode).to(torch.float8_e4m3fn).float()
    state = {"weight": values, "weight_scale": scale, "weight_global_scale": encode}
    part = compressors.NVFP4PackedCompressor.compress(state, scheme)
    files.save_file({f"m.{name}": value for name, value in part.items()}, tmp_path / "model.safetensors")
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    weight = LogicalWeights(open_checkpoint(tmp_path)).load("m")
    assert isinstance(weight, Nvfp4Weight)
    ours = nvfp4.dequantize(weight).astype(np.float32)
    np.testing.assert_array_equal(bits(compressed_tensors_values(part, torch.float32).numpy()), bits(ours))
    narrow = compressors.NVFP4PackedCompressor.decompress(part, scheme)["weight"]
    np.testing.assert_array_equal(
        narrow.view(torch.uint16).numpy(), torch.from_numpy(ours).bfloat16().view(torch.uint16)
    )


def test_modelopt_fp8_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    source = CheckpointWeights(open_checkpoint(modelopt_folder("dense", tmp_path, "FP8_DEFAULT_CFG")))
    assert source.quant_of("layers.1.attn.q_proj") == "fp8"
    with pytest.raises(CheckpointError, match="expected nvfp4 or bf16 weights, got fp8"):
        source.find(WeightSpec("layers.1.attn.q_proj", (64, 32), "nvfp4"))


def test_plain_checkpoint_of_transformers_is_bf16(tmp_path: Path) -> None:
    small_model("moe").save_pretrained(tmp_path)
    source = CheckpointWeights(open_checkpoint(tmp_path))
    for name, shape, _ in [*ATTENTION, *GDN, *EXPERT, *HEAD, ("layers.0.gdn.qkvz_proj", (96, 32), True)]:
        assert source.find(WeightSpec(name, shape, "bf16")).shape == shape
