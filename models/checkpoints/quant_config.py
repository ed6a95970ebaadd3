"""What a checkpoint says about its quantisation: ``quantization_config`` in the styles of two libraries.

compressed-tensors: ``config_groups`` with targets, weight arguments and a format, and an ``ignore`` list. ModelOpt:
``quant_algo`` with an ``ignore`` list, or ``quantized_layers`` for MIXED_PRECISION; older exports hold the same in
``hf_quant_config.json``, as ``quantization`` with ``exclude_modules``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from kernel_muster.MODEL_toml.wording import shown, type_name
from kernel_muster.models.checkpoints.checkpoint import CONFIG, Checkpoint
from kernel_muster.models.checkpoints.documents import read_object
from kernel_muster.models.checkpoints.errors import CheckpointError, plain
from kernel_muster.models.checkpoints.patterns import Patterns, compressed_tensors_patterns, modelopt_patterns
from kernel_muster.registry.contract.nvfp4 import GROUP
from kernel_muster.registry.values import frozen

Style = Literal["compressed-tensors", "modelopt"]
HF_QUANT, KEY, PLAIN = "hf_quant_config.json", "quantization_config", "bf16"
_PACKED = "nvfp4-pack-quantized"
_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")
# Where compressed-tensors applies a transform once, before it writes the weights.
_IN_WEIGHTS = ("weight_input", "weight_output")
_STRATEGIES = (None, "tensor_group", "group")
_WHOLE_MODEL = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}


@frozen
class Expected:
    """How the config says that a module is stored. Not certain: only its class is a target, and that is not known."""

    quant: str
    origin: str
    is_certain: bool = True


@frozen
class QuantGroup:
    """Modules that are quantised alike."""

    origin: str
    quant: str
    targets: Patterns


@frozen
class QuantConfig:
    """The whole statement; without groups everything is plain."""

    file: Path
    style: Style | None = None
    groups: tuple[QuantGroup, ...] = ()
    ignore: Patterns = field(default_factory=Patterns)

    def expected(self, module: str) -> Expected:
        """Return how a module is stored; CheckpointError if two groups contradict each other."""
        if not self.groups:
            return Expected(PLAIN, f"{self.file.name} has no {KEY}")
        if self.ignore.matches(module):
            return Expected(PLAIN, f"{self.file.name} ignores it")
        named = [group for group in self.groups if group.targets.matches(module)]
        chosen = named or [group for group in self.groups if group.targets.classes]
        if not chosen:
            return Expected(PLAIN, f"no target in {self.file.name} names it")
        if len({group.quant for group in chosen}) > 1:
            got = ", ".join(f"{group.origin}: {group.quant}" for group in chosen)
            raise CheckpointError(self.file, module, "one quantisation of a module", got)
        return Expected(chosen[0].quant, f"{self.file.name}: {chosen[0].origin}", is_certain=bool(named))


def quant_config(checkpoint: Checkpoint) -> QuantConfig:
    """Read a checkpoint's statement; CheckpointError says what is malformed or not supported."""
    file = checkpoint.folder / CONFIG
    found = [table[KEY] for table in (checkpoint.config, _text(checkpoint)) if table.get(KEY) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(file, None, f"one {KEY}", "two that differ, one of them in text_config")
    reader = _Reader(file)
    if found:
        return reader.read(reader.typed(found[0], dict, KEY))
    older = checkpoint.folder / HF_QUANT
    if not older.exists():
        return QuantConfig(file)
    reader = _Reader(older)
    table = read_object(older)
    return reader.modelopt(reader.typed(table.get("quantization"), dict, "quantization"))


def _text(checkpoint: Checkpoint) -> Mapping[str, Any]:
    text = checkpoint.config.get("text_config")
    return text if isinstance(text, dict) else {}


class _Reader:
    """Reads one file's tables, each value checked where it is used."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self, table: Mapping[str, Any]) -> QuantConfig:
        method = table.get("quant_method")
        if method == "compressed-tensors":
            return self.compressed_tensors(table)
        if isinstance(method, str) and method.startswith("modelopt"):
            nested = table.get("quantization")
            return self.modelopt(table if nested is None else self.typed(nested, dict, "quantization"))
        if isinstance(method, str) and method in _WHOLE_MODEL:
            groups = (QuantGroup(f"quant_method {method}", _WHOLE_MODEL[method], Patterns(classes=["Linear"])),)
            skipped = self.names(table, "modules_to_not_convert") + self.names(table, "ignored_layers")
            return QuantConfig(self.file, None, groups, modelopt_patterns(skipped))
        raise CheckpointError(self.file, None, "quant_method compressed-tensors or modelopt", shown(method))

    def compressed_tensors(self, table: Mapping[str, Any]) -> QuantConfig:
        self.refuse_transforms(table)
        groups = []
        for name, group in self.typed(table.get("config_groups"), dict, "config_groups").items():
            where = f"config_groups.{name}"
            row = self.typed(group, dict, where)
            if row.get("weights") is None:
                continue  # activations or the KV cache only
            weights = self.typed(row["weights"], dict, f"{where}.weights")
            quant = _compressed_quant(weights, row.get("format") or table.get("format"))
            groups.append(QuantGroup(where, quant, self.patterns(self.names(row, "targets"))))
        ignore = self.patterns(self.names(table, "ignore"))
        return QuantConfig(self.file, "compressed-tensors", tuple(groups), ignore)

    def refuse_transforms(self, table: Mapping[str, Any]) -> None:
        """Refuse what is left to do while the model runs: no layer transforms activations or unpacks sparse weights."""
        transforms = self.typed(table.get("transform_config") or {}, dict, "transform_config")
        groups = self.typed(transforms.get("config_groups") or {}, dict, "transform_config.config_groups")
        for name, group in groups.items():
            where = f"transform_config.config_groups.{name}"
            rows = self.typed(self.typed(group, dict, where).get("apply"), list, f"{where}.apply")
            for at, row in enumerate(rows):
                location = self.typed(row, dict, f"{where}.apply[{at}]").get("location")
                if location not in _IN_WEIGHTS:
                    wanted = f"transforms that weights hold already ({' or '.join(_IN_WEIGHTS)})"
                    raise CheckpointError(self.file, None, wanted, f"one of {shown(location)} in {plain(where)}")
        sparsity = self.typed(table.get("sparsity_config") or {}, dict, "sparsity_config")
        if sparsity.get("format") not in (None, "dense"):
            raise CheckpointError(self.file, None, "sparsity_config.format dense", shown(sparsity["format"]))

    def modelopt(self, table: Mapping[str, Any]) -> QuantConfig:
        algorithm = table.get("quant_algo")
        ignore = modelopt_patterns(self.names(table, "ignore") + self.names(table, "exclude_modules"))
        if algorithm != "MIXED_PRECISION":
            group = self.modelopt_group(table, "quant_algo", Patterns(classes=["Linear"]))
            return QuantConfig(self.file, "modelopt", (group,), ignore)
        layers = self.typed(table.get("quantized_layers"), dict, "quantized_layers")
        by_kind: dict[str, list[str]] = {}
        for name, row in layers.items():
            group = self.modelopt_group(self.typed(row, dict, f"quantized_layers.{name}"), name, Patterns())
            by_kind.setdefault(group.quant, []).append(name)
        groups = tuple(QuantGroup("quantized_layers", quant, modelopt_patterns(at)) for quant, at in by_kind.items())
        return QuantConfig(self.file, "modelopt", groups, ignore)

    def modelopt_group(self, table: Mapping[str, Any], origin: str, targets: Patterns) -> QuantGroup:
        algorithm = self.typed(table.get("quant_algo"), str, "quant_algo")
        if algorithm not in _MODELOPT_NVFP4:
            return QuantGroup(f"{origin} {algorithm}", _modelopt_quant(algorithm), targets)
        size = table.get("group_size") or GROUP  # some exports give 0 or none for the default
        quant = "nvfp4" if size == GROUP else f"nvfp4 in groups of {shown(size)}"
        return QuantGroup(f"{origin} {algorithm}", quant, targets)

    def names(self, table: Mapping[str, Any], key: str) -> list[str]:
        entries = table.get(key)
        if entries is None:
            return []
        return [self.typed(entry, str, f"{key}[{i}]") for i, entry in enumerate(self.typed(entries, list, key))]

    def patterns(self, entries: Sequence[str]) -> Patterns:
        try:
            return compressed_tensors_patterns(entries)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(self.file, None, "valid regular expressions after re:", str(error)) from None

    def typed(self, value: Any, kind: type[Any], where: str) -> Any:
        if not isinstance(value, kind):
            wanted = "an object" if kind is dict else "a list" if kind is list else "text"
            raise CheckpointError(self.file, None, f"{where} as {wanted}", type_name(value))
        return value


def _compressed_quant(weights: Mapping[str, Any], layout: Any) -> str:
    """Name the quantisation of compressed-tensors' weight arguments; "nvfp4" only if every part of it is ours."""
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if (bits, kind) == (4, "float") and size == GROUP:
        if layout not in (_PACKED, "mixed-precision"):
            return f"nvfp4 in format {shown(layout)}"
        if weights.get("strategy") not in _STRATEGIES or weights.get("dynamic"):
            return f"nvfp4 with scales by {shown(weights.get('strategy'))}{', dynamic' * bool(weights.get('dynamic'))}"
        return "nvfp4" if weights.get("symmetric", True) is True else "nvfp4 with zero points"
    if (bits, kind) == (4, "float"):
        return "mxfp4" if size == 32 else f"fp4 in groups of {shown(size)}"
    if (bits, kind) == (8, "float"):
        return "mxfp8" if size == 32 else "fp8"
    return f"{shown(kind)} of {shown(bits)} bits"


def _modelopt_quant(algorithm: str) -> str:
    for prefix, quant in (("FP8", "fp8"), ("MXFP8", "mxfp8"), ("W4A16_MXFP4", "mxfp4"), ("W4A8_MXFP4", "mxfp4")):
        if algorithm.upper().startswith(prefix):
            return quant
    return shown(algorithm)
