"""``muster audit``: the roll call of one model."""

import json
from pathlib import Path
from typing import Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.cli.process.exits import complain, complain_traceback, describe
from kernel_muster.registry.errors import UsageError

TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Write a trace for muster replay to this file.", show_default=False)
]


def audit(
    model: options.Model = None,
    target: options.Target = None,
    manifest: options.Manifest = None,
    config: options.Config = None,
    ref: options.Reference = None,
    manifests: options.Manifests = None,
    quant: options.Quant = None,
    profile: options.Profile = options.ProfileName.SERVE,
    stage: options.Stage = None,
    as_of: options.AsOf = None,
    expect_set_hash: options.ExpectSetHash = None,
    dangerously_allow_unresolved: options.Allow = None,
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    trace: TraceFile = None,
    format: options.AnyFormat = options.ReportFormat.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Audit the boot of a model: every kernel must be present, or the boot is refused.

    Exit code: 0 passed, 1 refused, 2 usage or an unreadable file, 3 internal error or a failed builder.
    """
    if model is None and manifest is None and config is None:
        raise UsageError("name a MODEL, or give --manifest or --config; muster models lists the models")
    allowed = options.split_commas(dangerously_allow_unresolved, "--dangerously-allow-unresolved")
    as_of_date, set_hash = options.parse_date(as_of), options.parse_set_hash(expect_set_hash)
    from kernel_muster.cli.booting import audit_options, request_of, run_audit
    from kernel_muster.cli.process.logs import configured_logs
    from kernel_muster.cli.process.output import check_writable, write_file
    from kernel_muster.cli.process.progress import shown_progress
    from kernel_muster.cli.reports import show_report

    asked = audit_options(
        profile=profile.value,
        stage=stage.value if stage else None,
        as_of=as_of_date,
        set_hash=set_hash,
        allowed=allowed,
    )
    request = request_of(
        model=model,
        manifest=manifest,
        config=config,
        reference=ref,
        manifests=manifests,
        target=target,
        quant=quant.value if quant else None,
        plugins=plugin,
        no_plugins=no_plugin,
    )
    if output is not None and trace is not None and output.resolve() == trace.resolve():
        raise UsageError(f"--output and --trace both name {output}: one would overwrite the other")
    for path in (output, trace):
        check_writable(path)
    with configured_logs(verbose=verbose), shown_progress() as progress:
        audited = run_audit(request, asked, wants_trace=trace is not None, progress=progress)
    if audited.trace is not None and trace is not None:
        write_file(trace, json.dumps(audited.trace, indent=1))
    elif trace is not None:
        complain("no trace was written: the boot was refused before any kernel was asked for")
    code = show_report(audited.report, format, output, verbose=verbose)
    if audited.untold is not None:
        complain(f"the model's builder failed: {describe(audited.untold)}")
    if audited.failure is not None:
        complain_traceback(audited.failure, verbose)
    return code
