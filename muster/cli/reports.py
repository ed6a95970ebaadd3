"""Output of a report: on a terminal, as text, JSON or Markdown, on stdout or in a file."""

import io
import os
from pathlib import Path

from kernel_muster.audit.render.plain import ascii_only
from kernel_muster.audit.render.sections import headline
from kernel_muster.audit.report import Report
from kernel_muster.cli.options import ReportFormat
from kernel_muster.cli.process.exits import INTERNAL, PASSED, REFUSED
from kernel_muster.cli.process.output import say, write_file
from kernel_muster.cli.process.results import columns, encoding, is_terminal


def show_report(report: Report, format: ReportFormat, output: Path | None, *, verbose: bool) -> int:
    """Write a report and return its exit code. An incomplete boot has not passed."""
    if output is not None:
        write_file(output, rendered(report, format, verbose=verbose))
        path = str(output).replace("\n", "\\n")
        say(ascii_only(f"{headline(report)}\nreport: {path}"))
    elif format is ReportFormat.TEXT and is_terminal():
        say(_coloured(report, verbose=verbose))
    else:
        say(rendered(report, format, verbose=verbose))
    return {"passed": PASSED, "refused": REFUSED, "incomplete": INTERNAL}[report.verdict]


def rendered(report: Report, format: ReportFormat, *, verbose: bool) -> str:
    """Return a report in one of the formats for files."""
    if format is ReportFormat.JSON:
        from kernel_muster.audit.render.json_report import render_json

        return render_json(report)
    if format is ReportFormat.MARKDOWN:
        from kernel_muster.audit.render.markdown import render_markdown

        return render_markdown(report, verbose=verbose)
    from kernel_muster.audit.render.text import render_text

    return render_text(report, verbose=verbose)


def _coloured(report: Report, *, verbose: bool) -> str:
    from kernel_muster.audit.render.terminal import print_report

    stream = TerminalText()
    print_report(report, stream, verbose=verbose)
    return stream.getvalue()


class TerminalText(io.StringIO):
    """Text for the terminal, collected first and written in one place."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The terminal's encoding, which decides about box characters."""
        return encoding()

    @property
    def columns(self) -> int | None:
        """The terminal's width, unless the environment sets another."""
        return None if os.environ.get("COLUMNS") else columns()

    def isatty(self) -> bool:
        """True: colour is wanted."""
        return True
