"""What a manifest may say: strict pydantic tables. A new key of the format is one line here.

Dimensions are optional, because an engine that is audited by a trace needs none; what a builder needs beyond that is
`ModelTable.missing_dimensions`.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import date
from typing import Annotated, Any, Literal, Self

from kernel_muster.MODEL_toml.wording import reason_problem, shown, tidy, type_name
from kernel_muster.registry.hardware.arch import CPU, parse_arch
from kernel_muster.registry.keys import did_you_mean
from kernel_muster.registry.service_variables import resembles_service
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

QUANTS = ("nvfp4", "mxfp4", "fp8", "bf16")
Quant = Literal["nvfp4", "mxfp4", "fp8", "bf16"]
#: Tags of the two forms of an entry; no key of TOML that anybody writes looks like them.
SHORT_FORM, LONG_FORM = "<short>", "<long>"
#: Tables of other tools: ``[x-<name>]``.
EXTENSION_PATTERN = r"^x-[a-z0-9][a-z0-9_-]*$"
LEVER_SCOPE_PATTERN = r"^(MUSTER_[A-Z][A-Z0-9_]*)=(\S.*)$"
# The schema's share of what reason_problem refuses; a JSON Schema pattern knows no flags.
_SIGNS = r"[\s!-/:-@\[-`{-~]*"
_NO_REASON = (
    rf"^{_SIGNS}([Tt][Oo][Dd][Oo]|[Tt][Bb][Dd]|[Nn]\W?[Aa]|[Nn][Oo][Nn][Ee]|[Ff][Ii][Xx][Mm][Ee])?{_SIGNS}$"
    r"|^\s*[!-~]+\s*$"
)


def _checked_version(value: object) -> object:
    if type(value) is not int:  # Literal[1] also takes true and 1.0
        raise ValueError(f"expected 1, got {type_name(value)} {shown(value)}")
    return value


def _checked_reason(text: str) -> str:
    problem = reason_problem(text)
    if problem:
        raise ValueError(problem)
    return tidy(text)


def _checked_arch(text: str) -> str:
    if text != CPU:
        parse_arch(text)
    return text


def _checked_quant(text: str) -> str:
    if text not in QUANTS:
        raise ValueError(f"{shown(text)} is no quantisation: expected {', '.join(QUANTS)}{did_you_mean(text, QUANTS)}")
    return text


def _checked_date(value: object) -> object:
    # datetime is a subclass of date: a time of day would make "inclusive" ambiguous
    if type(value) is not date:
        raise ValueError(f"expected a date such as 2027-06-30 (no quotes, no time), got {type_name(value)}")
    return value


def _checked_lever_name(name: str) -> str:
    if resembles_service(name):
        raise ValueError(f"{name} resembles a platform's service variable, and no lever has such a name")
    return name


def _checked_lever_value(value: object) -> object:
    if not isinstance(value, bool | int | str) or (isinstance(value, str) and not value.strip()):
        got = "blank text" if isinstance(value, str) else type_name(value)
        raise ValueError(f"expected a lever's value (a boolean, an integer or text), got {got}")
    return value


def _nonblank(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{shown(text)} is blank or not printable, expected text")
    return text


def _repeated(values: Iterable[str]) -> list[str]:
    return sorted(value for value, count in Counter(values).items() if count > 1)


def _no_repeats(values: tuple[str, ...]) -> tuple[str, ...]:
    repeated = _repeated(values)
    if repeated:
        raise ValueError(f"{', '.join(map(shown, repeated))} stands in the list more than once")
    return values


def _one_value_a_lever(values: tuple[str, ...]) -> tuple[str, ...]:
    repeated = _repeated(value.partition("=")[0] for value in values)
    if repeated:
        raise ValueError(f"{', '.join(repeated)} is named more than once, but all entries must hold at the same time")
    return values


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
#: Layers are built one by one, so that their number costs time and memory; no model comes near this.
LayerCount = Annotated[int, Field(ge=1, le=4096)]
Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, AfterValidator(_nonblank), Field(json_schema_extra={"pattern": r"\S"})]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
ModelType = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
HfId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=300)]
KeyPart = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
ArchName = Annotated[
    str, AfterValidator(_checked_arch), Field(json_schema_extra={"pattern": r"^(cpu|sm_[0-9]+[af]?)$"})
]
QuantName = Annotated[str, AfterValidator(_checked_quant), Field(json_schema_extra={"enum": list(QUANTS)})]
LeverName = Annotated[str, Field(pattern=r"^MUSTER_[A-Z][A-Z0-9_]*$"), AfterValidator(_checked_lever_name)]
LeverValue = Annotated[bool | int | str, BeforeValidator(_checked_lever_value)]
LeverScope = Annotated[str, Field(pattern=LEVER_SCOPE_PATTERN)]
Reason = Annotated[str, AfterValidator(_checked_reason), Field(json_schema_extra={"not": {"pattern": _NO_REASON}})]
Until = Annotated[date, BeforeValidator(_checked_date)]
_List = Field(strict=False, min_length=1)  # TOML gives lists, the frozen tables hold tuples
Needles = Annotated[tuple[Text, ...], Field(strict=False), AfterValidator(_no_repeats)]
Archs = Annotated[tuple[ArchName, ...], _List, AfterValidator(_no_repeats)]
Quants = Annotated[tuple[QuantName, ...], _List, AfterValidator(_no_repeats)]
LeverScopes = Annotated[tuple[LeverScope, ...], _List, AfterValidator(_one_value_a_lever)]
LayerKind = Literal["gdn", "full"]


class Table(BaseModel):
    """A table of the manifest: strict types, no unknown keys, frozen."""

    # built once, as parts of Document, on first use
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("; ".join(problems))


class AttentionTable(Table):
    """``[model.attention]``: full attention with grouped queries."""

    heads: Count
    kv_heads: Count
    head_dim: Count
    gated: bool = Field(False, description="The query projection also gives a gate of the same size.")
    qk_norm: bool = Field(False, description="Queries and keys are RMS-normalised per head.")
    weights: Literal["native", "bf16_requantised"] = Field(
        "native", description="bf16_requantised: stored as BF16, requantised to the model's quantisation at load."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        return self


class GdnTable(Table):
    """``[model.gdn]``: gated delta net (linear attention)."""

    key_heads: Count
    key_dim: Count
    value_heads: Count
    value_dim: Count
    conv_width: Count

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads {self.value_heads} is no multiple of key_heads {self.key_heads}")
        return self


class MoeTable(Table):
    """``[model.moe]``: routed experts, and a shared one where its size is given."""

    experts: Count
    top_k: Count
    intermediate_size: Count
    shared_intermediate_size: Count | None = None
    router: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = Field(True, description="The weights of the chosen experts are scaled to sum 1.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        return self


class RopeTable(Table):
    """``[model.rope]``: rotary position embedding."""

    theta: Positive
    partial_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    mrope_sections: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    mrope_interleaved: bool = False
    yarn_factor: Positive | None = None
    yarn_original_context: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.mrope_interleaved and not self.mrope_sections:
            problems.append("mrope_interleaved needs mrope_sections")
        if (self.yarn_factor is None) != (self.yarn_original_context is None):
            problems.append("yarn_factor and yarn_original_context go together")
        _refuse(problems)
        return self


class MtpTable(Table):
    """``[model.mtp]``: the multi-token-prediction head; leave the table out where there is none."""

    layers: LayerCount


class ModelTable(Table):
    """``[model]``: name, quantisation, and the dimensions that builders read."""

    name: ModelName
    hf_id: HfId | None = None
    quant: Quant
    match_names: Needles = Field(
        (), description="Texts that, found in the user's reference, tell models of one type apart."
    )
    model_type: ModelType | None = Field(
        None, description="What its builder is found by; default: the type of [[model_types]]."
    )
    known_config_fields: Needles = Field(
        (), description="Fields of its config.json that its builder reads itself: neither compared nor unknown."
    )
    hidden_size: Count | None = None
    num_layers: LayerCount | None = None
    layer_pattern: Annotated[tuple[LayerKind, ...], _List] | None = Field(None, description="Repeated over all layers.")
    ffn: Literal["dense", "moe", "none"] | None = None
    intermediate_size: Count | None = Field(None, description="Of the dense FFN.")
    vocab_size: Count | None = None
    context_length: Count | None = Field(None, description="Tokens of a sequence; a longer one is refused.")
    tie_word_embeddings: bool = False
    rms_norm_eps: Positive | None = None
    rms_norm_zero_centred: bool = Field(False, description="Norms multiply by 1 + weight.")
    attention: AttentionTable | None = None
    gdn: GdnTable | None = None
    moe: MoeTable | None = None
    rope: RopeTable | None = None
    mtp: MtpTable | None = None

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order; empty where the manifest gives no dimensions."""
        if self.layer_pattern is None or self.num_layers is None:
            return ()
        return self.layer_pattern * (self.num_layers // len(self.layer_pattern))

    @property
    def missing_dimensions(self) -> tuple[str, ...]:
        """Dotted paths of what a builder needs and the manifest does not give."""
        needed = ("hidden_size", "num_layers", "layer_pattern", "ffn", "vocab_size", "rms_norm_eps")
        missing = [f"model.{name}" for name in needed if getattr(self, name) is None]
        if self.attention is not None and self.rope is None:
            missing.append("model.rope")
        return tuple(missing)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse([*self._layer_problems(), *self._ffn_problems(), *self._rope_problems()])
        return self

    def _layer_problems(self) -> list[str]:
        if self.layer_pattern is None:
            return []
        problems = []
        if self.num_layers is None or self.num_layers % len(self.layer_pattern):
            problems.append(
                f"num_layers {self.num_layers} is no multiple of the layer_pattern's {len(self.layer_pattern)}"
            )
        for kind, table in (("full", "attention"), ("gdn", "gdn")):
            if (kind in self.layer_pattern) != (getattr(self, table) is not None):
                problems.append(f"layer_pattern with {kind!r} and [model.{table}] go together")
        return problems

    def _ffn_problems(self) -> list[str]:
        problems = []
        if (self.ffn == "moe") != (self.moe is not None):
            problems.append("ffn = 'moe' and [model.moe] go together")
        if (self.ffn == "dense") != (self.intermediate_size is not None):
            problems.append("ffn = 'dense' and intermediate_size go together")
        return problems

    def _rope_problems(self) -> list[str]:
        if self.rope is None or self.attention is None or not self.rope.mrope_sections:
            return []
        rotated, sections = self.attention.head_dim * self.rope.partial_factor, 2 * sum(self.rope.mrope_sections)
        return (
            []
            if rotated == sections
            else [f"mrope_sections rotate {sections} dimensions, but partial_factor {rotated:g}"]
        )


class ModelTypeRow(Table):
    """One ``[[model_types]]`` row; without hidden_size it takes every size that no exact row takes."""

    model_type: ModelType
    hidden_size: Count | None = None


class PresentTable(Table):
    """The long form of an ``expected_present`` entry: a reason, and where it applies."""

    reason: Reason
    archs: Archs | None = Field(None, description="Architectures (or cpu) it applies to; default: all.")
    quants: Quants | None = Field(None, description="Quantisations it applies to; default: all.")
    levers: LeverScopes | None = Field(None, description="NAME=value; applies only where all of them hold.")


class AbsentTable(PresentTable):
    """The long form of a waiver."""

    until: Until | None = Field(None, description="Last day (UTC) on which it counts.")


def _form(value: object) -> str:
    return SHORT_FORM if isinstance(value, str) else LONG_FORM


AbsentEntry = Annotated[
    Annotated[Reason, Tag(SHORT_FORM)] | Annotated[AbsentTable, Tag(LONG_FORM)], Discriminator(_form)
]
PresentEntry = Annotated[
    Annotated[Reason, Tag(SHORT_FORM)] | Annotated[PresentTable, Tag(LONG_FORM)], Discriminator(_form)
]
AbsentTables = dict[KeyPart, dict[KeyPart, AbsentEntry]]
PresentTables = dict[KeyPart, dict[KeyPart, PresentEntry]]


class TargetTable(Table):
    """``[target."sm_90a"]``: entries for one architecture, added to the common ones."""

    expected_absent: AbsentTables = {}
    expected_present: PresentTables = {}


class Document(Table):
    """The whole file, without its ``[x-<name>]`` tables."""

    schema_version: Annotated[Literal[1], BeforeValidator(_checked_version), Field(alias="schema")] = 1
    model: ModelTable
    model_types: Annotated[tuple[ModelTypeRow, ...], Field(strict=False)] = ()
    defaults: dict[LeverName, LeverValue] = Field({}, description="Levers of this model.")
    expected_absent: AbsentTables = Field({}, description="Waivers: kernels this model may legitimately lack.")
    expected_present: PresentTables = Field({}, description="Kernels this model must have asked for and got.")
    target: dict[ArchName, TargetTable] = {}
    sampling: dict[str, dict[str, Any]] = Field({}, description="Carried for builders.")
    behavior: dict[str, Any] = Field({}, description="Carried for builders.")
    dflash: dict[str, Any] = Field({}, description="Carried for builders.")
    kernel: dict[str, Any] = Field({}, description="Carried for builders.")
