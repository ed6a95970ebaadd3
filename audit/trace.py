"""Traces: a boot as plain JSON, so that any engine's lookups can be judged by the same rules.

Strict within a major version: an unknown key is refused, unless the trace says that it comes from a newer minor one.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import CODES
from kernel_muster.registry.records import LookupEntry
from kernel_muster.registry.specs import Registered
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

VERSION = (1, 0)
#: 100,000 lookups take about 20 MB.
MOST_BYTES = 512 * 1024 * 1024

Text = Annotated[str, Field(max_length=100_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TraceTarget(_Strict):
    """What kernels were selected for."""

    arch: Text
    quant: Text = ""


class TraceKernel(_Strict):
    """One registered kernel."""

    module: Text
    func: Text
    archs: list[Text] | None = None  # None: it runs on the trace's target
    distribution: Text = "engine"
    version: Text = ""
    tier: Literal["fast", "reference"] = "fast"
    overrides: Text | None = None
    replaces_module: tuple[Text, Text] | None = None
    plugin: Text = ""
    contract: Text = ""
    backend: Text = ""
    source_sha256: Text = ""
    aliases: list[Text] = []
    opt_in: Text | None = None


class TraceLookup(_Strict):
    """One question from one site."""

    module: Text
    func: Text
    site: Text
    kind: Literal["optional", "required"]
    phase: Literal["boot", "late"] = "boot"
    layer: Text = ""
    count: Annotated[int, Field(ge=1)] = 1
    chain: list[tuple[Text, Text]] = []
    requested_by: Text | None = None
    when: Text = ""


class TracePlugin(_Strict):
    """One plugin, with what went wrong: ``CODE: why``, or just why."""

    name: Text
    distribution: Text
    version: Text = ""
    error: Text | list[Text] | None = None
    status: Literal["loaded", "failed", "blocked", "mismatched"] | None = None
    keys: list[Text] = []


class TraceRequest(_Strict):
    """A lever or option that asked in vain."""

    lever: Text
    why: Text
    layer: Text = ""
    site: Text = ""


class Trace(_Strict):
    """A boot."""

    version: Text
    target: TraceTarget
    model: Text = ""
    kernels: list[TraceKernel]
    lookups: list[TraceLookup]
    plugins: list[TracePlugin] = []
    levers: dict[Text, bool | int | Text | None] = {}  # the values in force
    declared_levers: list[Text] = []  # those that the engine itself declares
    requests: list[TraceRequest] = []
    complete: bool = True


_ADAPTER = TypeAdapter(Trace)


def trace_document(evidence: Evidence) -> dict[str, Any]:
    """Write a boot down as a trace, ready for ``json.dump``."""
    trace = Trace(
        version=".".join(map(str, VERSION)),
        target=TraceTarget(arch=str(evidence.target.arch or "cpu"), quant=evidence.quant),
        model=evidence.manifest.name,
        kernels=[_kernel(registered) for registered in evidence.catalog.kernels],
        lookups=[_lookup(entry) for entry in (*evidence.entries, *evidence.late_entries)],
        plugins=_plugins(evidence),
        levers={setting.lever.name: setting.value for setting in evidence.levers.settings},
        declared_levers=[setting.lever.name for setting in evidence.levers.settings],
        requests=[TraceRequest(lever=r.lever, why=r.why, layer=r.layer, site=r.site) for r in evidence.requests],
        complete=evidence.is_complete,
    )
    return trace.model_dump(mode="json", exclude_defaults=True) | {"kernels": [k.model_dump() for k in trace.kernels]}


def _kernel(registered: Registered) -> TraceKernel:
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
        source_sha256=spec.backend.source_sha256,
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
        chain=[(key.module, key.func) for key in entry.members] if len(entry.members) > 1 else [],
        requested_by=entry.requested_by,
        when=entry.when,
    )


def _plugins(evidence: Evidence) -> list[TracePlugin]:
    """All plugins, and one row for each finding about a plugin that has no row of its own."""
    errors: dict[str, list[str]] = {}
    for finding in evidence.opening:
        if CODES[finding.code].group == "plugins":
            errors.setdefault(finding.subject, []).append(f"{finding.code}: {finding.why}")
    rows = [
        TracePlugin(
            name=row.name,
            distribution=row.distribution,
            version=row.version,
            status=row.status,
            error=errors.pop(row.name, None),
            keys=[str(key) for key in row.keys],
        )
        for row in evidence.catalog.plugins
    ]
    return rows + [TracePlugin(name=name, distribution="", error=found) for name, found in sorted(errors.items())]


def read_trace(path: str | Path) -> Trace:
    """Read a trace; UsageError says everything that is wrong with it."""
    file = Path(path)
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file}: larger than {MOST_BYTES} bytes, which no trace is")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
    try:
        data = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: is not JSON: {error}") from None
    return parse_trace(data, str(file))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_trace(data: Any, name: str = "trace") -> Trace:
    """Check a trace that was read as plain data; UsageError says everything that is wrong with it."""
    data, is_newer = _for_this_version(data, name)
    try:
        trace = _ADAPTER.validate_python(data)
    except ValidationError as error:
        problems = [_problem(one) for one in error.errors(include_url=False) if not (is_newer and _is_unknown_key(one))]
        if problems:
            raise UsageError(f"{name}: {len(problems)} problems:\n  " + "\n  ".join(problems[:20])) from None
        trace = _ADAPTER.validate_python(_without_unknown(data, error))
    _check_chains(trace, name)
    return trace


def _for_this_version(data: Any, name: str) -> tuple[Any, bool]:
    if not isinstance(data, dict) or not isinstance(data.get("version"), str):
        raise UsageError(f'{name}: expected an object with "version": "{VERSION[0]}.{VERSION[1]}"')
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", data["version"])
    if match is None or int(match[1]) != VERSION[0]:
        raise UsageError(f"{name}: version is {data['version'][:40]!r}; this program reads {VERSION[0]}.x")
    return data, int(match[2]) > VERSION[1]


def _is_unknown_key(problem: ErrorDetails) -> bool:
    return problem["type"] == "extra_forbidden"


def _without_unknown(data: Any, error: ValidationError) -> Any:
    """Return a copy without the keys that a newer minor version added."""
    copy = json.loads(json.dumps(data))
    for problem in error.errors(include_url=False):
        *parents, last = problem["loc"]
        place = copy
        for part in parents:
            place = place[part]
        del place[last]
    return copy


def _problem(problem: ErrorDetails) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    got = repr(problem["input"])
    return f"{path}: {problem['msg']}, got {got if len(got) < 80 else got[:77] + '...'}"


def _check_chains(trace: Trace, name: str) -> None:
    for position, row in enumerate(trace.lookups):
        if row.chain and row.chain[0] != (row.module, row.func):
            raise UsageError(f"{name}: lookups[{position}]: its chain begins with {row.chain[0]}, not with its own key")
