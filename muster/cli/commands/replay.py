"""``muster replay``: judge the trace of any engine."""

from pathlib import Path
from typing import Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.registry.errors import UsageError

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, as JSON; - reads standard input.")]
TraceTarget = Annotated[
    str | None, typer.Option("--target", help="The trace's own target; any other is an error.", show_default=False)
]


def replay(
    trace: TraceFile,
    target: TraceTarget = None,
    manifest: options.Manifest = None,
    manifests: options.Manifests = None,
    profile: options.Profile = options.ProfileName.SERVE,
    stage: options.Stage = None,
    as_of: options.AsOf = None,
    expect_set_hash: options.ExpectSetHash = None,
    dangerously_allow_unresolved: options.Allow = None,
    format: options.AnyFormat = options.ReportFormat.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Judge the trace of a boot, from any engine.

    The rules are those of a live boot. Levers and plugins are the trace's.

    Exit code: 0 passed, 1 refused, 2 usage or an unreadable trace, 3 an incomplete boot ("complete": false).
    """
    allowed = options.split_commas(dangerously_allow_unresolved, "--dangerously-allow-unresolved")
    as_of_date, set_hash = options.parse_date(as_of), options.parse_set_hash(expect_set_hash)
    if manifest is not None and manifests:
        raise UsageError("--manifests chooses among manifests: it does not go with --manifest")
    from kernel_muster._version import __version__
    from kernel_muster.audit.replay.replay import replay as judge_trace
    from kernel_muster.audit.replay.trace import read_trace
    from kernel_muster.audit.reporting import log_finished
    from kernel_muster.cli.booting import audit_options
    from kernel_muster.cli.process.logs import configured_logs
    from kernel_muster.cli.process.output import check_writable
    from kernel_muster.cli.reports import show_report
    from kernel_muster.MODEL_toml import manifest_folder
    from kernel_muster.models.levers import MODEL_LEVERS

    asked = audit_options(
        profile=profile.value,
        stage=stage.value if stage else None,
        as_of=as_of_date,
        set_hash=set_hash,
        allowed=allowed,
    )
    check_writable(output)
    read = read_trace(trace)
    if target is not None and target != read.target.arch:
        raise UsageError(f"--target is {target}, but the trace was made on {read.target.arch}")
    with configured_logs(verbose=verbose):
        report = judge_trace(
            read,
            asked,
            manifest=manifest,
            manifest_folders=manifests or [manifest_folder()],
            declared=MODEL_LEVERS,
            muster_version=__version__,
        )
        log_finished(report)
    return show_report(report, format, output, verbose=verbose)
