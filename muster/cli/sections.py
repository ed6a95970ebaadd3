"""Sections between a first and a last line, in any format but JSON, for ab and boot."""

from collections.abc import Iterable
from pathlib import Path

from kernel_muster.audit.render.plain import ascii_only
from kernel_muster.audit.render.sections import Section
from kernel_muster.cli.options import ReportFormat
from kernel_muster.cli.process.output import say, write_file
from kernel_muster.cli.process.results import is_terminal


def rendered(first: str, parts: Iterable[Section], format: ReportFormat, *, coloured: bool, is_good: bool) -> str:
    """Return sections between two verdicts, as Markdown, for a terminal, or as plain text."""
    if format is ReportFormat.MARKDOWN:
        from kernel_muster.audit.render.markdown import render_markdown_sections

        return render_markdown_sections(first, parts)
    if coloured:
        from kernel_muster.audit.render.terminal import print_sections
        from kernel_muster.cli.reports import TerminalText

        stream = TerminalText()
        print_sections(parts, stream, first, first, "bold green" if is_good else "bold red")
        return stream.getvalue()
    from kernel_muster.audit.render.text import render_sections

    return render_sections(parts, first, first)


def wants_colour(format: ReportFormat, output: Path | None) -> bool:
    """Whether the text goes to a terminal."""
    return format is ReportFormat.TEXT and output is None and is_terminal()


def deliver(text: str, first: str, output: Path | None) -> None:
    """Write the text to stdout, or to a file with the verdict alone on stdout."""
    if output is None:
        say(text)
    else:
        write_file(output, text)
        say(ascii_only(f"{first}\nreport: {output}"))
