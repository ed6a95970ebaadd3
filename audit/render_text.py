"""The text report."""

from kernel_muster.audit.report import Report


def render_text(report: Report) -> str:
    """Return the report as plain text."""
    return "\n".join(f"{f.code} {f.subject}: {f.why}" for f in report.findings)
