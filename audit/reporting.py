"""From evidence and verdict to a report."""

from collections.abc import Callable

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.report import (
    Counts,
    FindingRow,
    KernelRow,
    LayoutRow,
    LeverRow,
    Outcome,
    PluginReportRow,
    Report,
    WaiverRow,
)
from kernel_muster.audit.sethash import set_hash
from kernel_muster.audit.stages import is_below, reached_stage, stage_of
from kernel_muster.audit.tuning.assumed import assumption
from kernel_muster.audit.verdict import Judged, Verdict
from kernel_muster.registry.contract.layouts import LayoutPlan
from kernel_muster.registry.findings import CODES, Profile, Severity
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.levers import Levers, Setting
from kernel_muster.registry.logs import logger
from kernel_muster.registry.paths import without_home
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.records import LookupRow


def full_report(evidence: Evidence, verdict: Verdict, muster_version: str, layouts: LayoutPlan | None = None) -> Report:
    """Report a boot that had a model and a target."""
    kernels = tuple(_kernel(evidence, row) for row in evidence.rows)
    excused = sorted(
        {key for key in evidence.asked_keys if evidence.decide(key).chosen is None and evidence.excuse(key)}
    )
    device = evidence.target.device
    arch = str(evidence.target.arch or CPU)
    reached = reached_stage(evidence)
    return Report(
        muster_version=muster_version,
        verdict="refused" if verdict.is_refused else "passed" if evidence.is_complete else "incomplete",
        degraded=verdict.is_degraded,
        complete=evidence.is_complete,
        replayed=evidence.is_replay,
        model=evidence.manifest.name,
        manifest=without_home(evidence.manifest.path),
        target=evidence.target.name,
        arch=arch,
        device=device.name if device else "",
        quant=evidence.quant,
        profile=evidence.options.profile,
        stage_asked=evidence.options.stage or "",
        stage_reached=reached,
        as_of=evidence.as_of.isoformat(),
        set_hash=set_hash(evidence),
        counts=_counts(verdict, sum(row.count for row in evidence.rows), len(evidence.asked_keys), len(excused)),
        findings=tuple(finding_row(judged) for judged in verdict.findings),
        kernels=kernels,
        waivers=tuple(
            WaiverRow(key=str(w.key), reason=w.reason, where=w.where, until=w.until.isoformat() if w.until else "")
            for w in map(evidence.waivers.__getitem__, excused)
        ),
        levers=lever_rows(evidence.levers, _assumption(evidence)),
        plugins=plugin_rows(evidence.catalog),
        layouts=_layouts(layouts),
        below_stage_asked=is_below(evidence.options.stage, reached),
        failure=evidence.failure,
        failure_reported=evidence.is_failure_reported,
        builder=", ".join(builder.name for builder in evidence.builders),
        maturity=", ".join(builder.maturity_on(arch) for builder in evidence.builders),
        recorded_run=", ".join(filter(None, (builder.run_on(arch) for builder in evidence.builders))),
    )


def opening_report(
    verdict: Verdict,
    muster_version: str,
    *,
    catalog: Catalog,
    levers: Levers,
    model: str,
    target: str,
    profile: Profile,
    as_of: str,
    manifest: str = "",
) -> Report:
    """Report a boot that was refused before its model could be built."""
    return Report(
        muster_version=muster_version,
        verdict="refused",
        degraded=False,
        complete=False,
        model=model,
        manifest=manifest,
        target=target,
        arch="",
        device="",
        quant="",
        profile=profile,
        stage_asked="",
        stage_reached="",
        as_of=as_of,
        set_hash="",
        counts=_counts(verdict, 0, 0, 0),
        findings=tuple(finding_row(judged) for judged in verdict.findings),
        levers=lever_rows(levers),
        plugins=plugin_rows(catalog),
    )


def _counts(verdict: Verdict, lookups: int, keys: int, waived: int) -> Counts:
    def count(severity: Severity) -> int:
        return sum(j.severity is severity and not j.is_allowed for j in verdict.findings)

    return Counts(
        refusing=count(Severity.REFUSE),
        warnings=count(Severity.WARN),
        notes=count(Severity.NOTE),
        allowed=sum(j.is_allowed for j in verdict.findings),
        lookups=lookups,
        keys=keys,
        waived=waived,
    )


def finding_row(judged: Judged) -> FindingRow:
    """Return a judged finding as a report row."""
    finding = judged.finding
    return FindingRow(
        code=finding.code,
        severity=judged.severity.value,
        allowed=judged.is_allowed,
        subject=finding.subject,
        title=CODES[finding.code].title,
        why=finding.why,
        template=finding.template,
        parameters=finding.parameters,
        cause=finding.cause,
        lacks=finding.lacks,
        needed_by=finding.needed_by,
        where=tuple(filter(None, finding.where)),  # a trace need not say where
        layers=finding.layers,
        remedies=finding.remedies,
        explains=finding.explains,
        log=finding.log,
    )


def _kernel(evidence: Evidence, row: LookupRow) -> KernelRow:
    tried = [evidence.decide(key) for key in evidence.evaluated(row)]
    last = tried[-1]
    chosen = last.chosen
    if chosen is not None:
        outcome: Outcome = "found" if len(tried) == 1 else "fallback"
    else:
        outcome = "waived" if all(evidence.excuse(d.key) for d in tried) else "absent"
    return KernelRow(
        key=str(row.key),
        chain=tuple(map(str, row.members)) if row.is_chain else (),
        kind=row.kind,
        outcome=outcome,
        served_by=str(last.key) if chosen else "",
        distribution=chosen.provider.distribution if chosen else "",
        version=chosen.provider.version if chosen else "",
        tier=chosen.spec.tier if chosen else "",
        backend=chosen.spec.backend_name if chosen else "",
        archs=chosen.spec.archs if chosen else (),
        contract=chosen.spec.contract if chosen else "",
        stage=stage_of(last.key, evidence) if chosen else "",
        reason="" if chosen else tried[0].reason,
        when=row.when,
        sites=row.sites,
        layers=tuple(row.layers),
        reached_by=row.reached_by,
    )


def _assumption(evidence: Evidence) -> Callable[[Setting], bool]:
    target = None if evidence.is_replay else evidence.target  # a trace does not name the device
    return assumption(target, evidence.selector, evidence.source_digest)


def lever_rows(
    levers: Levers, is_assumed: Callable[[Setting], bool] = lambda setting: False
) -> tuple[LeverRow, ...]:  # fmt: skip
    """Return the levers of a boot as report rows; ``is_assumed`` knows whose built-in value nobody measured there."""
    return tuple(lever_row(setting, is_assumed=is_assumed(setting)) for setting in levers.settings)


def _shown(setting: Setting) -> bool | int | str | None:
    """Return the value as a report shows it: a folder without the user's home."""
    value = setting.value
    return without_home(value) if setting.lever.name == "MUSTER_CACHE_DIR" and isinstance(value, str) else value


def lever_row(setting: Setting, *, is_assumed: bool = False) -> LeverRow:
    """Return one lever of a boot as a report row."""
    return LeverRow(
        name=setting.lever.name,
        value=_shown(setting),
        origin=setting.origin,
        effect=setting.effect,
        evidence=setting.evidence,
        diagnostic=setting.lever.diagnostic,
        keys=setting.lever.keys,
        assumed=is_assumed,
    )


def plugin_rows(catalog: Catalog) -> tuple[PluginReportRow, ...]:
    """Return all plugins, loaded or not, as report rows."""
    return tuple(
        PluginReportRow(
            name=row.name,
            distribution=row.distribution,
            version=row.version,
            status=row.status,
            hooks=row.hooks,
            kernels=len(row.keys),
            notes=row.notes,
        )
        for row in catalog.plugins
    )


def _layouts(plan: LayoutPlan | None) -> tuple[LayoutRow, ...]:
    if plan is None:
        return ()
    return tuple(
        LayoutRow(
            weight=copy.weight,
            layout=copy.layout,
            size_bytes=copy.size_bytes,
            reason=copy.reason,
            readers=tuple(sorted(map(str, copy.readers))),
            condition=copy.condition,
        )
        for copy in plan.copies
    )


def log_finished(report: Report) -> None:
    """Log the one wide event of a boot, and its warnings: a boot that passes raises no exception."""
    event = {
        "verdict": report.verdict,
        "degraded": report.degraded,
        "model": report.model,
        "target": report.target,
        "arch": report.arch,
        "quant": report.quant,
        "profile": report.profile,
        "stage": report.stage_reached,
        "lookups": report.counts.lookups,
        "keys": report.counts.keys,
        "refusing": report.counts.refusing,
        "warnings": report.counts.warnings,
        "waived": report.counts.waived,
        "codes": sorted({finding.code for finding in report.findings}),
        "set_hash": report.set_hash,
    }
    logger().info("audit.finished", **event)
    for row in report.findings:
        if row.severity == "warn":
            text = f"{row.code} {row.subject}: {row.why}"
            logger().warning(text, code=row.code, subject=row.subject, model=report.model, target=report.target)
