"""A checkpoint's quantisation config: in ``config.json`` or ``hf_quant_config.json``, in the styles of two libraries.

compressed-tensors: ``config_groups`` with targets, weight arguments and a format, and an ``ignore`` list. ModelOpt:
``quant_algo`` with an ``ignore`` list, or ``quantized_layers`` for MIXED_PRECISION; older exports hold the same in
``hf_quant_config.json``, as ``quantization`` with ``exclude_modules``. Resolution and the weight reader use this.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from kernel_muster.MODEL_toml.hf.config import CONFIG_NAME, HF_QUANT_NAME, HfConfig
from kernel_muster.MODEL_toml.hf.fields import QUANTISATION
from kernel_muster.MODEL_toml.hf.module_patterns import Patterns, compressed_tensors_patterns, modelopt_patterns
from kernel_muster.MODEL_toml.wording import plain, shown, type_name
from kernel_muster.registry.contract.nvfp4 import GROUP
from kernel_muster.registry.values import frozen

Style = Literal["compressed-tensors", "modelopt"]
KEY, PLAIN = QUANTISATION[0], "bf16"
#: Formats of weights that layers read.
READABLE = ("nvfp4", PLAIN)
_PACKED = "nvfp4-pack-quantized"
_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")
# Where compressed-tensors applies a transform once, before it writes the weights.
_IN_WEIGHTS = ("weight_input", "weight_output")
_STRATEGIES = (None, "tensor_group", "group")
_WHOLE_MODEL = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
#: What a compressed-tensors format says where the groups are missing.
_FORMATS = {_PACKED: "nvfp4", "mxfp4-pack-quantized": "mxfp4", "float-quantized": "fp8", "naive-quantized": "fp8"}


class QuantProblem(ValueError):
    """A quantisation config is malformed, contradicts itself or has a format that nobody reads.

    ``is_incomplete``: only its groups or its algorithm are missing, so that it names nothing but a method.
    """

    def __init__(self, file: str, module: str | None, expected: str, got: str, *, is_incomplete: bool = False) -> None:
        super().__init__(f"{file}: expected {expected}, got {got}")
        self.file, self.module, self.expected, self.got = file, module, expected, got
        self.is_incomplete = is_incomplete


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
class Quantisation:
    """The whole config; without groups everything is plain. ``file`` is its file's name, ``is_given`` whether it is."""

    file: str
    style: Style | None = None
    groups: tuple[QuantGroup, ...] = ()
    ignore: Patterns = field(default_factory=Patterns)
    is_given: bool = True

    def expected(self, module: str) -> Expected:
        """Return how a module is stored; QuantProblem if two groups contradict each other."""
        if not self.groups:
            return Expected(PLAIN, f"{self.file} has no {KEY}")
        if self.ignore.matches(module):
            return Expected(PLAIN, f"{self.file} ignores it")
        named = [group for group in self.groups if group.targets.matches(module)]
        chosen = named or [group for group in self.groups if group.targets.classes]
        if not chosen:
            return Expected(PLAIN, f"no target in {self.file} names it")
        if len({group.quant for group in chosen}) > 1:
            got = ", ".join(f"{group.origin}: {group.quant}" for group in chosen)
            raise QuantProblem(self.file, module, "one quantisation of a module", got)
        return Expected(chosen[0].quant, f"{self.file}: {chosen[0].origin}", is_certain=bool(named))


def quantisation(config: HfConfig) -> Quantisation:
    """Read a checkpoint's quantisation config; QuantProblem if it is malformed, or if its two files differ."""
    found = list(quant_tables(config))
    reader = _Reader(CONFIG_NAME)
    if len(found) > 1 and any(table != found[0] for table in found):
        raise QuantProblem(CONFIG_NAME, None, f"one {KEY}", "two that differ, one of them in text_config")
    own = reader.read(reader.typed(found[0], dict, KEY)) if found else None
    older = None if config.hf_quant is None else _older(config.hf_quant)
    if own is not None and older is not None and _quants(own) != _quants(older):
        got = f"{_quants(own)} in {CONFIG_NAME}, {_quants(older)} in {HF_QUANT_NAME}"
        raise QuantProblem(CONFIG_NAME, None, "one quantisation", got)
    return own or older or Quantisation(CONFIG_NAME, is_given=False)


def quant_tables(config: HfConfig) -> Iterator[Any]:
    """Yield what stands as a quantisation config, at each level and under each name."""
    for _, table in config.levels:
        yield from (table[key] for key in QUANTISATION if table.get(key) is not None)


def bare_format(config: HfConfig) -> str | None:
    """Return the quantisation that the format of a config without groups amounts to; None if it names none."""
    formats = (table.get("format") for table in quant_tables(config) if isinstance(table, Mapping))
    return next((_FORMATS[one] for one in formats if isinstance(one, str) and one in _FORMATS), None)


def _older(table: Mapping[str, Any]) -> Quantisation:
    reader = _Reader(HF_QUANT_NAME)
    return reader.modelopt(reader.typed(table.get("quantization"), dict, "quantization"))


def _quants(stated: Quantisation) -> str:
    return " and ".join(sorted({group.quant for group in stated.groups})) or PLAIN


class _Reader:
    """Reads one file's tables, each value checked where it is used."""

    def __init__(self, file: str) -> None:
        self.file = file

    def read(self, table: Mapping[str, Any]) -> Quantisation:
        method = table.get("quant_method")
        if method == "compressed-tensors":
            return self.compressed_tensors(table)
        if isinstance(method, str) and method.startswith("modelopt"):
            nested = table.get("quantization")
            return self.modelopt(table if nested is None else self.typed(nested, dict, "quantization"))
        if isinstance(method, str) and method in _WHOLE_MODEL:
            groups = (QuantGroup(f"quant_method {method}", _WHOLE_MODEL[method], Patterns(classes=["Linear"])),)
            skipped = self.names(table, "modules_to_not_convert") + self.names(table, "ignored_layers")
            return Quantisation(self.file, None, groups, modelopt_patterns(skipped))
        raise QuantProblem(self.file, None, "quant_method compressed-tensors or modelopt", shown(method))

    def compressed_tensors(self, table: Mapping[str, Any]) -> Quantisation:
        self.refuse_transforms(table)
        self.need(table, "config_groups", "an object")
        groups = []
        for name, group in self.typed(table.get("config_groups"), dict, "config_groups").items():
            where = f"config_groups.{plain(name)}"
            row = self.typed(group, dict, where)
            if row.get("weights") is None:
                continue  # activations or the KV cache only
            weights = self.typed(row["weights"], dict, f"{where}.weights")
            quant = _compressed_quant(weights, row.get("format") or table.get("format"))
            groups.append(QuantGroup(where, quant, self.patterns(self.names(row, "targets"))))
        ignore = self.patterns(self.names(table, "ignore"))
        return Quantisation(self.file, "compressed-tensors", tuple(groups), ignore)

    def refuse_transforms(self, table: Mapping[str, Any]) -> None:
        """Refuse what is left to do while the model runs: no layer transforms activations or unpacks sparse weights."""
        transforms = self.typed(table.get("transform_config") or {}, dict, "transform_config")
        groups = self.typed(transforms.get("config_groups") or {}, dict, "transform_config.config_groups")
        for name, group in groups.items():
            where = f"transform_config.config_groups.{plain(name)}"
            rows = self.typed(self.typed(group, dict, where).get("apply"), list, f"{where}.apply")
            for at, row in enumerate(rows):
                location = self.typed(row, dict, f"{where}.apply[{at}]").get("location")
                if location not in _IN_WEIGHTS:
                    wanted = f"transforms that weights hold already ({' or '.join(_IN_WEIGHTS)})"
                    raise QuantProblem(self.file, None, wanted, f"one of {shown(location)} in {where}")
        sparsity = self.typed(table.get("sparsity_config") or {}, dict, "sparsity_config")
        if sparsity.get("format") not in (None, "dense"):
            raise QuantProblem(self.file, None, "sparsity_config.format dense", shown(sparsity["format"]))

    def modelopt(self, table: Mapping[str, Any]) -> Quantisation:
        self.need(table, "quant_algo", "text")
        algorithm = table["quant_algo"]
        ignore = modelopt_patterns(self.names(table, "ignore") + self.names(table, "exclude_modules"))
        if algorithm != "MIXED_PRECISION":
            group = self.modelopt_group(table, "quant_algo", Patterns(classes=["Linear"]))
            return Quantisation(self.file, "modelopt", (group,), ignore)
        layers = self.typed(table.get("quantized_layers"), dict, "quantized_layers")
        by_kind: dict[str, list[str]] = {}
        for name, row in layers.items():
            group = self.modelopt_group(
                self.typed(row, dict, f"quantized_layers.{plain(name)}"), plain(name), Patterns()
            )
            by_kind.setdefault(group.quant, []).append(name)
        groups = tuple(QuantGroup("quantized_layers", quant, modelopt_patterns(at)) for quant, at in by_kind.items())
        return Quantisation(self.file, "modelopt", groups, ignore)

    def modelopt_group(self, table: Mapping[str, Any], origin: str, targets: Patterns) -> QuantGroup:
        algorithm = self.typed(table.get("quant_algo"), str, "quant_algo")
        if algorithm not in _MODELOPT_NVFP4:
            return QuantGroup(f"{origin} {algorithm}", _modelopt_quant(algorithm), targets)
        if extra := [key for key in ("has_zero_point", "pre_quant_scale") if table.get(key)]:
            return QuantGroup(f"{origin} {algorithm}", f"nvfp4 with {extra[0]}", targets)
        size = table.get("group_size") or GROUP  # some exports give 0 or none for the default
        quant = "nvfp4" if size == GROUP else f"nvfp4 in groups of {shown(size)}"
        return QuantGroup(f"{origin} {algorithm}", quant, targets)

    def need(self, table: Mapping[str, Any], key: str, kind: str) -> None:
        if table.get(key) is None:
            raise QuantProblem(self.file, None, f"{key} as {kind}", "null", is_incomplete=True)

    def names(self, table: Mapping[str, Any], key: str) -> list[str]:
        entries = table.get(key)
        if entries is None:
            return []
        return [self.typed(entry, str, f"{key}[{i}]") for i, entry in enumerate(self.typed(entries, list, key))]

    def patterns(self, entries: Sequence[str]) -> Patterns:
        try:
            return compressed_tensors_patterns(entries)
        except (re.error, RecursionError, OverflowError) as error:
            raise QuantProblem(self.file, None, "valid regular expressions after re:", str(error)) from None

    def typed(self, value: Any, kind: type[Any], where: str) -> Any:
        if not isinstance(value, kind):
            wanted = "an object" if kind is dict else "a list" if kind is list else "text"
            raise QuantProblem(self.file, None, f"{where} as {wanted}", type_name(value))
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
