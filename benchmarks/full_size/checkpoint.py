"""A checkpoint of a model's full size: transformers' own parameter names, seeded weights of realistic spread, NVFP4.

The weights are made one layer at a time on the device and written as one safetensors shard a layer. Their spread gives
logits with a standard deviation of about 3 and experts with uneven load: rows differ in size by a log-normal factor,
some input features are large, and the projections that write to the residual stream are scaled by its depth.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from kernel_muster.models.dims import ModelDims
from safetensors.torch import save_file

FORMATS = ("compressed-tensors", "modelopt")
#: Linear modules that stay BF16, as in published checkpoints of this line.
KEPT = [r"re:.*linear_attn\.in_proj_[ab]$", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]
_KEPT = re.compile(r"(linear_attn\.in_proj_[ab]|mlp\.gate|shared_expert_gate|embed_tokens|conv1d|norm\w*)\.weight$")
#: Modules that kernels read as one weight: they share the global scale, as in exports of llm-compressor.
_SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))
_WRITES_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
_E2M1_MIDDLE = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MTP_TOP = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")


def config_of(dims: ModelDims) -> Any:
    """Return transformers' config of a model of the Qwen3.5 line."""
    import transformers

    attention, gdn, moe = dims.attention, dims.gdn, dims.moe
    if attention is None or attention.rope is None or gdn is None:
        raise ValueError(f"{dims.name} has no gated delta net beside full attention")
    kinds, rope = {"attn": "full_attention", "gdn": "linear_attention"}, attention.rope
    shared = {
        "vocab_size": dims.vocab, "hidden_size": dims.hidden, "num_hidden_layers": len(dims.layer_kinds),
        "num_attention_heads": attention.q_heads, "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim, "linear_conv_kernel_dim": gdn.conv_width,
        "linear_key_head_dim": gdn.key_dim, "linear_value_head_dim": gdn.value_dim,
        "linear_num_key_heads": gdn.key_heads, "linear_num_value_heads": gdn.value_heads,
        "layer_types": [kinds[kind] for kind in dims.layer_kinds], "rms_norm_eps": dims.rms_eps,
        "tie_word_embeddings": dims.is_tied, "max_position_embeddings": dims.context or 32768,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": rope.theta, "mrope_section": list(rope.sections),
            "partial_rotary_factor": rope.rotary_dim / attention.head_dim, "mrope_interleaved": rope.is_interleaved,
        },
    }  # fmt: skip
    if moe is None:
        return transformers.Qwen3_5TextConfig(**shared, intermediate_size=dims.intermediate)
    return transformers.Qwen3_5MoeTextConfig(
        **shared, num_experts=moe.experts, num_experts_per_tok=moe.top_k, moe_intermediate_size=moe.intermediate,
        shared_expert_intermediate_size=moe.shared_intermediate,
    )  # fmt: skip


def empty_model(config: Any) -> Any:
    """Return transformers' model without memory: every parameter on the meta device."""
    import transformers

    kind = transformers.Qwen3_5MoeForCausalLM if hasattr(config, "num_experts") else transformers.Qwen3_5ForCausalLM
    with torch.device("meta"):
        return kind(config).eval()


class Writer:
    """Writes the shards of one checkpoint."""

    def __init__(self, dims: ModelDims, folder: Path, format: str, seed: int, device: str) -> None:
        self._dims, self._folder, self._format, self._seed, self._device = dims, folder, format, seed, device
        self._index: dict[str, str] = {}

    def write(self) -> Path:
        """Write config.json, one shard for each layer and the index. Return the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        config = config_of(self._dims)
        shapes = {name: tuple(value.shape) for name, value in empty_model(config).state_dict().items()}
        for shard, names in self._shards(shapes):
            values = {name: self._values(name, shape) for name, shape in names.items()}
            self._save(shard, dict(self._stored(values)))
        total = {"metadata": {}, "weight_map": self._index}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(total), encoding="utf-8")
        table = config.to_dict() | {"quantization_config": quantization(self._format)}
        table["mtp_num_hidden_layers"] = self._dims.mtp_layers
        (self._folder / "config.json").write_text(json.dumps(table, default=str), encoding="utf-8")
        return self._folder

    def _shards(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
        """Divide the parameters: those outside the layers, each layer, and the MTP head."""
        layer = re.compile(r"model\.layers\.(\d+)\.")
        groups: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            match = layer.match(name)
            groups.setdefault(f"layer-{match[1]}" if match else "outside", {})[name] = shape
        yield from groups.items()
        if self._dims.mtp_layers:
            like = f"model.layers.{self._dims.layer_kinds.index('attn')}."
            head = {f"mtp.layers.0.{n.removeprefix(like)}": s for n, s in shapes.items() if n.startswith(like)}
            hidden = self._dims.hidden
            yield "mtp", {**head, **{f"mtp.{n}": (hidden,) for n in _MTP_TOP}, "mtp.fc.weight": (hidden, 2 * hidden)}

    def _values(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return seeded BF16 values of one parameter."""
        seed = int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:8], "little") >> 1
        random = torch.Generator(self._device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random, device=self._device)

        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf == "A_log":
            return (torch.rand(shape, generator=random, device=self._device) * 15 + 1).log().bfloat16()
        if leaf == "dt_bias":
            step = torch.exp(torch.rand(shape, generator=random, device=self._device) * math.log(100) - math.log(1000))
            return (step + torch.log(-torch.expm1(-step))).bfloat16()
        if len(shape) == 1:
            middle = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
            return (normal(*shape) * 0.1 + middle).bfloat16()
        if leaf == "conv1d":
            return (normal(*shape) * 0.4).bfloat16()
        if leaf == "embed_tokens":
            return (normal(*shape) * 0.5).bfloat16()
        gain = {"lm_head": 3.0, "gate": 1.5}.get(leaf, 1.0)
        if name.endswith(_WRITES_RESIDUAL):
            gain /= math.sqrt(2 * len(self._dims.layer_kinds)) * 0.5
        values = normal(*shape)
        values *= torch.exp(0.3 * normal(*shape[:-1], 1)) * (gain / math.sqrt(shape[-1]))
        values *= torch.where(torch.rand(shape[-1], generator=random, device=self._device) < 0.004, 3.0, 1.0)
        return values.bfloat16()

    def _stored(self, values: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one shard as the format stores them."""
        whole = {name: self._amax(name, values) for name in values if is_quantised(name, values[name])}
        for name, value in values.items():
            if name not in whole:
                yield name, value
            elif value.dim() == 3:
                yield from self._experts(name, value)
            else:
                module = name.removesuffix(".weight")
                yield from self._module(module, *quantise(value, 6 * 448 / whole[name]), 6 * 448 / whole[name])

    @staticmethod
    def _amax(name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the largest magnitude of a module and of the modules with the same global scale."""
        path, _, leaf = name.removesuffix(".weight").rpartition(".")
        group = next((one for one in _SHARED if leaf in one), (leaf,))
        found = [values[n] for one in group if (n := f"{path}.{one}.weight") in values]
        return torch.stack([one.abs().amax().float() for one in found or [values[name]]]).amax()

    def _experts(self, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the experts of one fused parameter one by one, each with a global scale of its own."""
        base, _, leaf = name.rpartition(".")
        encode = 6 * 448 / value.abs().amax((1, 2)).float()
        packed, scale = quantise(value, encode)
        cuts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for index in range(value.shape[0]):
            rows = zip(cuts, packed[index].chunk(len(cuts)), scale[index].chunk(len(cuts)), strict=True)
            for part, codes, steps in rows:  # copies: a file holds no two views of one array
                yield from self._module(f"{base}.{index}.{part}", codes.clone(), steps.clone(), encode[index].clone())

    def _module(
        self, module: str, packed: torch.Tensor, scale: torch.Tensor, encode: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self._format == "modelopt":
            yield f"{module}.weight", packed
            yield f"{module}.weight_scale", scale
            yield f"{module}.weight_scale_2", 1 / encode
        else:
            yield f"{module}.weight_packed", packed
            yield f"{module}.weight_scale", scale
            yield f"{module}.weight_global_scale", encode.reshape(1)

    def _save(self, shard: str, tensors: Mapping[str, torch.Tensor]) -> None:
        file = f"model-{shard}.safetensors"
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, self._folder / file)
        self._index |= dict.fromkeys(tensors, file)


def is_quantised(name: str, value: torch.Tensor) -> bool:
    """Whether a parameter is a projection that becomes NVFP4."""
    return value.dim() in (2, 3) and _KEPT.search(name) is None


def quantise(values: torch.Tensor, encode: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed E2M1 ``(..., N, K/2)`` and E4M3 scales ``(..., N, K/16)``. ``encode (...)`` multiplies values."""
    encode = encode.reshape(*encode.shape, 1, 1)
    groups = values.float().unflatten(-1, (-1, 16)) * encode[..., None]
    scale = (groups.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    step = scale.float()[..., None]
    groups = torch.where(step > 0, groups / step, 0).flatten(-2)
    size, code = groups.abs(), torch.zeros_like(groups, dtype=torch.uint8)
    for index, middle in enumerate(_E2M1_MIDDLE):  # a tie goes to the even code
        code += size > middle if index % 2 == 0 else size >= middle
    code += (groups < 0).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4, scale


def dequantise(packed: torch.Tensor, scale: torch.Tensor, decode: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values ``(..., N, K)``: E2M1 times E4M3 exactly, times ``decode (...)`` with one FP32 rounding."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    values = table[codes].unflatten(-1, (-1, 16)) * scale.float()[..., None]
    return (values.flatten(-2) * decode.reshape(*decode.shape, 1, 1)).to(dtype)


def quantization(format: str) -> dict[str, Any]:
    """Return the ``quantization_config`` of a format."""
    if format == "modelopt":
        ignore = ["*in_proj_a", "*in_proj_b", "*mlp.gate", "*shared_expert_gate"]
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}
    weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "format": "nvfp4-pack-quantized"}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": KEPT}
