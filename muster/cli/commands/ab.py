"""``muster ab``: two arms on the same models, prompts and weights."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kernel_muster.cli import options
from kernel_muster.cli.process.exits import INTERNAL, PASSED, REFUSED, complain, complain_traceback, describe
from kernel_muster.registry.errors import UsageError

if TYPE_CHECKING:
    from kernel_muster.ab.result import Comparison, ModelResult
    from kernel_muster.audit.report import Report

_MOST_SEQUENCES = 128
_LEVERS = {"metavar": "NAME=VALUE", "show_default": False}
_KEY = {"metavar": "KEY", "show_default": False}
_PLUGIN = {"metavar": "NAME", "show_default": False}

Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models, by name or Hugging Face id.")]
ArmA = Annotated[list[str] | None, typer.Option("--a", help="A lever of arm A, the reference; repeatable.", **_LEVERS)]
ArmB = Annotated[list[str] | None, typer.Option("--b", help="A lever of arm B; repeatable.", **_LEVERS)]
PluginA = Annotated[
    list[str] | None,
    typer.Option("--a-plugin", help="A plugin of arm A alone: required there, blocked in B.", **_PLUGIN),
]
PluginB = Annotated[
    list[str] | None,
    typer.Option("--b-plugin", help="A plugin of arm B alone: required there, blocked in A.", **_PLUGIN),
]
WithoutA = Annotated[
    list[str] | None,
    typer.Option("--a-without", help="A key removed from arm A: optional, or part of a chain; repeatable.", **_KEY),
]
WithoutB = Annotated[
    list[str] | None,
    typer.Option("--b-without", help="A key removed from arm B: a fused kernel against its parts.", **_KEY),
]
StageOption = Annotated[
    options.StageName | None,
    typer.Option("--stage", help="Stage that every kernel must reach in both arms; default: loaded.",
                 show_default=False),
]  # fmt: skip
Sequences = Annotated[
    str | None,
    typer.Option(metavar="C,...", help="Sequences decoded together: 1,4,8,16,32, on cpu 1,4,8.", show_default=False),
]
Tokens = Annotated[
    int | None,
    typer.Option(min=2, max=4096, help="New tokens of each sequence: 32, on cpu 16.", show_default=False),
]
PromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", metavar="TEXT|FILE",
        help="A text (its bytes are its tokens), a file with one a line, or a .json file of texts or lists of ids; "
        "repeatable. Default: made from the seed, one for each sequence.", show_default=False,
    ),
]  # fmt: skip
Repeats = Annotated[int, typer.Option(min=1, max=100, help="Pairs of timed runs. The order of A and B alternates.")]
Drafts = Annotated[
    int | None,
    typer.Option(min=0, max=15, help="Drafts of the MTP head in each step, in a separate run. 0 for none; default: 3 "
                 "with a head. The gate is pinned open.", show_default=False),
]  # fmt: skip
DrafterOption = Annotated[
    str | None,
    typer.Option("--drafter", metavar="MODEL", help="A block-diffusion drafter that replaces the model's MTP head. It "
                 "drafts in blocks of its own size.", show_default=False),
]  # fmt: skip
DrafterWeights = Annotated[
    Path | None, typer.Option(help="The drafter's checkpoint, beside --weights for the model's.", show_default=False)
]
Weights = Annotated[
    Path | None,
    typer.Option(help="A checkpoint's folder. Default: random weights from the seed.", show_default=False),
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of weights, prompts and rounding.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Number of layers, of full width.", show_default=False)]
IsReduced = Annotated[
    bool | None,
    typer.Option("--reduced/--full", help="One round of the layer pattern with narrow layers; default on cpu.",
                 show_default=False),
]  # fmt: skip
MaxKl = Annotated[
    float | None,
    typer.Option(min=0.0, help="Largest median KL of a sequence, in nats. Default: 4 times the measured effect on A of "
                 "rounding in the differing kernels.", show_default=False),
]  # fmt: skip
IdentityOption = Annotated[
    str,
    typer.Option("--identity", metavar="reference|always|off",
                 help="Bits of n = 1. reference: B keeps them if A does; always: both keep them; off: informs only."),
]  # fmt: skip
LeastVerify = Annotated[
    int, typer.Option("--least-verify-steps", min=0, help="Fewer verify steps give the verdict INCONCLUSIVE.")
]
LeastSpeed = Annotated[
    float | None,
    typer.Option(min=0.0, help="Least speed of B over A at every C. Default: speed only informs.",
                 show_default=False),
]  # fmt: skip
Advisory = Annotated[bool, typer.Option("--advisory", help="Print the verdict and exit 0.")]


def ab(
    models: Models,
    a: ArmA = None,
    b: ArmB = None,
    a_without: WithoutA = None,
    b_without: WithoutB = None,
    a_plugin: PluginA = None,
    b_plugin: PluginB = None,
    target: options.Target = None,
    manifests: options.Manifests = None,
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    stage: StageOption = None,
    sequences: Sequences = None,
    tokens: Tokens = None,
    prompt: PromptsOption = None,
    repeats: Repeats = 3,
    drafts: Drafts = None,
    drafter: DrafterOption = None,
    drafter_weights: DrafterWeights = None,
    weights: Weights = None,
    seed: Seed = 0,
    reduced: IsReduced = None,
    layers: Layers = None,
    max_kl: MaxKl = None,
    identity: IdentityOption = "reference",
    least_verify_steps: LeastVerify = 16,
    least_speed: LeastSpeed = None,
    advisory: Advisory = False,
    format: options.AnyFormat = options.ReportFormat.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Compare two arms (levers, plugins, kernels): same models, prompts and weights, interleaved.

    A is the reference. KL and bit identity decide. Coherence informs. On cpu models have reduced size.

    Exit code: 0 equal or in agreement (or --advisory), 1 different, inconclusive or a refused arm, 2 usage,
    3 internal error or a failed builder (also with --advisory).
    """
    from kernel_muster.ab.arms import Arm, check_arms, parse_levers, parse_without
    from kernel_muster.ab.result import Thresholds
    from kernel_muster.ab.running import Wish, run
    from kernel_muster.cli.booting import request_of
    from kernel_muster.cli.process.logs import configured_logs
    from kernel_muster.cli.process.output import check_writable, command_text, only_results_on_stdout
    from kernel_muster.cli.process.progress import shown_progress

    if identity not in ("reference", "always", "off"):
        raise UsageError(f"--identity {identity!r}: expected reference, always or off")
    for option, number in (("--max-kl", max_kl), ("--least-speed", least_speed)):
        if number is not None and not math.isfinite(number):
            raise UsageError(f"{option} {number}: expected a finite number: nothing would be decided by it")
    if target is not None and target.startswith("sm_"):
        raise UsageError(f"--target {target}: nothing decodes on an architecture alone; muster audit takes it")
    one = Arm(
        name="A", levers=parse_levers("--a", a or ()), plugins=tuple(a_plugin or ()),
        without=parse_without("--a-without", a_without or ()),
    )  # fmt: skip
    other = Arm(
        name="B", levers=parse_levers("--b", b or ()), plugins=tuple(b_plugin or ()),
        without=parse_without("--b-without", b_without or ()),
    )  # fmt: skip
    check_arms(one, other)
    counts = None if sequences is None else options.parse_counts(sequences, "--sequences", _MOST_SEQUENCES)
    for option, names in (
        ("MODEL", models), ("--a-plugin", a_plugin), ("--b-plugin", b_plugin), ("--plugin", plugin),
        ("--no-plugin", no_plugin),
    ):  # fmt: skip
        options.check_not_empty(names, option)
    options.check_not_empty([drafter] if drafter is not None else [], "--drafter")
    check_writable(output)
    wish = Wish(
        models=tuple(dict.fromkeys(models)), target=target, sequences=counts, tokens=tokens,
        repeats=repeats, drafts=drafts, prompts=tuple(prompt or ()), seed=seed, folder=weights, is_reduced=reduced,
        drafter=drafter, drafter_folder=drafter_weights, layers=layers,
        stage=stage.value if stage else "loaded", command=command_text(),
        thresholds=Thresholds(
            max_kl=max_kl, identity=identity,  # type: ignore[arg-type]
            least_verify_steps=least_verify_steps, least_speed=least_speed,
        ),
    )  # fmt: skip
    bases = [
        request_of(model=name, target=target, manifests=manifests, plugins=plugin, no_plugins=no_plugin)
        for name in wish.models
    ]
    failures: list[BaseException] = []
    with configured_logs(verbose=verbose), shown_progress() as progress, only_results_on_stdout():
        found = _fitted(run(bases, one, other, wish, progress, _say, failures.append))
    _show(found, format, output, advisory=advisory)
    for text, failure in {describe(failure): failure for failure in failures}.items():
        complain(f"the model's builder failed: {text}")
        complain_traceback(failure, verbose)
    if found.verdict == "incomplete":
        return INTERNAL
    return PASSED if advisory or found.passed else REFUSED


def _fitted(found: "Comparison") -> "Comparison":
    """Add the remedy for a missing GPU to a refused arm, and for a missing model the forms that this command takes."""
    from kernel_muster.cli.remedies import fitted, of_folders

    def fits(report: "Report") -> "Report":
        return of_folders(fitted(report, "decode"))

    def model(one: "ModelResult") -> "ModelResult":
        return replace(one, refused=tuple((arm, fits(report), why) for arm, report, why in one.refused))

    return replace(found, models=tuple(map(model, found.models)))


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")


def _show(found: "Comparison", format: options.ReportFormat, output: Path | None, *, advisory: bool) -> None:
    from kernel_muster.ab.rendering import document, headline, sections
    from kernel_muster.cli.sections import deliver, rendered, wants_colour

    first = f"{'ADVISORY: ' if advisory else ''}{headline(found)}"
    if format is options.ReportFormat.JSON:
        text = json.dumps(document(found, advisory=advisory), indent=1)
    else:
        coloured = wants_colour(format, output)
        text = rendered(first, sections(found), format, coloured=coloured, is_good=found.passed)
    deliver(text, first, output)
