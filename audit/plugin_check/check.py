"""``muster plugin check``: run the steps in child processes, and turn crashes and hangs into findings.

A child that dies in a step is followed by one that leaves out what is done and that step, so that one crash hides
nothing else. The time limit is for a step. A check has passed when every step that the listed kernels must have was
reported, and none refuses.
"""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kernel_muster.audit.plugin_check.collected import CODES, Collected
from kernel_muster.audit.plugin_check.demands import missing_plugins, missing_steps
from kernel_muster.audit.plugin_check.process.child import CheckRequest, Ending, run_child
from kernel_muster.audit.plugin_check.protocol.channel import CANNOT_REPORT
from kernel_muster.audit.plugin_check.protocol.events import Loading, StepHead
from kernel_muster.audit.plugin_check.reporting import report_of
from kernel_muster.audit.plugin_check.rows import PluginReport, StageAsked
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.messages.message import message

_FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS})


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
    printed: Callable[[str], object] | None = None,
) -> PluginReport:
    """Check the plugins of a distribution that ``path`` leads to, or one of them; each step may take so many seconds.

    With ``stage``, what keeps a kernel from it refuses, be it only that a compiler or a device is not here. ``printed``
    gets the lines that plugins print, as they come. ``unpacked`` is the folder that a wheel was only put into to be
    looked at.
    """
    collected = Collected()
    request = CheckRequest(distribution, plugin, path, seconds, cache_dir, progress, printed)
    while not collected.has_finished and _run_on(collected, request):
        pass
    missing: list[Finding] = []
    if collected.has_finished:
        missing += missing_steps(collected.listings, collected.heads, subject=plugin or distribution)
        missing += missing_plugins(collected.listings, distribution, plugin, path)
    if unpacked is not None:
        collected.findings = [(_for_a_wheel(finding, unpacked), target) for finding, target in collected.findings]
    return report_of(distribution, version, collected, stage, plugin, missing)


def _run_on(collected: Collected, request: CheckRequest) -> bool:
    """Run one child; whether another one goes on with what it has left."""
    before = len(collected.done)
    ended = run_child(collected, request)
    collected.endings.append(ended)
    if collected.open is not None:
        step, collected.open = collected.open, None
        collected.add(step, [_died(step, ended, request.seconds, collected.loading)], ended.seconds)
        return step.kind != "load"
    stopped = collected.stopped
    if stopped is not None and stopped.is_usage:
        raise UsageError(stopped.why)
    if stopped is not None or (not collected.has_finished and not collected.done):
        raise MusterError(f"the child process of the check ended with {_how(ended.code)}:\n{ended.log}")
    if not collected.has_finished and len(collected.done) == before:
        # Outside a step it is only loaded, for the steps that are left.
        step = StepHead(name="load again", kind="load", subject=request.distribution)
        what = f"loading it again, for what follows {collected.done[-1]},"
        collected.add(step, [_died(step, ended, round(ended.seconds), collected.loading, what)], ended.seconds)
        return False
    return True


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


#: Whose code a step runs, by its kind; what compiles is no plugin's.
_RUNS = {
    "load": "its modules and hooks",
    "contract": "the contract's inputs and reference",
    "plan": "the planner",
    "prove": "the kernel's function",
}


def _died(step: StepHead, ended: Ending, seconds: float, loading: Loading, what: str | None = None) -> Finding:
    """Return what a step is found guilty of whose process ended, or was still running and was ended.

    ``what`` is what the process did, where that is not the step's kind.
    """
    kind = step.kind
    what = what or kind
    code = CODES[kind]
    subject = step.subject if kind != "compile" else step.subject.partition(" (")[0]
    where, when = step.where, ""
    if kind == "load" and loading.plugin:
        when = f" while plugin {loading.plugin} was loading"
        where = (loading.where,) if loading.whose else ()  # a built-in plugin only had its turn
        subject = loading.plugin if loading.whose == "own" else subject
    if ended.is_hanging:
        why = f"{what} was still running after {seconds:g} s{when}, and its process was ended"
        return Finding(code, subject, why, where, ("look at the stack in the log", "or raise --timeout"), log=ended.log)
    if ended.code == CANNOT_REPORT:
        why = message("plugin_check.channel_closed", what=what, when=when)
        return Finding(code, subject, why, where, (message("remedy.stray_closes"),), log=ended.log)
    if kind == "prove" and -ended.code in _FAULTS:
        code = "OUT_OF_BOUNDS"
    remedies = list(_remedies(kind, step.target, ended))
    if when and loading.whose == "other":
        remedies.append("it may be the plugin that was loading too, which is another distribution's")
    why = f"{what} ended its process with {_how(ended.code)}{when}"
    return Finding(code, subject, why, where, tuple(remedies), log=ended.log)


def _remedies(kind: str, target: str, ended: Ending) -> Iterator[str]:
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
