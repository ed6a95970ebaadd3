"""Replay: judge a trace, of any engine, by the same rules as a live boot."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from kernel_muster.audit.evidence import AuditOptions, Evidence
from kernel_muster.audit.opening import BootRequest, find_manifest, is_of
from kernel_muster.audit.replay.engine_levers import engine_levers, with_engines
from kernel_muster.audit.replay.replay_words import for_engine, is_own, of_unknown_models
from kernel_muster.audit.replay.trace_model import (
    Trace,
    TraceFinding,
    TraceKernel,
    TraceLayout,
    TraceLookup,
    TracePlugin,
    TraceRequest,
)
from kernel_muster.audit.replay.traced_tuning import contradictions, tuned_values
from kernel_muster.audit.report import Report
from kernel_muster.audit.reporting import full_report, opening_report
from kernel_muster.audit.rules.levers import QUANT, list_levers, with_lines
from kernel_muster.audit.tuning.facts import TuningFacts
from kernel_muster.audit.verdict import judge, judge_boot
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.contract.layouts import WeightCopy
from kernel_muster.registry.contract.specs import KernelSpec, Provider, Registered
from kernel_muster.registry.discovery.cross_checks import Rejected, check_alias_claims, check_overrides
from kernel_muster.registry.distributions import normal_name
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import CODES, Finding, Severity
from kernel_muster.registry.hardware.arch import CPU, parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.keys import KernelKey, parse_key
from kernel_muster.registry.levers import CORE_LEVERS, PREFIX, Lever, Origin, read_levers
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.selection.catalog import Catalog, PluginRow
from kernel_muster.registry.selection.records import FailedRequest, LateRegistration, LookupEntry
from kernel_muster.registry.values import frozen

_WORD = re.compile(r"[\w.+-]+")


@frozen
class TracedKernel:
    """The backend of a kernel that is known from a trace alone: it cannot run."""

    name: str
    source_sha256: str
    host_sha256: str


def replay(
    trace: Trace,
    options: AuditOptions,
    *,
    manifest: str | Path | None,
    manifest_folders: Iterable[Path] = (),
    declared: Iterable[Lever] = CORE_LEVERS,
    muster_version: str = "",
) -> Report:
    """Judge a trace against a manifest (None: the one its ``model`` names) and report.

    ``declared`` are the levers that this program knows; the trace adds those of its own engine. UsageError if the
    manifest is of another model than the trace.
    """
    as_of = options.as_of or datetime.now(UTC).date()
    known, malformed = _declared(trace, declared)
    catalog = replace(_catalog(trace), levers=known)
    target = _target(trace)
    named = trace.model or None if manifest is None else None  # of a file that was named, the words below are a trace's
    boot_request = BootRequest(model=named, manifest=manifest, manifest_folders=tuple(manifest_folders))
    found, manifest_findings = find_manifest(boot_request, catalog)
    if found is not None and trace.model and not is_of(found, trace.model):
        raise UsageError(f"the trace is of {trace.model!a}, but {found.path} describes {found.name!r}")
    levers, lever_findings = read_levers(catalog.levers, _lever_sources(trace, catalog, found))
    lever_findings += list_levers(levers, catalog.key_names)
    lever_findings = with_lines(lever_findings, found, "levers of the trace")
    lever_findings += malformed + contradictions(trace, catalog.levers)
    opening = (*catalog.findings, *of_unknown_models(manifest_findings), *lever_findings)
    if found is None:
        # Manifests come with no trace: a plugin of it that failed does not explain that there is none.
        verdict = judge(opening, options.profile)
        return opening_report(
            verdict if is_own(trace) else for_engine(verdict),
            muster_version,
            catalog=catalog,
            levers=levers,
            model=trace.model,
            target=target.name,
            profile=options.profile,
            as_of=as_of.isoformat(),
        )
    entries = _entries(trace.lookups)
    evidence = Evidence(
        catalog,
        target,
        levers,
        found,
        trace.target.quant or found.quant,
        as_of,
        tuple(entry for entry in entries if entry.phase == "boot"),
        tuple(entry for entry in entries if entry.phase == "late"),
        (*map(_request, trace.requests), *_quant_request(trace, found)),
        tuple(LateRegistration(r.plugin, r.site) for r in trace.late_registrations),
        tuple(_layout(copy) for copy in trace.missing_layouts),
        options=options,
        opening=opening,
        is_complete=trace.complete,
        is_replay=True,
        tuning=_tuning(trace),
    )
    verdict = judge_boot(evidence)
    return full_report(evidence, verdict if is_own(trace) else for_engine(verdict), muster_version)


def _declared(trace: Trace, declared: Iterable[Lever]) -> tuple[tuple[Lever, ...], list[Finding]]:
    """Return the levers of this program and of the traced engine (of one declared by both, the engine's).

    Where a threshold was measured says nothing about an engine that does not have the lever.
    """
    known = (lever if lever.name in trace.levers else replace(lever, evidence="", measured=()) for lever in declared)
    own, findings = engine_levers(trace.declared_levers, "the trace")
    return with_engines(known, own), findings


def _lever_sources(
    trace: Trace, catalog: Catalog, manifest: Manifest | None
) -> list[tuple[Origin, Mapping[str, object]]]:
    """Return what the trace sets, then the manifest's defaults where the trace is silent.

    A trace gives the values in force; one that is its lever's default was not set on purpose. An engine's own names,
    which nobody declares and no prefix claims, are carried and say nothing here.
    """
    declared = {lever.name for lever in catalog.levers}
    default = {lever.name: lever.default for lever in catalog.levers}
    ours = {n: v for n, v in trace.levers.items() if n in declared or n.startswith(PREFIX)}
    table = tuned_values(trace, catalog.levers)
    given = {n: v for n, v in ours.items() if v is not None and repr(v) != repr(default.get(n)) and n not in table}
    defaults = {} if manifest is None else {n: v for n, v in manifest.defaults.items() if n not in trace.levers}
    return [("given", given), ("manifest", defaults), ("table", table)]


def _quant_request(trace: Trace, manifest: Manifest) -> tuple[FailedRequest, ...]:
    """As in a live boot; one of ours that was refused for its ``--quant`` says so itself."""
    quant = trace.target.quant
    if quant in ("", manifest.quant) or any(request.lever in ("--quant", "quant") for request in trace.requests):
        return ()
    why = f"the trace says {quant}, but the manifest describes a model of {manifest.quant}"
    return (FailedRequest(QUANT, why, "", manifest.where("model", "quant")),)


def _tuning(trace: Trace) -> TuningFacts | None:
    found = trace.tuning
    if found is None:
        return None
    return TuningFacts(found.table, found.levers, found.stale, found.uncovered, found.range)


def _target(trace: Trace) -> Target:
    arch = trace.target.arch
    return CPU_TARGET if arch == CPU else Target(arch, parse_arch(arch))


def _layout(copy: TraceLayout) -> WeightCopy:
    return WeightCopy(copy.weight, copy.layout, {KernelKey(*reader) for reader in copy.readers})


def _entries(rows: Iterable[TraceLookup]) -> list[LookupEntry]:
    known: dict[tuple[object, ...], tuple[KernelKey, ...]] = {}  # a trace asks for few keys, very often
    entries = []
    for row in rows:
        asked = row.chain or ((row.module, row.func),)
        members = known.get(asked)
        if members is None:
            members = known[asked] = tuple(KernelKey(*pair) for pair in asked)
        entries.append(
            LookupEntry(
                members, row.kind, row.requested_by, row.phase, row.when, row.site, row.layer, row.count, row.reached_by
            )
        )
    return entries


def _request(row: TraceRequest) -> FailedRequest:
    return FailedRequest(row.lever, row.why, row.layer, row.site, row.lacks)


def _finding(f: TraceFinding) -> Finding:
    return Finding(f.code, f.subject, f.why, f.where, f.remedies, log=f.log, explains=f.explains, needed_by=f.needed_by)


def _catalog(trace: Trace) -> Catalog:
    """Make the catalog that the traced boot had."""
    findings = [_finding(found) for found in trace.findings]
    findings += [finding for plugin in trace.plugins for finding in _plugin_findings(plugin)]
    named = _named_in(findings)
    findings += [_unexplained(plugin) for plugin in trace.plugins if _did_not_load(plugin) and plugin.name not in named]
    findings += map(_registers_nothing, _without_kernels(trace))
    every = [_registered(row, trace.target.arch) for row in trace.kernels]
    malformed = [finding for one in every if (finding := _malformed(one)) is not None]
    provided: dict[str, set[KernelKey]] = {}
    for one, row in zip(every, trace.kernels, strict=True):
        provided.setdefault(one.provider.plugin, set()).add(KernelKey(row.module, row.func))
    plugins = [_plugin_row(plugin, provided.get(plugin.name, set())) for plugin in trace.plugins]
    twice = _named_twice(plugins)
    findings += malformed + twice
    refused = {finding.subject for finding in (*malformed, *twice)}
    plugins = [replace(row, status="failed") if row.name in refused else row for row in plugins]
    plugins += _unlisted(every, refused - {row.name for row in plugins}, provided)
    # As in a live boot: what did not load provides nothing, and its keys say whose misses they are.
    absent = {row.name for row in plugins if row.status != "loaded"}
    kernels = [registered for registered in every if registered.provider.plugin not in absent]
    rejected = Rejected()
    sound = [(row, {"muster_kernels": specs}) for row, specs in _by_provider(kernels, plugins)]
    check_alias_claims(sound, rejected)
    check_overrides(sound, rejected, [(row, {}) for row in plugins if row.name in absent])
    return Catalog(tuple(plugins), tuple(kernels), findings=(*findings, *rejected.findings))


def _malformed(registered: Registered) -> Finding | None:
    spec, backend = registered.spec, registered.spec.backend
    if isinstance(backend, TracedKernel) and not backend.name:  # which a trace need not say
        spec = replace(spec, backend=replace(backend, name="unknown"))
    problems = spec.problems()
    if not problems:
        return None
    why = f"{registered.spec.key}: {'; '.join(problems)}"
    return Finding("BAD_SPEC", registered.provider.plugin, why, remedies=(message("remedy.correct_registration"),))


def _named_twice(plugins: Iterable[PluginRow]) -> list[Finding]:
    """Two plugins of one name that are both loaded; of others, what went wrong says why they are not."""
    named: dict[str, list[PluginRow]] = {}
    for row in plugins:
        if row.status == "loaded":
            named.setdefault(row.name, []).append(row)
    return [
        Finding(
            "PLUGIN_DUPLICATE",
            name,
            message("plugin_duplicate.trace", count=len(rows), plugin=name),
            tuple(dict.fromkeys(f"{row.distribution} {row.version}".strip() for row in rows)),
            (message("remedy.list_once"),),
        )
        for name, rows in named.items()
        if len(rows) > 1
    ]


def _unlisted(
    kernels: Iterable[Registered], names: set[str], provided: Mapping[str, set[KernelKey]]
) -> Iterable[PluginRow]:
    """Return rows for plugins that failed and that the trace does not list, with what they would have provided."""
    providers = {one.provider.plugin: one.provider for one in kernels if one.provider.plugin in names}
    for name, provider in sorted(providers.items()):
        keys = tuple(sorted(provided[name]))
        yield PluginRow(name, provider.distribution, provider.version, "failed", keys=keys)


def _registered(row: TraceKernel, arch: str) -> Registered:
    spec = KernelSpec(
        key=f"{row.module}::{row.func}",
        contract=row.contract,
        archs=(arch,) if row.archs is None else tuple(row.archs),
        backend=TracedKernel(row.backend, row.source_sha256, row.host_sha256),
        tier=row.tier,
        aliases=tuple(row.aliases),
        overrides=row.overrides,
        replaces_module=row.replaces_module,
        opt_in=row.opt_in,
    )
    return Registered(spec, Provider(row.plugin or row.distribution, row.distribution, row.version))


def _plugin_findings(plugin: TracePlugin) -> list[Finding]:
    errors = [plugin.error] if isinstance(plugin.error, str) else plugin.error or []
    found = []
    for error in errors:
        code, separator, why = error.partition(": ")
        known = separator and why and code in CODES and _is_error(code)
        found.append(
            Finding(
                code if known else "PLUGIN_LOAD_FAILED",
                plugin.name,
                why if known else error,
                (f"{plugin.distribution} {plugin.version}".strip(),),
                ("repair or reinstall the distribution",),
            )
        )
    return found


def _is_error(code: str) -> bool:
    """Whether a code says that a plugin failed, and not what others make of what it registered."""
    return CODES[code].group == "plugins" and (CODES[code].serve is Severity.REFUSE or code == "PLUGIN_EMPTY")


def _without_kernels(trace: Trace) -> Iterable[TracePlugin]:
    """Return the loaded plugins without a kernel in the trace, and without a finding.

    A trace of this program has the findings of its boot, and plugins that register models or levers alone. Where a
    kernel has neither plugin nor distribution, it may be any plugin's.
    """
    if is_own(trace) or any(not row.plugin and "distribution" not in row.model_fields_set for row in trace.kernels):
        return []
    plugins = {row.plugin for row in trace.kernels} | {finding.subject for finding in trace.findings}
    distributions = {normal_name(row.distribution) for row in trace.kernels if not row.plugin}
    return [
        plugin
        for plugin in trace.plugins
        if not plugin.error
        and plugin.status in (None, "loaded")
        and not plugin.keys
        and plugin.name not in plugins
        and normal_name(plugin.distribution) not in distributions
    ]


def _registers_nothing(plugin: TracePlugin) -> Finding:
    return Finding(
        "PLUGIN_EMPTY",
        plugin.name,
        message("plugin_empty.trace"),
        (f"{plugin.distribution} {plugin.version}".strip(),),
        (message("remedy.write_kernels"), message("remedy.load_without")),
    )


def _did_not_load(plugin: TracePlugin) -> bool:
    return plugin.status in ("failed", "mismatched")


def _named_in(findings: Iterable[Finding]) -> set[str]:
    """Return the words that findings which refuse are about, names of plugins among them."""
    refusing = (f for f in findings if f.severity("serve") is Severity.REFUSE)
    texts = [text for f in refusing for text in (f.subject, *f.where, *f.explains)]
    return {*texts, *(word.strip(".") for text in texts for word in _WORD.findall(text))}


def _unexplained(plugin: TracePlugin) -> Finding:
    return Finding(
        "API_MISMATCH" if plugin.status == "mismatched" else "PLUGIN_LOAD_FAILED",
        plugin.name,
        f"its status is {plugin.status}, and the trace does not say why",
        (f"{plugin.distribution} {plugin.version}".strip(),),
        ("repair or reinstall the distribution", "write the reason into the trace, as the plugin's error"),
    )


def _plugin_row(plugin: TracePlugin, provided: set[KernelKey]) -> PluginRow:
    keys = provided | {parse_key(text) for text in plugin.keys if _is_key(text)}
    status = plugin.status or ("failed" if plugin.error else "loaded")
    last = {parse_key(text) for text in plugin.last_keys if _is_key(text)}
    return PluginRow(
        plugin.name,
        plugin.distribution,
        plugin.version,
        status,
        plugin.value,
        keys=tuple(sorted(keys)),
        last_keys=tuple(sorted(last)),
    )


def _is_key(text: str) -> bool:
    try:
        return bool(parse_key(text))
    except ValueError:
        return False


def _by_provider(
    kernels: Iterable[Registered], plugins: Iterable[PluginRow]
) -> Iterable[tuple[PluginRow, list[KernelSpec]]]:
    """Group kernels by plugin; an engine that lists no plugins has one for each distribution."""
    rows = {row.name: row for row in plugins}
    groups: dict[Provider, list[KernelSpec]] = {}
    for registered in kernels:
        groups.setdefault(registered.provider, []).append(registered.spec)
    for provider, specs in groups.items():
        row = rows.get(provider.plugin) or PluginRow(provider.plugin, provider.distribution, provider.version, "loaded")
        yield row, specs
