"""transformers' model of a checkpoint's dequantised weights, whole, one layer in memory at a time.

The model is transformers' own class. Hooks load each decoder layer's weights before it runs and remove them after, in
FP32 (the reference) or BF16 (transformers' usual type). NVFP4 tensors stay on the device as stored.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint import dequantise, empty_model
from safetensors import safe_open


class Streamed:
    """A model that appears complete to its caller. ``logits`` runs sequences of one length."""

    def __init__(self, folder: Path, config: Any, device: str) -> None:
        self._folder, self._config, self._device = folder, config, device
        config._attn_implementation = "sdpa"  # noqa: SLF001  (the class has no public way after construction)
        self._files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self._stored: dict[str, dict[str, torch.Tensor]] = {}

    def logits(self, ids: Sequence[Sequence[int]], last: int, dtype: torch.dtype) -> torch.Tensor:
        """Return FP32 logits ``(sequences, last, V)`` of the last positions of each sequence."""
        model = empty_model(self._config)
        model.model.rotary_emb = type(model.model.rotary_emb)(self._config).to(self._device)
        outside = self._weights("outside", "", dtype)
        model.load_state_dict(outside, strict=False, assign=True)
        hooks = [self._stream(index, layer, dtype) for index, layer in enumerate(model.model.layers)]
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        try:
            with torch.no_grad():
                given = torch.tensor(ids, device=self._device)
                return model(input_ids=given, use_cache=False, logits_to_keep=last).logits.float()
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed
            for pair in hooks:
                for hook in pair:
                    hook.remove()

    def _stream(self, index: int, layer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        def before(module: Any, *given: Any) -> None:
            values = self._weights(f"layer-{index}", f"model.layers.{index}.", dtype)
            missing, unexpected = module.load_state_dict(values, strict=False, assign=True)
            if missing or unexpected:
                raise ValueError(f"layer {index}: missing {missing}, unexpected {unexpected}")

        def after(module: Any, *given: Any) -> None:
            module.to("meta")

        return layer.register_forward_pre_hook(before), layer.register_forward_hook(after)

    def _weights(self, shard: str, prefix: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the parameters of one shard under transformers' names, dequantised."""
        stored, found = self._tensors(shard), {}
        for name, value in stored.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "weight_packed" or (f"{module}.weight_scale_2" in stored and leaf == "weight"):
                scale = stored[f"{module}.weight_scale"]
                decode = stored.get(f"{module}.weight_scale_2")
                decode = 1 / stored[f"{module}.weight_global_scale"] if decode is None else decode
                one_each = decode.reshape(value.shape[:-2])
                is_expert = value.dim() == 3
                found[module if is_expert else f"{module}.weight"] = dequantise(value, scale, one_each, dtype)
            elif not leaf.startswith("weight_"):
                found[name] = value.to(dtype)
        return {name.removeprefix(prefix): value for name, value in found.items()}

    def _tensors(self, shard: str) -> dict[str, torch.Tensor]:
        """Read a shard once. Experts become one tensor for each projection, as in transformers."""
        if shard not in self._stored:
            with safe_open(self._folder / f"model-{shard}.safetensors", "pt", device=self._device) as file:
                self._stored[shard] = _stacked({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return self._stored[shard]


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in tensors.items() if ".experts." not in name}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in tensors.keys() - found.keys():
        base, _, rest = name.partition(".experts.")
        index, part, leaf = rest.split(".")
        experts.setdefault(f"{base}.experts|{leaf}", {}).setdefault(int(index), {})[part] = tensors[name]
    for key, rows in experts.items():
        base, _, leaf = key.partition("|")
        ordered = [rows[index] for index in sorted(rows)]
        is_scalar = ordered[0]["up_proj"].numel() == 1
        for target, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            if is_scalar:
                found[f"{base}.{target}.{leaf}"] = torch.stack([one[parts[0]].reshape(()) for one in ordered])
            else:
                found[f"{base}.{target}.{leaf}"] = torch.stack([torch.cat([one[p] for p in parts]) for one in ordered])
    return found
