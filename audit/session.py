"""The boot session: from the moment a boot opens to the sealed verdict."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import field, replace
from datetime import UTC, date, datetime
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar

from kernel_muster.audit import serving
from kernel_muster.audit.checking import Checked, check_kernels
from kernel_muster.audit.evidence import AuditOptions, Evidence
from kernel_muster.audit.opening import BootRequest, Opening, open_boot
from kernel_muster.audit.render.audiences import for_program
from kernel_muster.audit.render.text import render_text
from kernel_muster.audit.report import Report
from kernel_muster.audit.reporting import full_report, log_finished, opening_report
from kernel_muster.audit.rules import late
from kernel_muster.audit.tuning.facts import tuning_facts
from kernel_muster.audit.verdict import judge_boot, judge_opening
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.schema import QUANTS
from kernel_muster.registry.contract.digests import Digests
from kernel_muster.registry.contract.specs import STAGES
from kernel_muster.registry.discovery.loading import process_changed
from kernel_muster.registry.errors import BootRefused, UsageError, is_reported
from kernel_muster.registry.findings import PROFILES, Finding
from kernel_muster.registry.foreign_text import written
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.launch.choose import choose_runner
from kernel_muster.registry.launch.runners import Progress, Runner
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.paths import without_home
from kernel_muster.registry.plugin_code.process_state import process_state, put_back
from kernel_muster.registry.plugin_code.watch import cause_chain, watched
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookup_session import LookupSession, OnLateMiss
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.records import FailedRequest
from kernel_muster.registry.selection.sites import site_name
from kernel_muster.registry.values import copied, frozen

_OBSERVER_TIMEOUT_S = 10.0
_REFUSED = "its boot was refused: the report has the reasons"
_CUT_SHORT = "its boot did not come to its end, so that nothing has passed"
_T = TypeVar("_T")


def abort_process(text: str) -> None:
    """Say why on stderr and end the process at once: what serves must not go on without the kernel."""
    sys.stderr.write(f"kernel-muster: LATE_MISS: {written(text, 'log')}\n")
    sys.stderr.flush()
    os.abort()


@frozen(kw_only=True)
class BootOptions:
    """How a boot is judged, and what happens after its seal. ``wrap_runner`` lets a measurement see every launch."""

    audit: AuditOptions = field(default_factory=AuditOptions)
    on_late_miss: OnLateMiss = "raise"
    abort: Callable[[str], None] = abort_process
    muster_version: str = ""
    progress: Progress | None = None
    wrap_runner: Callable[[Runner], Runner] | None = None

    def check(self) -> None:
        """Refuse options that mean nothing or contradict each other."""
        _check_choice("profile", self.audit.profile, PROFILES)
        _check_choice("on_late_miss", self.on_late_miss, ("raise", "abort", "count"))
        if self.audit.stage is not None:
            _check_choice("stage", self.audit.stage, STAGES)
        if self.audit.allow_unresolved and self.audit.profile == "qualify":
            raise UsageError("dangerously_allow_unresolved does not go with profile qualify")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}, expected {' or '.join(choices)}")


class BootSession:
    """One boot, as a context manager: leaving the block seals the audit, or raises BootRefused with its report.

    All state lives here: two sessions in one process never see each other's rows.
    """

    def __init__(self, boot_request: BootRequest, options: BootOptions) -> None:
        options.check()
        if boot_request.quant is not None:
            _check_choice("quant", boot_request.quant, QUANTS)
        self._boot_request, self._options = boot_request, options
        self._as_of: date = options.audit.as_of or datetime.now(UTC).date()
        self._opening: Opening | None = None
        self._session: LookupSession | None = None
        self._report: Report | None = None  # nobody else holds it, and no verdict is read from it
        self._shown: Report | None = None
        self._is_refused = False
        self._observers_failed: tuple[Finding, ...] = ()
        self._is_complete = True
        self._failure, self._is_failure_reported = "", False
        self._checked = Checked()
        self._digests = Digests()  # of sources that were read

    def __enter__(self) -> Self:
        if self._opening is not None:
            raise UsageError("this boot was opened before: its rows are not a new one's; call boot() again")
        self._open()
        return self

    def _open(self) -> None:
        self._opening = open_boot(self._boot_request)
        self._digests = Digests(float(self._opening.levers["MUSTER_PLUGIN_TIMEOUT_S"] or 10))
        for name in ("manifest", "target", "levers"):  # copies of an earlier opening's
            self.__dict__.pop(name, None)
        if not self._opening.is_usable:
            self._refuse_opening(self._opening)
        waivers = self._evidence(with_lookups=False).waivers
        target, levers = _opened(self._opening.target), self._opening.levers
        cache = levers["MUSTER_CACHE_DIR"]
        runner = choose_runner(
            target, self._options.audit.stage, None if cache is None else str(self._boot_request.cwd / str(cache))
        )
        wrap = self._options.wrap_runner
        # What ends the process where a kernel is missing is what serves requests.
        serves = self._options.on_late_miss == "abort"
        catalog = self._opening.catalog
        self._session = LookupSession(
            serving.noting_unready(catalog, str(target.arch or CPU), self._unready) if serves else catalog,
            target,
            levers,
            excused=lambda key: waivers[key].reason if key in waivers else "",
            runner=runner if wrap is None else wrap(runner),
            serves=serves,
        )

    def _unready(self, why: str) -> None:
        self.kernels.request_failed(serving.REQUEST, why, where=self._manifest.where("model", "model_type"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._lookups.seal(self._options.on_late_miss, self._options.abort)
        # sys.exit() in the block is a block that raised. An interrupt, a cancelled task or a closed generator waits for
        # nothing, and goes on as itself.
        is_left = error is not None and not isinstance(error, Exception | SystemExit)
        if error is not None:
            self._break_off(error)
        try:
            if self._opened.is_usable:  # else register() reopened the boot, and was refused
                self._finish(is_left=is_left)
        except BaseException:
            self._lookups.close(_CUT_SHORT)
            raise
        if self._is_refused:
            self._lookups.close(_REFUSED)
        if not self._is_refused or is_left or isinstance(error, BootRefused):
            return False  # of an incomplete boot the block's own exception goes on
        raise self._refusal() from error

    def _break_off(self, error: BaseException) -> None:
        """Record that the boot ends before its model is built."""
        self._is_complete, self._failure = False, cause_chain(error)
        self._is_failure_reported = is_reported(error)
        self._lookups.close(_CUT_SHORT)

    def _refusal(self) -> BootRefused:
        return BootRefused(render_text(_opened(self._report)), self.report)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the model: a copy, which decides nothing."""
        return deepcopy(self._manifest)

    @cached_property
    def target(self) -> Target:
        """What kernels are selected for: a copy."""
        return copied(_opened(self._opened.target))

    @cached_property
    def levers(self) -> Levers:
        """The levers, as they were when the boot opened: a copy."""
        return self._opened.levers.copy()

    @property
    def kernels(self) -> Lookups:
        """What layers look kernels up with."""
        return Lookups(self._lookups)

    def handle_of(self, key: KernelKey) -> Handle | None:
        """Return the handle that serves a key, or None, without recording a question."""
        return self._lookups.handle_of(key)

    @property
    def report(self) -> Report:
        """A copy of the report; there is one once the audit is sealed or refused."""
        if self._shown is None:
            raise UsageError("there is no report before the boot is sealed: leave the with block first")
        return self._shown

    def trace(self) -> dict[str, Any]:
        """Return what ``muster replay`` needs to judge this boot again, as plain data for JSON."""
        from kernel_muster.audit.replay.trace_writing import trace_document  # its schema takes 15 ms to build

        return trace_document(self._evidence_with_tuning())

    def late_findings(self) -> tuple[Finding, ...]:
        """Return what has happened since the seal."""
        evidence = self._evidence()
        rules = (late.late_misses, late.late_registrations, late.late_compiles, late.late_hits)
        return tuple(finding for rule in rules for finding in rule(evidence))

    def register(self, name: str, plugin: object) -> None:
        """Add a plugin object of this process. Only before the first lookup; after the seal it is LATE_REGISTRATION."""
        frame = sys._getframe(1)
        if self._lookups.sealed:
            self._lookups.refuse_registration(name, site_name(frame.f_code, frame.f_lasti))
        before = self._lookups
        if before.is_used:
            raise UsageError(f"plugin {name}: register it before the first lookup, or pass boot(local_plugins=...)")
        self._boot_request = replace(
            self._boot_request, local_plugins={**self._boot_request.local_plugins, name: plugin}
        )
        self._open()
        before.successor = self._lookups

    @property
    def _opened(self) -> Opening:
        return _opened(self._opening)

    @property
    def _manifest(self) -> Manifest:
        return _opened(self._opened.manifest)

    @property
    def _lookups(self) -> LookupSession:
        return _opened(self._session)

    def _evidence(self, *, with_lookups: bool = True) -> Evidence:
        opening = self._opened
        evidence = Evidence(
            opening.catalog,
            _opened(opening.target),
            opening.levers,
            self._manifest,
            self._boot_request.quant or self._manifest.quant,
            self._as_of,
            (),
            options=self._options.audit,
            opening=(*opening.findings, *self._observers_failed),
            is_complete=self._is_complete,
            failure=self._failure,
            is_failure_reported=self._is_failure_reported,
        )
        if not with_lookups:
            return evidence
        session = self._lookups
        evidence = replace(evidence, opening=(*evidence.opening, *session.notices))
        return replace(
            evidence,
            entries=session.entries("boot"),
            late_entries=session.entries("late"),
            requests=(*session.requests, *_quant_request(self._boot_request, self._manifest)),
            late_registrations=session.late_registrations,
            missing_layouts=session.layouts.missing,
            builders=session.builders,
            states=self._checked.states,
            of_builds=self._checked.of_builds,
            proven=self._checked.proven,
            proof_findings=self._checked.findings,
            decider=session.selector,
            digests=self._digests,
        )

    def _evidence_with_tuning(self) -> Evidence:
        """Return all evidence; what a tuning table was measured with is compared with what the builds compiled."""
        evidence, session = self._evidence(), self._lookups
        chosen, copies = self._opened.tuning, session.layouts.copies
        if chosen is None:
            return evidence
        source_of = evidence.source_digest
        facts = tuning_facts(chosen, session.target, evidence.levers, session.selector, copies, source_of)
        return replace(evidence, tuning=facts)

    def _finish(self, *, is_left: bool) -> None:
        """Judge, report, tell the observers, and judge again if one of them failed.

        A block that was left is judged by its lookups alone: builds and observers would take their time.
        """
        try:
            if not is_left:
                stage, progress = self._options.audit.stage, self._options.progress
                self._checked = check_kernels(self._lookups, self._evidence(), stage, progress)
        except BaseException as error:
            self._break_off(error)
            self._conclude(self._judged, has_observers=False)
            raise
        self._conclude(self._judged, has_observers=not is_left)

    def _conclude(self, judge: Callable[[], Report], *, has_observers: bool) -> None:
        """Keep the verdict and the report, and give copies away."""
        self._keep(judge())
        self._observers_failed = tuple(self._tell_observers()) if has_observers else ()
        if self._observers_failed:
            self._keep(judge())
        log_finished(_opened(self._report))

    def _keep(self, report: Report) -> None:
        self._report, self._shown, self._is_refused = report, copied(report), report.is_refused

    def _judged(self) -> Report:
        # Another thread may already look up late: what comes after the seal is no part of the boot's verdict.
        evidence = replace(self._evidence_with_tuning(), late_entries=(), late_registrations=())
        verdict = judge_boot(evidence)
        report = full_report(evidence, verdict, self._options.muster_version, self._lookups.layouts)
        return report if self._boot_request.is_command else for_program(report)

    def _tell_observers(self) -> Iterator[Finding]:
        for name, observer in self._opened.catalog.observers:
            tell, before = partial(observer, copied(self._report)), process_state()
            outcome = watched(tell, _OBSERVER_TIMEOUT_S, f"the observer of plugin {name}")
            if changed := put_back(before):
                yield process_changed(name, "", changed, "while its observer ran")
            if outcome.error is not None or outcome.is_hanging:
                yield _observer_failed(name, outcome.error, outcome.stack)

    def _refuse_opening(self, opening: Opening) -> NoReturn:
        self._conclude(partial(self._opening_judged, opening), has_observers=True)
        raise self._refusal()

    def _opening_judged(self, opening: Opening) -> Report:
        findings = (*opening.findings, *self._observers_failed)
        verdict = judge_opening(opening.catalog, findings, self._options.audit.profile)
        boot_request, found = self._boot_request, opening.manifest
        report = opening_report(
            verdict,
            self._options.muster_version,
            catalog=opening.catalog,
            levers=opening.levers,
            model=str(boot_request.manifest or boot_request.model or boot_request.config or "")
            if found is None
            else found.name,
            manifest="" if found is None else without_home(found.path),
            target=boot_request.target or "",
            profile=self._options.audit.profile,
            as_of=self._as_of.isoformat(),
        )
        return report if self._boot_request.is_command else for_program(report)


def _observer_failed(name: str, error: BaseException | None, stack: str) -> Finding:
    return Finding(
        "PLUGIN_LOAD_FAILED",
        name,
        message("plugin_load_failed.observer", how=type(error).__name__ if error is not None else "it hangs"),
        remedies=(message("remedy.repair_plugin"), message("remedy.or_block", plugin=name)),
        log=cause_chain(error) if error is not None else stack,
    )


def _quant_request(boot_request: BootRequest, manifest: Manifest) -> tuple[FailedRequest, ...]:
    """A quantisation other than the manifest's is a request that no builder honours: each reads the manifest alone."""
    if boot_request.quant is None or boot_request.quant == manifest.quant:
        return ()
    why = f"{boot_request.quant} was asked for, but the model was built as its manifest says: {manifest.quant}"
    return (
        FailedRequest("--quant" if boot_request.is_command else "quant", why, "", manifest.where("model", "quant")),
    )


def _opened(value: _T | None) -> _T:
    """Return what exists only inside the with block."""
    if value is None:
        raise UsageError("the boot is not open: use it as a context manager")
    return value
