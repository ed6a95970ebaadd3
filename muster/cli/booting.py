"""From command options to one audited boot."""

import os
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from kernel_muster._version import __version__
from kernel_muster.api import build_model
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.opening import BootRequest
from kernel_muster.audit.report import Report
from kernel_muster.audit.session import BootOptions, BootSession
from kernel_muster.cli.process.output import only_results_on_stdout
from kernel_muster.MODEL_toml.resolve import has_config
from kernel_muster.registry.contract.specs import Stage
from kernel_muster.registry.errors import BootRefused, MusterError, UsageError
from kernel_muster.registry.findings import Profile
from kernel_muster.registry.keys import KernelKey, parse_key
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.plugin_code.running import running
from kernel_muster.registry.values import frozen


@frozen
class Audited:
    """A finished boot. ``failure`` is the exception of the model's builder."""

    report: Report
    trace: dict[str, Any] | None
    failure: BaseException | None

    @property
    def untold(self) -> BaseException | None:
        """The builder's exception, unless a finding of the report covers it."""
        return None if self.report.failure_reported else self.failure


def request_of(
    *,
    model: str | None = None,
    manifest: Path | None = None,
    config: Path | None = None,
    reference: str | None = None,
    manifests: Iterable[Path] | None = None,
    weights: Path | None = None,
    target: str | None = None,
    quant: str | None = None,
    plugins: Iterable[str] | None = None,
    no_plugins: Iterable[str] | None = None,
) -> BootRequest:
    """Build the request of a boot. UsageError if the options contradict each other."""
    if reference is not None and model is not None and config is manifest is None and has_config(model):
        config, model = Path(model), None  # the folder identifies the model, the reference names it
    _check_one_model(model, manifest, config, reference, bool(manifests))
    return BootRequest(
        is_command=True,
        model=model or reference,
        manifest=manifest,
        config=config,
        weights=weights,
        target=target,
        quant=quant,
        levers=dict(os.environ),
        plugins=frozenset(plugins or ()),
        no_plugins=frozenset(no_plugins or ()),
        manifest_folders=tuple(manifests or ()),
        only_these_folders=bool(manifests),
    )


def _check_one_model(
    model: str | None, manifest: Path | None, config: Path | None, reference: str | None, has_folders: bool
) -> None:
    if manifest is not None and config is not None:
        raise UsageError("--manifest and --config both say which model it is: give one")
    if manifest is not None and (reference is not None or has_folders):
        raise UsageError("--ref and --manifests choose among manifests: they do not go with --manifest")
    if reference is not None and config is None:
        raise UsageError("--ref goes with --config, or with a MODEL that is a folder with a config.json")
    if reference is not None and model is not None and model != reference:
        raise UsageError(f"MODEL is {model!r}, --ref {reference!r}: give one")


def audit_options(
    *,
    profile: Profile,
    stage: Stage | None,
    as_of: date | None,
    set_hash: str | None,
    allowed: Iterable[str],
) -> AuditOptions:
    """Build the options of the audit. UsageError for impossible ones."""
    audit = AuditOptions(profile, stage, as_of, set_hash, frozenset(map(_key, allowed)))
    BootOptions(audit=audit).check()
    return audit


def _key(text: str) -> KernelKey:
    try:
        return parse_key(text)
    except ValueError as error:
        raise UsageError(f"--dangerously-allow-unresolved: {error}") from None


def run_audit(
    request: BootRequest, audit: AuditOptions, *, wants_trace: bool = False, progress: Progress | None = None
) -> Audited:
    """Boot a model as a plan, without weights, and return the audit's result, passed or refused."""
    session = BootSession(request, BootOptions(audit=audit, muster_version=__version__, progress=progress))
    failure: BaseException | None = None
    is_open = False
    try:
        with only_results_on_stdout(), session as boot:
            is_open = True
            try:
                with running(f"the builder of {boot.manifest.name}"):
                    build_model(boot.manifest, boot.kernels)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failure = error
                if isinstance(error, Exception):
                    raise
                raise MusterError(f"the builder ended with {type(error).__name__}") from error
    except BootRefused:
        pass
    except Exception as error:
        if failure is None or failure not in (error, error.__cause__):
            raise
    return Audited(session.report, session.trace() if wants_trace and is_open else None, failure)
