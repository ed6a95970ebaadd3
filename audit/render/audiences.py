"""Reports in the words of an audience: each sentence is made again from its template and its values."""

from dataclasses import replace

from kernel_muster.audit.report import FindingRow, Report
from kernel_muster.registry.messages.audience import Audience
from kernel_muster.registry.messages.message import quoted
from kernel_muster.registry.messages.python import PYTHON


def for_audience(report: Report, audience: Audience) -> Report:
    """Return a report in the words of an audience; subjects and places stay."""
    return replace(report, findings=tuple(_row(row, audience) for row in report.findings))


def for_program(report: Report) -> Report:
    """Return a report whose findings name boot()'s parameters in the place of options."""
    return for_audience(report, PYTHON)


def _row(row: FindingRow, audience: Audience) -> FindingRow:
    remedies = tuple(quoted(remedy).for_audience(audience) for remedy in row.remedies)
    return replace(row, why=quoted(row.why).for_audience(audience), remedies=remedies)
