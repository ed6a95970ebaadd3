"""``muster plugin check``: run the steps in child processes, and turn crashes and hangs into findings.

A child that dies in a step is followed by one that leaves out what is done and that step, so that one crash hides
nothing else. The time limit is for a step.
"""

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kernel_muster.audit.plugin_check.child import Asked, Ended, run_child
from kernel_muster.audit.plugin_check.machine_code import EntryRow, WarningRow
from kernel_muster.audit.plugin_check.steps import is_refusing
from kernel_muster.audit.report import FindingRow
from kernel_muster.audit.reporting import finding_row
from kernel_muster.audit.verdict import judge
from kernel_muster.registry.backends.nvrtc.headers import EXTRAS
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.values import frozen

SCHEMA = "kernel-muster/plugin-check"
VERSION = "1.2"
Outcome = Literal["ok", "failed", "skipped"]
StageAsked = Literal["compiled", "proven"]
_CODES = {
    "load": "PLUGIN_LOAD_FAILED",
    "contract": "BAD_SPEC",
    "compile": "COMPILE_FAILED",
    "plan": "BAD_SPEC",
    "prove": "NUMERICS_FAILED",
}
_NOWHERE = re.compile(r"(?!)")
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS})


@frozen(kw_only=True)
class StepRow:
    """One step: what it checked, where, and how it went."""

    kind: str
    subject: str
    target: str
    outcome: Outcome
    seconds: float
    reason: str = ""


@frozen(kw_only=True)
class PluginReport:
    """Everything the author's kit has to say about one distribution, or about the one plugin of it that was named.

    ``not_done`` says of kernels for devices how far they stayed below proven; ``stage_asked``, which refuses for it.
    """

    schema: str = SCHEMA
    version: str = VERSION
    distribution: str
    distribution_version: str
    verdict: Literal["passed", "refused"]
    plugins: tuple[dict[str, Any], ...] = ()
    steps: tuple[StepRow, ...] = ()
    findings: tuple[FindingRow, ...] = ()
    # since 1.1
    stage_asked: str = ""
    not_done: tuple[str, ...] = ()
    # since 1.2
    plugin_asked: str = ""
    entries: tuple[EntryRow, ...] = ()
    warnings: tuple[WarningRow, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing refuses."""
        return self.verdict == "passed"


class _Collected:
    """What all children have said so far."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: list[str] = []
        self.steps: list[StepRow] = []
        self.findings: list[tuple[Finding, str]] = []  # with the target of the step
        self.plugins: tuple[dict[str, Any], ...] = ()
        self.entries: list[EntryRow] = []
        self.warnings: list[WarningRow] = []
        self.of_builds: list[Finding] = []
        self.total = 0  # not known yet
        self.has_ended = False
        self.open: dict[str, Any] | None = None
        self.loading: dict[str, Any] = {"plugin": ""}
        self.stopped: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> bool:
        """Take one event of a child; whether it begins or ends a step, so that time counts anew."""
        kind = event["event"]
        if kind == "loading":
            self.loading = event
            return False
        if kind in ("start", "end") and self.open is not None:
            self.add(self.open, [_lost(self.open)], 0.0)
            self.open = None
        if kind == "stopped":
            self.stopped = event
        elif kind == "start":
            self.open = event
        elif kind == "plugins":
            self.plugins, self.total = tuple(event["plugins"]), event["steps"]
        elif kind == "builds":
            self.of_builds = [_finding(row) for row in event["findings"]]
        elif kind == "end":
            self.has_ended = True
        else:
            self.open = None
            self.entries.extend(EntryRow(**row | {"keys": tuple(row["keys"])}) for row in event["entries"])
            self.warnings.extend(WarningRow(**row) for row in event["warnings"])
            self.add(event, [_finding(row) for row in event["findings"]], event["seconds"], event["skipped"])
        return True

    def add(self, step: dict[str, Any], found: Sequence[Finding], seconds: float, skipped: str = "") -> None:
        """Add a step that is over."""
        outcome: Outcome = "skipped" if skipped else "failed" if any(map(is_refusing, found)) else "ok"
        row = {name: step[name] for name in ("kind", "subject", "target")}
        reason = skipped or ", ".join(dict.fromkeys(finding.code for finding in found))
        self.steps.append(StepRow(**row, outcome=outcome, seconds=round(seconds, 3), reason=reason))
        self.findings.extend((finding, step["target"]) for finding in found)
        self.done.append(step["name"])
        self.failed.extend([step["name"]] if outcome == "failed" else [])


def check_plugin(
    distribution: str,
    version: str,
    *,
    path: Sequence[str],
    seconds: float,
    plugin: str | None = None,
    stage: StageAsked | None = None,
    cache_dir: str | None = None,
    unpacked: Path | None = None,
    progress: Progress | None = None,
    printed: Callable[[str], None] | None = None,
) -> PluginReport:
    """Check the plugins of a distribution that ``path`` leads to, or one of them; each step may take so many seconds.

    With ``stage``, what keeps a kernel from it refuses, be it only that a compiler or a device is not here. ``printed``
    gets what plugins print, as they do. ``unpacked`` is the folder that a wheel was only put into to be looked at.
    """
    collected = _Collected()
    asked = Asked(distribution, plugin, path, seconds, cache_dir, progress, printed)
    while not collected.has_ended:
        before = len(collected.done)
        ended = run_child(collected, asked)
        if collected.open is not None:
            step, collected.open = collected.open, None
            collected.add(step, [_died(step, ended, seconds, collected.loading)], ended.seconds)
            if step["kind"] == "load":
                break
        elif collected.stopped is not None and collected.stopped["is_usage"]:
            raise UsageError(collected.stopped["why"])
        elif collected.stopped is not None or (not collected.has_ended and not collected.done):
            raise MusterError(f"the child process of the check ended with {_how(ended.code)}:\n{ended.log}")
        elif not collected.has_ended and len(collected.done) == before:
            # Outside a step it is only loaded, for the steps that are left.
            step = {"name": "load again", "kind": "load", "subject": distribution, "target": "", "where": ()}
            what = f"loading it again, for what follows {collected.done[-1]},"
            collected.add(step, [_died(step, ended, round(ended.seconds), collected.loading, what)], ended.seconds)
            break
    if unpacked is not None:
        collected.findings = [(_for_a_wheel(finding, unpacked), target) for finding, target in collected.findings]
    return _report(distribution, version, collected, stage, plugin)


def _for_a_wheel(finding: Finding, folder: Path) -> Finding:
    """Return a finding with the paths that files have in the wheel: the folder is gone when somebody looks.

    Its remedies say when muster explain will know the wheel: it knows what is installed.
    """
    roots = "|".join(re.escape(f"{root}{os.sep}") for root in {str(folder), os.path.realpath(folder)})

    def inside(text: str) -> str:
        return re.sub(roots, "", text)

    command = "muster explain "
    remedies = (one.replace(command, f"once the wheel is installed, {command}") for one in finding.remedies)
    return replace(
        finding,
        why=inside(finding.why),
        where=tuple(map(inside, finding.where)),
        remedies=tuple(map(inside, remedies)),
        log=inside(finding.log),
    )


def _report(
    distribution: str,
    version: str,
    collected: _Collected,
    stage: StageAsked | None = None,
    plugin: str | None = None,
) -> PluginReport:
    # What does not compile cannot be proven either, and says so with the same words.
    distinct = {
        (found.code, found.subject, found.why): (found, target) for found, target in reversed(collected.findings)
    }
    undone = {"compiled": _left(collected.steps, "compile"), "proven": _left(collected.steps, "prove")}
    found = [*_folded(reversed(distinct.values())), *collected.of_builds]
    found += _unreached(collected.steps, stage, undone) if stage is not None else []
    verdict = judge(found, "qualify")
    return PluginReport(
        distribution=distribution,
        distribution_version=version,
        verdict="refused" if verdict.is_refused else "passed",
        plugins=collected.plugins,
        steps=tuple(collected.steps),
        findings=tuple(finding_row(judged) for judged in verdict.findings),
        stage_asked=stage or "",
        not_done=tuple(_not_done(collected.steps, left) for left in undone.values() if left),
        plugin_asked=plugin or "",
        entries=tuple(collected.entries),
        warnings=tuple(collected.warnings),
    )


_WHAT = {"compile": ("compiled", "builds"), "prove": ("proven on a device", "kernels")}


def _left(steps: Iterable[StepRow], kind: str) -> tuple[StepRow, ...]:
    """Return the steps of one kind that were skipped; what is for the host is proven everywhere."""
    return tuple(step for step in steps if step.kind == kind and step.target != CPU and step.outcome == "skipped")


def _not_done(steps: Iterable[StepRow], left: tuple[StepRow, ...]) -> str:
    """Return ``not compiled``, or ``2 of 5 builds not compiled``."""
    kind = left[0].kind
    done, noun = _WHAT[kind]
    every = [step for step in steps if step.kind == kind and step.target != CPU]
    return f"not {done}" if len(left) == len(every) else f"{len(left)} of {len(every)} {noun} not {done}"


def _unreached(steps: Sequence[StepRow], stage: StageAsked, undone: dict[str, tuple[StepRow, ...]]) -> list[Finding]:
    """Return what keeps the kernels from the stage that was asked for; what failed has said it by itself."""
    asked = f"stage {stage} was asked for, but"
    if not any(step.kind == "prove" for step in steps) and all(step.outcome == "ok" for step in steps):
        return [Finding("UNCHECKED", stage, f"{asked} there is no kernel", remedies=(f"leave --stage {stage} out",))]
    found = []
    for left in (undone["compiled"], undone["proven"] if stage == "proven" else ()):
        for reason in dict.fromkeys(step.reason for step in left):
            alike = tuple(step for step in left if step.reason == reason)
            remedies = _REACHED[alike[0].kind], f"or leave --stage {stage} out"
            where = tuple(dict.fromkeys(step.subject for step in alike))
            found.append(Finding("UNCHECKED", stage, f"{asked} {_not_done(steps, alike)}: {reason}", where, remedies))
    return found


_REACHED = {
    "compile": f"install the compilers: {' or '.join(EXTRAS.values())}",
    "prove": "check it on machines with the GPUs that its kernels are for",
}


def _folded(found: Iterable[tuple[Finding, str]]) -> list[Finding]:
    """Make one finding of those that differ in nothing but the target that they name."""
    alike: dict[tuple[str, str, str], tuple[Finding, list[str]]] = {}
    for finding, target in found:
        named = re.compile(rf"\b{re.escape(target)}\b") if target else _NOWHERE
        key = finding.code, finding.subject, named.sub("\0", finding.why)
        alike.setdefault(key, (finding, []))[1].append(target)
    return [
        replace(finding, why=why.replace("\0", ", ".join(targets))) for (_, _, why), (finding, targets) in alike.items()
    ]


def refused_install(distribution: str, why: str, log: str, remedy: str) -> PluginReport:
    """Return the report of a wheel that cannot even be installed, or must not be."""
    collected = _Collected()
    finding = Finding("PLUGIN_LOAD_FAILED", distribution, why, remedies=(remedy,), log=log)
    step = {"name": "install", "kind": "install", "subject": distribution, "target": ""}
    collected.add(step, [finding], 0.0)
    return _report(distribution, "", collected)


def _finding(row: dict[str, Any]) -> Finding:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Finding(**fields)


#: Whose code a step runs, by its kind; what compiles is no plugin's.
_RUNS = {
    "load": "its modules and hooks",
    "contract": "the contract's inputs and reference",
    "plan": "the planner",
    "prove": "the kernel's function",
}


def _lost(step: dict[str, Any]) -> Finding:
    """Return what is said of a step whose end was told, but not understood."""
    remedies = ("look for what writes to file descriptors that it has not opened",)
    why = f"{step['kind']} ended, but what it told was overwritten"
    return Finding(_CODES[step["kind"]], step["subject"], why, tuple(step["where"]), remedies)


def _died(
    step: dict[str, Any], ended: Ended, seconds: float, loading: dict[str, Any], what: str | None = None
) -> Finding:
    """Return what a step is found guilty of whose process ended, or was still running and was ended.

    ``what`` is what the process did, where that is not the step's kind.
    """
    kind = step["kind"]
    what = what or kind
    code = _CODES[kind]
    subject = step["subject"] if kind != "compile" else step["subject"].partition(" (")[0]
    where, when = tuple(step["where"]), ""
    if kind == "load" and loading["plugin"]:
        when = f" while plugin {loading['plugin']} was loading"
        where = (loading["where"],) if loading["whose"] else ()  # a built-in plugin only had its turn
        subject = loading["plugin"] if loading["whose"] == "own" else subject
    if ended.is_hanging:
        why = f"{what} was still running after {seconds:g} s{when}, and its process was ended"
        return Finding(code, subject, why, where, ("look at the stack in the log", "or raise --timeout"), log=ended.log)
    if kind == "prove" and -ended.code in _FAULTS:
        code = "OUT_OF_BOUNDS"
    remedies = list(_remedies(kind, step["target"], ended))
    if when and loading["whose"] == "other":
        remedies.append("it may be the plugin that was loading too, which is another distribution's")
    why = f"{what} ended its process with {_how(ended.code)}{when}"
    return Finding(code, subject, why, where, tuple(remedies), log=ended.log)


def _remedies(kind: str, target: str, ended: Ended) -> Iterator[str]:
    """Say where to look: a crash has a log, what ends its process on purpose has none."""
    if ended.log:
        yield "look at the log"
    if ended.code >= 0 and kind in _RUNS:
        yield f"look for os._exit in {_RUNS[kind]}, and in threads that the plugin starts"
    is_on_device = kind == "prove" and target != CPU
    yield f"run it alone, under a debugger{' or compute-sanitizer' if is_on_device else ''}"


def _how(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
