"""A small checkpoint for trials, in the format of compressed-tensors or ModelOpt, with random weights.

    python small_checkpoint.py FOLDER [compressed-tensors|modelopt]

It has a few narrow layers of qwen3.6-27b, under the names of that family's checkpoints.
"""

import json
import sys
from pathlib import Path
from typing import Any

import kernel_muster as km
import ml_dtypes
import numpy as np
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.checkpoints import open_checkpoint
from kernel_muster.models.checkpoints.names import Names
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.reduced import reduced
from kernel_muster.models.weights.random_weights import RandomWeights
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight
from safetensors.numpy import save_file

FORMATS = ("compressed-tensors", "modelopt")
_EMBEDDING = "model.embed_tokens.weight"
_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True},
    "format": "nvfp4-pack-quantized",
}


class Kept(RandomWeights):
    """Random weights that record their requests."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.found: dict[str, Any] = {}

    def on(self, memory: Any) -> "Kept":
        """Stay on the host: they are written to a file."""
        return self

    def find(self, spec: WeightSpec) -> Any:
        """Make a weight, and keep it."""
        value = self.found[spec.name] = super().find(spec)
        return value


def small_dims(boot: km.BootSession) -> ModelDims:
    """Return the dimensions of the booted model at a size that any machine decodes in a moment."""
    return reduced(model_dims(boot.manifest))


def write_checkpoint(folder: Path, seed: int = 1, format: str = FORMATS[0]) -> Path:
    """Write config.json and model.safetensors. Return the folder."""
    weights = Kept(seed)
    with km.boot("qwen3.6-27b", target="cpu", levers={}) as boot:
        dims = small_dims(boot)
        build_from_dims(dims, boot.kernels, weights)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(dims, format)), encoding="utf-8")
    save_file({_EMBEDDING: np.asarray(weights.found["embedding.table"])}, folder / "model.safetensors")
    names = Names(open_checkpoint(folder))  # they depend on the place of the embedding
    tensors: dict[str, Any] = {}
    for name, value in weights.found.items():
        recipe = names.recipe(name)
        if recipe is None:
            raise SystemExit(f"no checkpoint has a weight {name}")
        tensors |= _tensors(recipe.kind, recipe.path, value, format)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def _config(dims: ModelDims, format: str) -> dict[str, Any]:
    gdn = dims.gdn
    if gdn is None:
        raise SystemExit("a model of this family has a gated delta net")
    if format == "compressed-tensors":
        groups = {"config_groups": {"group_0": _GROUP}, "ignore": ["re:.*in_proj_[ab]$"]}
        quantization = {"quant_method": format, **groups}
    else:
        quantization = {"quant_method": format, "quant_algo": "NVFP4", "ignore": ["*in_proj_a", "*in_proj_b"]}
    return {
        "model_type": "qwen3_5", "hidden_size": dims.hidden, "linear_num_key_heads": gdn.key_heads,
        "linear_key_head_dim": gdn.key_dim, "linear_num_value_heads": gdn.value_heads,
        "linear_value_head_dim": gdn.value_dim, "quantization_config": quantization,
    }  # fmt: skip


def _tensors(kind: str, path: str, value: Any, format: str) -> dict[str, Any]:
    """Return the tensors of one weight of ours."""
    if kind == "array":
        is_conv = path.endswith("conv1d.weight")
        return {path: value[:, None] if is_conv else value}
    if kind == "qkvz":
        return _module(f"{path}in_proj_qkvz", value, format)
    if kind == "ba":
        half = value.shape[0] // 2
        return {f"{path}in_proj_b.weight": value.values[:half], f"{path}in_proj_a.weight": value.values[half:]}
    return _module(path, value, format)


def _module(path: str, value: Any, format: str) -> dict[str, Any]:
    if not isinstance(value, Nvfp4Weight):
        return {f"{path}.weight": value.values}
    scale, decode = value.block_scale.view(ml_dtypes.float8_e4m3fn), np.float32(value.global_scale_decode)
    if format == "modelopt":
        return {f"{path}.weight": value.packed, f"{path}.weight_scale": scale, f"{path}.weight_scale_2": decode[None]}
    encode = np.array([np.float32(1) / decode], np.float32)
    return {f"{path}.weight_packed": value.packed, f"{path}.weight_scale": scale, f"{path}.weight_global_scale": encode}


if __name__ == "__main__":
    if (
        len(sys.argv) not in (2, 3)
        or sys.argv[1].startswith("-")
        or sys.argv[2:] not in ([], ["compressed-tensors"], ["modelopt"])
    ):
        raise SystemExit(__doc__)
    print(write_checkpoint(Path(sys.argv[1]), format=sys.argv[2] if sys.argv[2:] else FORMATS[0]))
