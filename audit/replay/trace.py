"""Traces: a boot as plain JSON, so that any engine's lookups can be judged by the same rules.

Strict within a major version: an unknown key is refused, unless the trace says that it comes from a newer minor one.
"""

import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from kernel_muster.audit import strict_json
from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.replay.trace_problems import problem_text
from kernel_muster.audit.tuning.facts import TuningFacts
from kernel_muster.audit.versions import minor_of
from kernel_muster.MODEL_toml.schema import QUANTS
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import CODES, Finding
from kernel_muster.registry.hardware.arch import CPU, parse_arch
from kernel_muster.registry.levers import CORE_LEVERS, Lever
from kernel_muster.registry.selection.records import LookupEntry
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

VERSION = (1, 2)
#: 100,000 lookups take about 20 MB.
MOST_BYTES = 512 * 1024 * 1024
_MOST_PROBLEMS = 20


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


class _Strict(BaseModel):
    """A table of a trace. ``null`` in an optional field means that the field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}


class TraceTarget(_Strict):
    """What kernels were selected for."""

    arch: Annotated[Name, AfterValidator(_known_arch)]
    quant: Annotated[Name, AfterValidator(_known_quant)] = ""


class TraceKernel(_Strict):
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


class TraceLookup(_Strict):
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


class TracePlugin(_Strict):
    """One plugin, with what went wrong: ``CODE: why``, or just why."""

    name: Name
    distribution: Name
    version: Name = ""
    error: Why | list[Why] | None = None
    status: Literal["loaded", "failed", "blocked", "mismatched"] | None = None
    value: Name = ""
    keys: list[Text] = []
    last_keys: list[Text] = []  # since 1.2


class TraceFinding(_Strict):
    """One finding about plugins, as it stood when the boot opened."""

    code: Annotated[Name, AfterValidator(_plugin_code)]
    subject: Text
    why: Why
    where: Texts = ()
    remedies: Texts = ()
    log: Annotated[str, BeforeValidator(_writable)] = ""
    explains: Texts = ()


class TraceLever(_Strict):
    """A lever that the engine, or a plugin of it, declares."""

    name: Annotated[Name, Field(pattern=r"^MUSTER_[A-Z][A-Z0-9_]*$")]
    kind: Literal["bool", "int", "enum", "text"] = "text"
    default: bool | int | Text | None = None
    minimum: int | None = None
    maximum: int | None = None
    choices: Texts = ()
    conflicts: Texts = ()
    tuning: Literal["", "same_bits", "other_bits"] = ""


class TraceLayout(_Strict):
    """A copy of a weight that a chosen kernel reads and the layout plan does not build."""

    weight: Text
    layout: Name
    readers: list[Pair]


class TraceLateRegistration(_Strict):
    """A plugin that somebody tried to register after the seal."""

    plugin: Name
    site: Text


class TraceRequest(_Strict):
    """A lever or option that asked in vain."""

    lever: Text
    why: Why
    layer: Text = ""
    site: Text = ""


class TraceTuning(_Strict):
    """The measured table that decides thresholds: what it sets, why it is stale, and what it does not cover."""

    table: Name
    levers: dict[Name, int] = {}
    stale: Texts = ()
    uncovered: Texts = ()
    range: Text = ""


class Trace(_Strict):
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


_ADAPTER = TypeAdapter(Trace)
#: The tables inside a trace, which a newer minor version may give more keys.
_PARTS: Mapping[str, type[_Strict]] = {
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


def trace_document(evidence: Evidence) -> dict[str, Any]:
    """Write a boot down as a trace, ready for ``json.dump``."""
    trace = Trace(
        version=".".join(map(str, VERSION)),
        target=TraceTarget(arch=str(evidence.target.arch or "cpu"), quant=evidence.quant),
        model=evidence.manifest.name,
        kernels=[_kernel(evidence, registered) for registered in evidence.catalog.kernels],
        lookups=[_lookup(entry) for entry in (*evidence.entries, *evidence.late_entries)],
        plugins=[
            TracePlugin(
                name=row.name,
                distribution=row.distribution,
                version=row.version,
                status=row.status,
                value=row.value,
                keys=[str(key) for key in row.keys],
                last_keys=[str(key) for key in row.last_keys],
            )
            for row in evidence.catalog.plugins
        ],
        findings=[_finding(f) for f in evidence.opening if CODES[f.code].group == "plugins"],
        levers={setting.lever.name: setting.value for setting in evidence.levers.settings},
        declared_levers=[_lever(s.lever) for s in evidence.levers.settings if s.lever not in CORE_LEVERS],
        requests=[TraceRequest(lever=r.lever, why=r.why, layer=r.layer, site=r.site) for r in evidence.requests],
        missing_layouts=[
            TraceLayout(weight=copy.weight, layout=copy.layout, readers=sorted(copy.readers))
            for copy in evidence.missing_layouts
        ],
        late_registrations=[TraceLateRegistration(plugin=r.plugin, site=r.site) for r in evidence.late_registrations],
        tuning=_tuning(evidence.tuning),
        complete=evidence.is_complete,
    )
    return trace.model_dump(mode="json", exclude_defaults=True) | {"kernels": [k.model_dump() for k in trace.kernels]}


def _kernel(evidence: Evidence, registered: Registered) -> TraceKernel:
    spec, provider = registered.spec, registered.provider
    return TraceKernel(
        module=spec.kernel_key.module,
        func=spec.kernel_key.func,
        archs=list(spec.archs),
        distribution=provider.distribution,
        version=provider.version,
        tier=spec.tier,
        overrides=spec.overrides,
        replaces_module=spec.replaces_module,
        plugin=provider.plugin,
        contract=spec.contract,
        backend=spec.backend.name,
        source_sha256=evidence.source_digest(registered)[0],
        host_sha256=spec.host_sha256,
        aliases=list(spec.aliases),
        opt_in=spec.opt_in,
    )


def _lookup(entry: LookupEntry) -> TraceLookup:
    return TraceLookup(
        module=entry.members[0].module,
        func=entry.members[0].func,
        site=entry.site,
        kind=entry.kind,
        phase=entry.phase,
        layer=entry.layer,
        count=entry.times,
        chain=entry.members if len(entry.members) > 1 else (),
        requested_by=entry.requested_by,
        when=entry.when,
        reached_by=entry.reached_by,
    )


def _finding(finding: Finding) -> TraceFinding:
    return TraceFinding(
        code=finding.code,
        subject=finding.subject,
        why=finding.why,
        where=finding.where,
        remedies=finding.remedies,
        log=finding.log,
        explains=finding.explains,
    )


def _tuning(facts: TuningFacts | None) -> TraceTuning | None:
    if facts is None:
        return None
    return TraceTuning(
        table=facts.table, levers=dict(facts.levers), stale=facts.stale, uncovered=facts.uncovered, range=facts.range
    )


def _lever(lever: Lever) -> TraceLever:
    return TraceLever(
        name=lever.name,
        kind=lever.kind,
        default=lever.default,
        minimum=lever.minimum,
        maximum=lever.maximum,
        choices=lever.choices,
        conflicts=lever.conflicts,
        tuning=lever.tuning,
    )


def read_trace(path: str | Path) -> Trace:
    """Read a trace, ``-`` from standard input; UsageError says everything that is wrong with it."""
    return parse_trace(read_document(path), "stdin" if str(path) == "-" else str(path))


def read_document(path: str | Path) -> Any:
    """Read the JSON of a trace; UsageError for what is no such file."""
    file = Path("stdin" if str(path) == "-" else path)
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(MOST_BYTES + 1) if sys.stdin is not None else b""
        elif not file.is_file():
            raise UsageError(f"{file}: is no regular file" if file.exists() else f"{file}: there is no such file")
        else:
            with file.open("rb") as stream:
                raw = stream.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise UsageError(f"{file}: larger than {MOST_BYTES} bytes, which no trace is")
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {_plain(str(error))}") from None
    try:
        return strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: is not JSON: {_plain(str(error))}") from None


def parse_trace(data: Any, name: str = "trace") -> Trace:
    """Check a trace that was read as plain data; UsageError says everything that is wrong with it."""
    try:
        trace = _ADAPTER.validate_python(_for_this_version(data, name))
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [_plain(problem_text(one, _keys_at(one["loc"]))) for one in found[:_MOST_PROBLEMS]]
        counted = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise UsageError(f"{name}: {counted}:\n  " + "\n  ".join(problems)) from None
    _check_chains(trace, name)
    return trace


def _for_this_version(data: Any, name: str) -> dict[str, Any]:
    """Return the trace, without the keys that a newer minor version added."""
    if not isinstance(data, dict) or not isinstance(data.get("version"), str):
        raise UsageError(f'{name}: expected an object with "version": "{VERSION[0]}.{VERSION[1]}"')
    minor = minor_of(data["version"], VERSION[0])
    if minor is None:
        version = _plain(repr(data["version"][:40]))
        raise UsageError(f"{name}: version is {version}; this program reads {VERSION[0]}.x")
    return _without_unknown(data) if minor > VERSION[1] else data


def _without_unknown(data: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = _known(data, Trace)
    for name, part in _PARTS.items():
        value = known.get(name)
        if isinstance(value, list):
            known[name] = [_known(row, part) for row in value]
        elif value is not None:
            known[name] = _known(value, part)
    return known


def _known(row: Any, part: type[_Strict]) -> Any:
    return {k: v for k, v in row.items() if k in part.model_fields} if isinstance(row, dict) else row


def _keys_at(path: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the keys that the table holds in which a problem lies."""
    table = Trace if len(path) == 1 else _PARTS.get(str(path[0]), Trace)
    return tuple(table.model_fields)


def _plain(text: str) -> str:
    """Return text that any terminal can show: what a trace holds may be anything."""
    return text.encode("ascii", "backslashreplace").decode()


def _check_chains(trace: Trace, name: str) -> None:
    for position, row in enumerate(trace.lookups):
        if row.chain and row.chain[0] != (row.module, row.func):
            begins = _plain(reprlib.repr(row.chain[0]))
            raise UsageError(f"{name}: lookups[{position}]: its chain begins with {begins}, not with its own key")
