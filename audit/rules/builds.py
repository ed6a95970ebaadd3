"""Rules about what was built, loaded and proven before the seal."""

from collections.abc import Iterator
from dataclasses import replace

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.findings import Finding

# One cause for all kernels of a boot, whichever was built first.
_TOOLCHAIN = {"TOOLCHAIN_MISSING": "toolchain", "TOOLCHAIN_TOO_OLD": "toolchain"}


def failed_builds(evidence: Evidence) -> list[Finding]:
    """Report builds and loads that failed: one finding a cause, with all keys that it leaves without a kernel."""
    causes: dict[tuple[str, str, str], Finding] = {}
    for row in evidence.rows:
        for key in evidence.evaluated(row):
            state = evidence.states.get(key)
            if state is None or state.failure is None:
                continue
            failure = state.failure
            subject = _TOOLCHAIN.get(failure.code, failure.subject)
            place = (failure.code, failure.why, failure.log)
            known = causes.get(place) or replace(failure, subject=subject, where=(), layers=())
            causes[place] = replace(
                known,
                where=tuple(dict.fromkeys((*known.where, *row.sites))),
                layers=tuple(dict.fromkeys((*known.layers, *row.layers))),
                explains=tuple(dict.fromkeys((*known.explains, f"{key} has no code"))),
            )
    return list(causes.values())


def failed_proofs(evidence: Evidence) -> Iterator[Finding]:
    """Report what proofs found."""
    yield from evidence.proof_findings
