"""The tables of a trace: a boot as plain JSON, so that any engine's lookups can be judged by the same rules."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from kernel_muster.MODEL_toml.schema import QUANTS
from kernel_muster.registry.findings import CODES
from kernel_muster.registry.hardware.arch import CPU, parse_arch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

VERSION = (1, 3)


def _writable(value: Any) -> Any:
    """Return text that UTF-8 can hold: a byte of the environment that is no text, say, is written as its escape."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_writable), Field(max_length=100_000)]
Why = Annotated[str, BeforeValidator(_writable), Field(min_length=1, max_length=100_000)]
Name = Annotated[str, BeforeValidator(_writable), Field(max_length=1_000)]
Pair = Annotated[tuple[Name, Name], Field(strict=False)]  # JSON gives lists
Pairs = Annotated[tuple[Pair, ...], Field(strict=False)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


def _known_arch(text: str) -> str:
    if text != CPU:
        parse_arch(text)
    return text


def _known_quant(text: str) -> str:
    if text and text not in QUANTS:
        raise ValueError(f"{text[:40]!r} is no quantisation: expected {', '.join(QUANTS)}")
    return text


def _plugin_code(text: str) -> str:
    if text not in CODES or CODES[text].group != "plugins":
        raise ValueError(f"{text[:40]!r} is no code of a finding about a plugin")
    return text


class Strict(BaseModel):
    """A table of a trace. ``null`` in an optional field means that the field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}


class TraceTarget(Strict):
    """What kernels were selected for."""

    arch: Annotated[Name, AfterValidator(_known_arch)]
    quant: Annotated[Name, AfterValidator(_known_quant)] = ""


class TraceKernel(Strict):
    """One registered kernel."""

    module: Name
    func: Name
    archs: list[Name] | None = None  # None: it runs on the trace's target
    distribution: Name = "engine"
    version: Name = ""
    tier: Literal["fast", "reference"] = "fast"
    overrides: Name | None = None
    replaces_module: Pair | None = None
    plugin: Name = ""
    contract: Name = ""
    backend: Name = ""
    source_sha256: Name = ""
    host_sha256: Name = ""  # since 1.1
    aliases: list[Name] = []
    opt_in: Name | None = None


class TraceLookup(Strict):
    """One question from one site."""

    module: Name
    func: Name
    site: Text
    kind: Literal["optional", "required"]
    phase: Literal["boot", "late"] = "boot"
    layer: Text = ""
    count: Annotated[int, Field(ge=1, lt=2**63)] = 1
    chain: Pairs = ()
    requested_by: Name | None = None
    when: Text = ""
    reached_by: Text = ""  # since 1.2


class TracePlugin(Strict):
    """One plugin, with what went wrong: ``CODE: why``, or just why."""

    name: Name
    distribution: Name
    version: Name = ""
    error: Why | list[Why] | None = None
    status: Literal["loaded", "failed", "blocked", "mismatched"] | None = None
    value: Name = ""
    keys: list[Text] = []
    last_keys: list[Text] = []  # since 1.2


class TraceFinding(Strict):
    """One finding about plugins, as it stood when the boot opened."""

    code: Annotated[Name, AfterValidator(_plugin_code)]
    subject: Text
    why: Why
    where: Texts = ()
    remedies: Texts = ()
    log: Annotated[str, BeforeValidator(_writable)] = ""
    explains: Texts = ()
    needed_by: Texts = ()  # since 1.3


class TraceLever(Strict):
    """A lever that the engine, or a plugin of it, declares."""

    name: Annotated[Name, Field(pattern=r"^MUSTER_[A-Z][A-Z0-9_]*$")]
    kind: Literal["bool", "int", "enum", "text"] = "text"
    default: bool | int | Text | None = None
    minimum: int | None = None
    maximum: int | None = None
    choices: Texts = ()
    conflicts: Texts = ()
    tuning: Literal["", "same_bits", "other_bits"] = ""


class TraceLayout(Strict):
    """A copy of a weight that a chosen kernel reads and the layout plan does not build."""

    weight: Text
    layout: Name
    readers: list[Pair]


class TraceLateRegistration(Strict):
    """A plugin that somebody tried to register after the seal."""

    plugin: Name
    site: Text


class TraceRequest(Strict):
    """A lever or option that asked in vain."""

    lever: Text
    why: Why
    layer: Text = ""
    site: Text = ""
    lacks: Literal["", "muster_models", "muster_manifests", "muster_levers"] = ""  # since 1.3


class TraceTuning(Strict):
    """The measured table that decides thresholds: what it sets, why it is stale, and what it does not cover."""

    table: Name
    levers: dict[Name, int] = {}
    stale: Texts = ()
    uncovered: Texts = ()
    range: Text = ""


class Trace(Strict):
    """A boot."""

    version: Text
    target: TraceTarget
    model: Text = ""
    kernels: list[TraceKernel]
    lookups: list[TraceLookup]
    plugins: list[TracePlugin] = []
    findings: list[TraceFinding] = []
    levers: dict[Name, bool | int | Text | None] = {}  # the values in force
    declared_levers: list[TraceLever] = []
    requests: list[TraceRequest] = []
    missing_layouts: list[TraceLayout] = []
    late_registrations: list[TraceLateRegistration] = []
    tuning: TraceTuning | None = None
    complete: bool = True


#: The tables inside a trace, which a newer minor version may give more keys.
PARTS: Mapping[str, type[Strict]] = {
    "target": TraceTarget,
    "kernels": TraceKernel,
    "lookups": TraceLookup,
    "plugins": TracePlugin,
    "findings": TraceFinding,
    "declared_levers": TraceLever,
    "requests": TraceRequest,
    "missing_layouts": TraceLayout,
    "late_registrations": TraceLateRegistration,
    "tuning": TraceTuning,
}
