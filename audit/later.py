"""What a model asked for after its boot: judged, and put into the report of a decode that may not go on."""

from collections.abc import Sequence
from dataclasses import replace

from kernel_muster.audit.report import FindingRow, Report
from kernel_muster.audit.reporting import finding_row
from kernel_muster.audit.session import BootSession
from kernel_muster.audit.verdict import Verdict, judge


def judged_late(session: BootSession) -> Verdict:
    """Judge what happened since the seal: a model may look up what no audit saw, and go on without it."""
    return judge(session.late_findings(), session.report.profile)


def late_rows(session: BootSession) -> tuple[FindingRow, ...]:
    """Return what happened since the seal as rows of a report."""
    return tuple(map(finding_row, judged_late(session).findings))


def with_rows(report: Report, rows: Sequence[FindingRow]) -> Report:
    """Return a report that tells and counts these findings too, before its own."""
    severities = [row.severity for row in rows]
    counts = replace(
        report.counts,
        refusing=report.counts.refusing + severities.count("refuse"),
        warnings=report.counts.warnings + severities.count("warn"),
        notes=report.counts.notes + severities.count("note"),
    )
    return replace(report, counts=counts, findings=(*rows, *report.findings))


def late_report(session: BootSession) -> Report:
    """Return the boot's report with what happened since the seal; refused if that refuses."""
    found = with_rows(session.report, late_rows(session))
    return replace(found, verdict="refused") if judged_late(session).is_refused else found
