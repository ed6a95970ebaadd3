"""Small checkpoints on disk, written by safetensors, in the layouts of compressed-tensors and ModelOpt."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_muster.registry.contract import nvfp4
from safetensors.numpy import save_file

Tensors = dict[str, Any]
BF16 = ml_dtypes.bfloat16
NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True},
    "format": "nvfp4-pack-quantized",
}


class Disk:
    """Writes checkpoint folders and makes the tensors that go in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(
        self, tensors: Tensors, quantization: Mapping[str, Any] | None = None, shards: Mapping[str, str] | None = None,
        **config: Any,
    ) -> Path:  # fmt: skip
        """Write one file, or the shards that ``shards`` puts each tensor in, with their index."""
        self.folder.mkdir(exist_ok=True)
        if quantization is not None:
            config["quantization_config"] = quantization
        (self.folder / "config.json").write_text(json.dumps(config))
        if shards is None:
            save_file(tensors, self.folder / "model.safetensors")
            return self.folder
        for shard in set(shards.values()):
            save_file({name: tensors[name] for name in tensors if shards[name] == shard}, self.folder / shard)
        self.index(shards)
        return self.folder

    def index(self, weight_map: Any) -> None:
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    @staticmethod
    def values(*shape: int, seed: int = 0) -> Any:
        return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(BF16)

    @classmethod
    def weight(cls, rows: int, columns: int, seed: int = 0) -> nvfp4.Nvfp4Weight:
        return nvfp4.quantize(cls.values(rows, columns, seed=seed))

    @staticmethod
    def compressed_tensors(module: str, weight: nvfp4.Nvfp4Weight, encode: float | None = None) -> Tensors:
        scale = np.float32(1) / weight.global_scale_decode if encode is None else encode
        return {
            f"{module}.weight_packed": weight.packed,
            f"{module}.weight_scale": weight.block_scale.view(ml_dtypes.float8_e4m3fn),
            f"{module}.weight_global_scale": np.array([scale], np.float32),
        }

    @staticmethod
    def modelopt(module: str, weight: nvfp4.Nvfp4Weight, decode: float | None = None) -> Tensors:
        return {
            f"{module}.weight": weight.packed,
            f"{module}.weight_scale": weight.block_scale.view(ml_dtypes.float8_e4m3fn),
            f"{module}.weight_scale_2": np.array(weight.global_scale_decode if decode is None else decode, np.float32),
        }

    @staticmethod
    def ct_config(*ignore: str, targets: tuple[str, ...] = ("Linear",), **group: Any) -> dict[str, Any]:
        row = NVFP4_GROUP | {"targets": list(targets)} | group
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": row},
            "ignore": list(ignore),
        }

    @staticmethod
    def mo_config(*ignore: str, algorithm: str = "NVFP4") -> dict[str, Any]:
        return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(ignore)}


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "checkpoint")


@pytest.fixture
def same() -> Callable[[nvfp4.Nvfp4Weight, nvfp4.Nvfp4Weight], None]:
    def check(got: nvfp4.Nvfp4Weight, wanted: nvfp4.Nvfp4Weight) -> None:
        np.testing.assert_array_equal(got.packed, wanted.packed)
        np.testing.assert_array_equal(got.block_scale, wanted.block_scale)
        np.testing.assert_array_equal(got.global_scale_decode, wanted.global_scale_decode)

    return check
