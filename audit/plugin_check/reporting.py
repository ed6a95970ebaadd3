"""The report of ``muster plugin check``: what all processes have reported, judged as for a release."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kernel_muster.audit.plugin_check.collected import Collected
from kernel_muster.audit.plugin_check.process.child import Ending
from kernel_muster.audit.plugin_check.process.supervisor import can_supervise
from kernel_muster.audit.plugin_check.protocol.events import StepHead
from kernel_muster.audit.plugin_check.rows import PluginReport, StageAsked, StepRow
from kernel_muster.audit.reporting import finding_row
from kernel_muster.audit.verdict import judge
from kernel_muster.registry.backends.nvrtc.headers import EXTRAS
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.messages.message import Message, message
from kernel_muster.registry.wording import listed

_NOWHERE = re.compile(r"(?!)")


def report_of(
    distribution: str,
    version: str,
    collected: Collected,
    stage: StageAsked | None = None,
    plugin: str | None = None,
    more: Iterable[Finding] = (),
) -> PluginReport:
    """Return the report of a check; ``more`` are findings of the parent itself."""
    # What does not compile cannot be proven either, and says so with the same words.
    distinct = {
        (found.code, found.subject, found.why): (found, target) for found, target in reversed(collected.findings)
    }
    undone = {"compiled": _left(collected.steps, "compile"), "proven": _left(collected.steps, "prove")}
    found = [*_folded(reversed(distinct.values())), *collected.of_builds]
    found += _unreached(collected.steps, stage, undone) if stage is not None else []
    found += more
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
        notes=tuple(_notes(collected.endings)),
    )


def _notes(endings: Sequence[Ending]) -> Iterator[Message]:
    """Yield what the processes did that is no finding."""
    if left := [command for ending in endings for command in ending.left]:
        yield message("plugin_check.left", commands=listed(left, separator="; "))
    if unended := [command for ending in endings for command in ending.unended]:
        yield message("plugin_check.unended", commands=listed(unended, separator="; "))
    if not can_supervise():
        yield message("plugin_check.unsupervised")
    if dropped := sum(ending.dropped for ending in endings):
        yield message("plugin_check.dropped", count=dropped)


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
    collected = Collected()
    finding = Finding("PLUGIN_LOAD_FAILED", distribution, why, remedies=(remedy,), log=log)
    collected.add(StepHead(name="install", kind="install", subject=distribution), [finding], 0.0)
    return report_of(distribution, "", collected)
