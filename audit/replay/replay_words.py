"""Remedies for an engine: what to do about a finding where nothing but a trace is known of the boot."""

from collections.abc import Iterable
from dataclasses import replace

from kernel_muster.audit.replay.trace_model import Trace
from kernel_muster.audit.verdict import Judged, Verdict
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.levers import CORE_LEVERS
from kernel_muster.registry.messages.message import message

_REMEDIES = {
    "VACUOUS_AUDIT": (message("remedy.trace_lookups"),),
    "UNKNOWN_LEVER": (message("remedy.trace_lever"), message("remedy.trace_name")),
    "DUPLICATE_KERNEL": (message("remedy.trace_overrides"), message("remedy.register_one")),
}

_UNKNOWN_MODEL = (message("remedy.trace_manifest"), message("remedy.trace_model"))


def is_own(trace: Trace) -> bool:
    """Whether a boot of this program wrote the trace: then it names the levers that every boot has."""
    return all(lever.name in trace.levers for lever in CORE_LEVERS)


def of_unknown_models(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings of a replay with what helps against a model that nobody knows: no plugin gives its manifest."""
    return [replace(f, remedies=_UNKNOWN_MODEL) if f.code == "UNKNOWN_MODEL" else f for f in findings]


def for_engine(verdict: Verdict) -> Verdict:
    """Return the verdict with remedies that an engine can follow: it has neither our levers nor our builders."""
    return Verdict(tuple(map(_reworded, verdict.findings)))


def _reworded(judged: Judged) -> Judged:
    remedies = _REMEDIES.get(judged.finding.code)
    return judged if remedies is None else replace(judged, finding=replace(judged.finding, remedies=remedies))
