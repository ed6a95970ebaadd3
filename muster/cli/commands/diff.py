"""``muster diff``: two reports compared."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.cli.process.exits import PASSED, REFUSED

Before = Annotated[Path, typer.Argument(metavar="A.json", help="A JSON report.", exists=True, dir_okay=False)]
After = Annotated[Path, typer.Argument(metavar="B.json", help="A second JSON report.", exists=True, dir_okay=False)]


def diff(
    before: Before,
    after: After,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Compare two JSON reports.

    They may come from two releases, machines or ranks. Dates, paths and dispatch sites are ignored.

    Exit code: 0 equal, 1 different, 2 not two reports.
    """
    from kernel_muster.audit.diff import compare, render_diff
    from kernel_muster.audit.render.json_report import read_report
    from kernel_muster.cli.process.output import check_writable, say, write_file

    check_writable(output)
    difference = compare(read_report(before), read_report(after))
    text = json.dumps(asdict(difference), indent=1) if format is options.Format.JSON else render_diff(difference)
    if output is None:
        say(text)
    else:
        write_file(output, text)
    return PASSED if difference.equal else REFUSED
