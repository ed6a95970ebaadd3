"""``muster boot``: the audit of a model, then a short decode."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kernel_muster.cli import options
from kernel_muster.cli.process.exits import INTERNAL, PASSED, REFUSED, complain, complain_traceback, describe
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import CPU

if TYPE_CHECKING:
    from kernel_muster.ab.booted import ArmRefused
    from kernel_muster.ab.short_decode import ShortDecode
    from kernel_muster.audit.opening import BootRequest
    from kernel_muster.audit.report import Report

#: 1.2: lookups of a decode (``late``). 1.3: constant logits (``is_flat``), unread tensors of a checkpoint (``unused``).
SCHEMA, VERSION = "kernel-muster/boot", "1.3"

Sequences = Annotated[int, typer.Option(min=1, max=128, help="Sequences decoded together.")]
Tokens = Annotated[int, typer.Option(min=1, max=4096, help="New tokens of each sequence.")]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", metavar="TEXT|FILE",
        help="A text (its bytes are its tokens), a file with one a line, or a .json file of texts or lists of ids; "
        "repeatable. Default: made from the seed.", show_default=False,
    ),
]  # fmt: skip
Weights = Annotated[
    Path | None,
    typer.Option(help="A checkpoint's folder. Default: random weights from the seed.", show_default=False),
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of weights and prompts.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Number of layers to decode with.", show_default=False)]
IsReduced = Annotated[
    bool | None,
    typer.Option("--reduced/--full", help="Decode at reduced size: one round of the layer pattern with narrow layers; "
                 "default on cpu. The audit always covers the whole model.", show_default=False),
]  # fmt: skip


def boot(
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
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    sequences: Sequences = 2,
    tokens: Tokens = 8,
    prompt: PromptsOption = None,
    weights: Weights = None,
    seed: Seed = 0,
    reduced: IsReduced = None,
    layers: Layers = None,
    format: options.AnyFormat = options.ReportFormat.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Audit a model like muster audit, then decode some tokens with it.

    On cpu the decode uses a model of reduced size, and the output names that size.

    Exit code: 0 passed and decoded, 1 refused or not decoded, 2 usage, 3 internal error or a failed builder.
    """
    if model is None and manifest is None and config is None:
        raise UsageError("name a MODEL, or give --manifest or --config; muster models lists the models")
    for option, names in (("--plugin", plugin), ("--no-plugin", no_plugin)):
        options.check_not_empty(names, option)
    as_of_date, set_hash = options.parse_date(as_of), options.parse_set_hash(expect_set_hash)
    if target is not None and target.startswith("sm_"):
        raise UsageError(f"--target {target}: nothing decodes on an architecture alone; muster audit takes it")
    from kernel_muster.ab.booted import ArmRefused, Building
    from kernel_muster.ab.decoding.prompts import check_count, longest_prompt
    from kernel_muster.ab.decoding.sizes import DEVICE, HOST, sizing
    from kernel_muster.ab.short_decode import short_decode
    from kernel_muster.cli.booting import audit_options, request_of, run_audit
    from kernel_muster.cli.process.logs import configured_logs
    from kernel_muster.cli.process.output import check_writable, only_results_on_stdout
    from kernel_muster.cli.process.progress import shown_progress
    from kernel_muster.cli.remedies import fitted

    asked = audit_options(
        profile=profile.value, stage=stage.value if stage else None, as_of=as_of_date, set_hash=set_hash, allowed=(),
    )  # fmt: skip
    request: BootRequest = request_of(
        model=model, manifest=manifest, config=config, reference=ref, manifests=manifests, target=target,
        quant=quant.value if quant else None, plugins=plugin, no_plugins=no_plugin, weights=weights,
    )  # fmt: skip
    is_reduced = reduced if reduced is not None else target == CPU and weights is None
    limits = HOST if target == CPU else DEVICE
    whole = longest_prompt(prompt or ()) + tokens
    building = Building(
        sized=sizing(is_reduced=is_reduced, layers=layers, limits=limits), folder=weights, seed=seed,
        sequences=sequences, context=whole, reads=whole - 1, stage="loaded", profile=profile.value, as_of=as_of_date,
    )  # fmt: skip
    check_count(prompt or (), sequences)
    check_writable(output)
    found: ShortDecode | ArmRefused | None = None
    with configured_logs(verbose=verbose), shown_progress() as progress:
        audited = run_audit(request, asked, progress=progress)
        audited, failure = replace(audited, report=fitted(audited.report, "decode")), audited.untold
        if audited.report.passed:
            try:
                with only_results_on_stdout():
                    found = short_decode(request, building, tokens, prompt or ())
            except ArmRefused as error:
                found, failure = error, error.failure
    _show(audited.report, found, format, output, verbose=verbose)
    if failure is not None:
        complain(f"the model's builder failed: {describe(failure)}")
        complain_traceback(failure, verbose)
    elif isinstance(found, ArmRefused) and found.__cause__ is not None:
        complain_traceback(found.__cause__, verbose)
    return _code(audited.report, found)


def _code(report: "Report", found: "ShortDecode | ArmRefused | None") -> int:
    if found is None:
        return REFUSED if report.is_refused else INTERNAL
    if getattr(found, "failure", None) is not None:
        return INTERNAL
    return PASSED if getattr(found, "has_computed", False) else REFUSED


def _headline(report: "Report", found: "ShortDecode | ArmRefused | None") -> str:
    from kernel_muster.ab.short_decode import ShortDecode
    from kernel_muster.audit.render.sections import headline

    first = headline(_whole(report, found))
    if found is None:
        return first
    if isinstance(found, ShortDecode) and found.has_computed:
        size = " at reduced size" if found.size else ""
        return f"{first}; decoded {found.sequences} x {len(found.tokens[0])} tokens{size}"
    _, subject, rest = first.split(": ", 2)
    if getattr(found, "failure", None) is not None:
        return f"INCOMPLETE: {subject}: the model was not built with weights; its audit passed: {rest}"
    return f"REFUSED: {subject}: {_undecoded(found)}; its audit passed: {rest}"


def _whole(report: "Report", found: "ShortDecode | ArmRefused | None") -> "Report":
    """Return the audit's report with the decode's findings, so one place counts all."""
    from kernel_muster.ab.short_decode import ShortDecode
    from kernel_muster.audit.later import with_rows

    if isinstance(found, ShortDecode):
        return with_rows(report, found.late)
    if found is None:
        return report
    return with_rows(report, [row for row in found.report.findings if row not in report.findings])


def _undecoded(found: "ShortDecode | ArmRefused") -> str:
    """Return the reason for a missing decode: a failed run, or a kernel missed outside the audit."""
    late = [row for row in getattr(getattr(found, "report", None), "findings", ()) if row.code == "LATE_MISS"]
    return "a kernel was missing while it decoded" if late else "the model did not decode"


def _show(
    report: "Report", found: "ShortDecode | ArmRefused | None", format: options.ReportFormat, output: Path | None, *,
    verbose: bool,
) -> None:  # fmt: skip
    from kernel_muster.cli.sections import deliver, rendered, wants_colour

    first = _headline(report, found)
    if format is options.ReportFormat.JSON:
        text = json.dumps(_document(report, found), indent=1)
    else:
        parts, coloured = _sections(report, found, verbose=verbose), wants_colour(format, output)
        text = rendered(first, parts, format, coloured=coloured, is_good=_code(report, found) == PASSED)
    deliver(text, first, output)


def _sections(report: "Report", found: "ShortDecode | ArmRefused | None", *, verbose: bool) -> Any:
    """Yield the decode, then its findings and the audit's, then the rest of the report."""
    from kernel_muster.ab.short_decode import ShortDecode
    from kernel_muster.audit.render.plain import plural
    from kernel_muster.audit.render.sections import Section, sections

    if isinstance(found, ShortDecode):
        yield Section("Decode", "" if found.has_computed else "refuse", lines=tuple(found.lines()))
        if found.unused:
            title = f"Checkpoint: {plural(len(found.unused), 'tensor')} that the model did not ask for"
            yield Section(title, "note", lines=tuple(found.unused_lines()))
    elif found is not None:
        yield Section(f"Decode: {_undecoded(found)}", "refuse", lines=(found.why,) if found.why else ())
    yield from sections(_whole(report, found), verbose=verbose)


def _document(report: "Report", found: "ShortDecode | ArmRefused | None") -> dict[str, Any]:
    from kernel_muster.ab.short_decode import ShortDecode
    from kernel_muster.audit.render.json_report import render_json

    decode: dict[str, Any] | None = None
    if isinstance(found, ShortDecode):
        decode = asdict(found)
    elif found is not None:
        failed = found.failure is not None
        decode = {"refused": found.why, "failed": failed, "report": json.loads(render_json(found.report))}
    return {"schema": SCHEMA, "version": VERSION, "report": json.loads(render_json(report)), "decode": decode}
