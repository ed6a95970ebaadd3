"""One booted arm: its report, its model with weights, a decoder, and a meter before its kernels."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from traceback import walk_tb
from typing import Any

from kernel_muster._version import __version__
from kernel_muster.ab.decoding.decoders import Decoder, decoder_of, is_model, undecodable
from kernel_muster.ab.decoding.weights import unread_tensors, weights_of
from kernel_muster.ab.measure.metering import Meter, Recorded
from kernel_muster.ab.nudge import nudge_plugin
from kernel_muster.ab.nudge.nudging import Nudger
from kernel_muster.api import build_model
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.opening import BootRequest
from kernel_muster.audit.report import Report
from kernel_muster.audit.session import BootOptions, BootSession
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.models.build import build_model as build_hybrid
from kernel_muster.registry.contract.specs import Stage
from kernel_muster.registry.errors import BootRefused, MusterError, UsageError
from kernel_muster.registry.findings import Profile
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.hardware.stuck import has_stuck
from kernel_muster.registry.keys import KernelKey, near, parse_key
from kernel_muster.registry.launch.runners import Progress, Runner
from kernel_muster.registry.plugin_code.watch import located
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.select import near_keys
from kernel_muster.registry.suggestions import named
from kernel_muster.registry.values import frozen

Sized = Callable[[Manifest], Manifest]
_PACKAGE = "kernel_muster."
#: The modules that read weights and allocate memory for them.
_OF_WEIGHTS = tuple(f"{_PACKAGE}models.{name}" for name in ("checkpoints", "memory", "random_weights", "weights"))


@frozen(kw_only=True)
class Building:
    """The build of a model: its size, its weights, and the number of sequences and tokens.

    ``context`` is the number of tokens with room, ``reads`` the final length of the longest sequence.
    """

    sized: Sized
    folder: Path | None = None
    seed: int = 0
    sequences: int = 1
    context: int = 64
    reads: int = 1
    stage: Stage | None = None
    progress: Progress | None = None
    profile: Profile = "serve"
    as_of: date | None = None


class ArmRefused(Exception):
    """An arm did not boot: ``report`` and ``why`` give the reason, ``failure`` an exception of its builder."""

    def __init__(self, arm: str, report: Report, why: str = "", failure: BaseException | None = None) -> None:
        super().__init__(f"arm {arm} did not boot{f': {why}' if why else ''}")
        self.arm, self.report, self.why, self.failure = arm, report, why, failure


class BuilderFailed(MusterError):
    """A builder raised an exception that is no refusal: ``failure``."""

    def __init__(self, what: str, failure: BaseException) -> None:
        super().__init__(f"{what} failed: {located(failure)}; --verbose shows its traceback")
        self.failure = failure


@contextmanager
def builds(what: str, *, is_ours: bool = True) -> Iterator[None]:
    """Turn every exception of a builder, also of a plugin's, into BuilderFailed.

    UsageError passes if it concerns the caller: weights that cannot be read, or do not fit. A plugin's builder may
    raise it for other reasons.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, UsageError) and _raised_in(error, (_PACKAGE,) if is_ours else _OF_WEIGHTS):
            raise
        raise BuilderFailed(what, error) from error


def _raised_in(error: BaseException, modules: tuple[str, ...]) -> bool:
    """Whether it was raised in one of these modules, given by name prefixes."""
    frames = list(walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__")).startswith(modules)


def _is_ours(boot: BootSession, sized: Manifest) -> bool:
    """Whether the built-in builder serves a model."""
    return any(
        builder.build is build_hybrid and sized.model_type in builder.model_types
        for builder in boot.kernels.catalog.builders
    )


def refused_arm(arm: str, report: Report, error: MusterError) -> ArmRefused:
    """Return the refusal of an arm whose block raised."""
    return ArmRefused(arm, report, str(error), error.failure if isinstance(error, BuilderFailed) else None)


@frozen(kw_only=True)
class Drafting:
    """A sealed boot of the drafter beside an arm's model, and its number of drafts in each step."""

    session: BootSession
    manifest: Manifest
    sized: Manifest
    drafts: int
    kernels: Mapping[str, str]


@dataclass
class Booted:
    """A sealed boot whose model decodes.

    ``kernels`` identifies the code of each serving key. ``recorded`` holds the launches of each recorded step.
    ``drafting`` is the drafter's boot, if a drafter replaces the MTP head. ``unread`` names the tensors of a
    checkpoint that the model did not read.
    """

    session: BootSession
    manifest: Manifest
    sized: Manifest
    model: Any
    decoder: Decoder
    meter: Meter
    nudger: Nudger | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    recorded: dict[int, Recorded] = field(default_factory=dict)
    drafting: Drafting | None = None
    unread: tuple[str, ...] = ()

    def prepare(self, sequences: int) -> None:
        """Record the step for this number of sequences, and keep its launches."""
        with self.meter.recording() as launches:
            self.decoder.prepare(sequences)
        self.recorded[sequences] = tuple(launches)

    @property
    def report(self) -> Report:
        """The report of the boot."""
        return self.session.report

    @property
    def all_kernels(self) -> dict[str, str]:
        """The kernels of the model, and those of its drafter alone."""
        return {**(self.drafting.kernels if self.drafting else {}), **self.kernels}

    def handle_of(self, key: KernelKey) -> Handle | None:
        """Return the handle of a key of the model, or of its drafter."""
        found = self.session.handle_of(key)
        return found or (self.drafting.session.handle_of(key) if self.drafting else None)

    @property
    def maturity(self) -> str:
        """The maturity of the built-in builder. Empty for a model of another builder."""
        return str(self.model.maturity) if is_model(self.model) else ""

    @property
    def has_mtp(self) -> bool:
        """Whether the model has an MTP head."""
        return is_model(self.model) and self.model.mtp is not None


def close_quietly(booted: Booted) -> None:
    """Free an arm's memory. A stopped device raises again, without new information; a stuck one is left alone."""
    if has_stuck():
        return
    with suppress(Exception):
        booted.decoder.close()


def boot_arm(
    name: str, request: BootRequest, building: Building, *, without: frozenset[KernelKey] = frozenset(),
    nudge_seed: int | None = None,
) -> Booted:  # fmt: skip
    """Boot an arm and build its model with weights. ArmRefused, with the report, if it is refused or not built.

    UsageError if ``without`` contains a key that its model requires, or an unregistered key.
    """
    seen: dict[str, Any] = {}
    is_host = request.target == CPU
    if nudge_seed is not None and not is_host:
        request = replace(request, local_plugins={**request.local_plugins, nudge_plugin.NAME: nudge_plugin})

    def wrap(runner: Runner) -> Runner:
        if nudge_seed is not None:
            runner = seen["nudger"] = Nudger(runner, nudge_seed, is_host=is_host)
        seen["meter"] = Meter(runner, is_host=is_host)
        return seen["meter"]  # type: ignore[no-any-return]

    options = BootOptions(
        audit=AuditOptions(profile=building.profile, stage=building.stage, as_of=building.as_of, without=without),
        muster_version=__version__,
        progress=building.progress,
        wrap_runner=wrap,
    )
    session = BootSession(request, options)
    try:
        with redirect_stdout(sys.stderr), session as boot:
            if boot.target.arch is not None and boot.target.device is None:
                raise MusterError(f"{boot.target.name} is an architecture: nothing decodes without a device, or cpu")
            if boot.manifest.dflash:
                raise MusterError(f"{boot.manifest.name} drafts for another model: it decodes nothing by itself")
            sized = building.sized(boot.manifest)
            _check_context(boot.manifest, building.reads)
            weights = weights_of(building.folder, building.seed, is_zero_centred=sized.model.rms_norm_zero_centred)
            model, decoder = decoder_of(
                _built(sized, boot, weights), boot.levers, building.sequences, building.context,
                sized.model.vocab_size, lambda: seen["meter"].restart_steps(),
            )  # fmt: skip
    except BootRefused:
        check_without(name, session, without)
        raise ArmRefused(name, session.report) from None
    except UsageError:
        raise
    except MusterError as error:
        raise refused_arm(name, session.report, error) from error
    booted = Booted(
        session, session.manifest, sized, model, decoder, seen["meter"], seen.get("nudger"),
        unread=unread_tensors(weights),
    )  # fmt: skip
    if booted.nudger is not None:
        booted.nudger.contracts = session.kernels.catalog.contracts
        booted.nudger.find = lambda dtype: session.handle_of(KernelKey(nudge_plugin.NAME, f"nudge_{dtype}"))
    booted.kernels = kernels_of(session)
    return booted


def _check_context(manifest: Manifest, reads: int) -> None:
    """UsageError for more tokens than the model's context holds, before the build."""
    most = manifest.model.context_length
    if most is not None and reads > most:
        said = f"{manifest.name} has a context_length of {most}"
        raise UsageError(f"a sequence grows to {reads} tokens that are read, {said}: fewer --tokens, shorter prompts")


def _in_layers(layers: Sequence[str]) -> str:
    """Name the layers. Empty if a model names none."""
    named_layers = [layer for layer in layers if layer]
    if not named_layers:
        return ""
    return f", in {', '.join(named_layers[:3])}{' and others' if len(named_layers) > 3 else ''}"


def check_without(name: str, session: BootSession, without: frozenset[KernelKey]) -> None:
    """UsageError if a refused arm was to run without a key that is unknown or has no replacement."""
    report = session.report
    for row in report.kernels:
        if row.kind == "required" and row.outcome == "absent" and row.key in map(str, without):
            raise UsageError(
                f"--{name.lower()}-without {row.key}: {report.model} requires it{_in_layers(row.layers)}: there is "
                "nothing in its place"
            )
    if not any((row.code, row.subject) == ("REQUEST_NOT_HONORED", "MUSTER_DISABLE") for row in report.findings):
        return
    catalog = session.kernels.catalog
    asked = {key for row in report.kernels for key in (row.key, *row.chain)}
    for key in sorted(without):
        if key not in catalog.by_key and str(key) not in asked | catalog.by_alias.keys():
            names = near_keys(catalog, key) or near(str(key), map(str, catalog.by_key))
            hint = named(names) or "; muster kernels lists all"
            raise UsageError(f"--{name.lower()}-without {key}: no plugin of arm {name} registers such a key{hint}")


def _built(sized: Manifest, boot: BootSession, weights: Any) -> Any:
    """Build the model. BuilderFailed if its builder raises, and MusterError if the result cannot decode."""
    try:
        with builds("the model's builder", is_ours=_is_ours(boot, sized)):
            return build_model(sized, boot.kernels, weights)
    except BuilderFailed:
        # A model of another kind may need other weights: its type explains more than the failing line.
        if why := _undecodable_plan(sized, boot):
            raise MusterError(why) from None
        raise


def _undecodable_plan(sized: Manifest, boot: BootSession) -> str:
    """Return the reason why a builder's plan could not decode. Empty if it could, or if there is no plan."""
    apart = LookupSession(boot.kernels.catalog, boot.target, boot.levers)
    try:
        plan = build_model(sized, Lookups(apart))
        return "" if plan is None else undecodable(plan)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  (the earlier failure with weights is reported)
        return ""


def kernels_of(session: BootSession) -> dict[str, str]:
    """Identify the code of each serving key: provider, tier, backend, and the digest of its source."""
    found: dict[str, str] = {}
    for row in session.report.kernels:
        handle = session.handle_of(parse_key(row.served_by)) if row.served_by else None
        if handle is not None:
            spec = handle.spec
            digest = handle.source_sha256[:12] or "(unreadable)"
            found[row.served_by] = f"{handle.provider}, {spec.tier}, {spec.backend_name}, source {digest}"
    return found
