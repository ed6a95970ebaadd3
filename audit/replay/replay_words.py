"""Remedies for an engine: what to do about a finding where nothing but a trace is known of the boot."""

from collections.abc import Iterable
from dataclasses import replace

from kernel_muster.audit.replay.trace_model import Trace
from kernel_muster.audit.verdict import Judged, Verdict
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.levers import CORE_LEVERS

_REMEDIES = {
    "VACUOUS_AUDIT": (
        "write what the layers asked for into the trace: one row of lookups for each question from one place",
    ),
    "UNKNOWN_LEVER": (
        "declare it in the trace, under declared_levers, if it is the engine's own",
        "or correct the name: the trace sets it under levers, the manifest under defaults",
    ),
    "DUPLICATE_KERNEL": (
        "let the engine decide, and the trace say so: overrides names the distribution that loses",
        "or register one of them alone",
    ),
}

_UNKNOWN_MODEL = (
    "give the manifest that the boot had: --manifest FILE, or its folder, --manifests FOLDER: a replay loads no "
    "plugins, and has none of their manifests",
    "or correct the trace's model: muster models lists all of them",
)


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
