"""Write a boot as a trace."""

from typing import Any

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.replay.trace_model import (
    VERSION,
    Trace,
    TraceFinding,
    TraceKernel,
    TraceLateRegistration,
    TraceLayout,
    TraceLever,
    TraceLookup,
    TracePlugin,
    TraceRequest,
    TraceTarget,
    TraceTuning,
)
from kernel_muster.audit.tuning.facts import TuningFacts
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.findings import CODES, Finding
from kernel_muster.registry.levers import CORE_LEVERS, Lever
from kernel_muster.registry.selection.records import LookupEntry


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
        requests=[
            TraceRequest(lever=r.lever, why=r.why, layer=r.layer, site=r.site, lacks=r.lacks) for r in evidence.requests
        ],
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
        backend=spec.backend_name,
        source_sha256=evidence.source_digest(registered),
        host_sha256=evidence.host_digest(registered),
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
        needed_by=finding.needed_by,
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
