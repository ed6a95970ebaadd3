"""Rules about what was built, loaded and proven before the seal."""

from collections.abc import Iterator
from dataclasses import replace

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line
from kernel_muster.registry.selection.records import LookupRow

# One cause for all kernels of a boot, whichever was built first.
_TOOLCHAIN = {"TOOLCHAIN_MISSING": "toolchain", "TOOLCHAIN_TOO_OLD": "toolchain"}


def failed_builds(evidence: Evidence) -> list[Finding]:
    """Report builds and loads that failed: one finding a cause, with all keys that it leaves without a kernel."""
    causes: dict[tuple[str, str, str], _Cause] = {}
    for row in evidence.rows:
        for key in evidence.evaluated(row):
            state = evidence.states.get(key)
            if state is None or state.failure is None:
                continue
            failure = state.failure
            subject = _TOOLCHAIN.get(failure.code, failure.subject)
            place = (failure.code, failure.why, failure.log)
            causes.setdefault(place, _Cause(replace(failure, subject=subject, where=(), layers=()))).add(key, row)
    return [cause.finding for cause in causes.values()]


def of_all_builds(evidence: Evidence) -> Iterator[Finding]:
    """Report what concerns all builds together: a cache that keeps nothing."""
    yield from evidence.of_builds


def unreadable_sources(evidence: Evidence) -> list[Finding]:
    """Report sources that cannot be read where no build has said so: nobody knows what would serve."""
    causes: dict[str, _Cause] = {}
    for row in evidence.rows:
        *_, key = evidence.evaluated(row)
        chosen = evidence.decide(key).chosen
        state = evidence.states.get(key)
        if chosen is None or (state is not None and state.failure is not None):
            continue
        error = evidence.digest_error(chosen)
        if error is None:
            continue
        failure = error.finding(str(key)) if isinstance(error, BuildFailure) else None
        if failure is None or not failure.remedies:
            remedies = (message("remedy.reinstall_backend", distribution=chosen.provider.distribution),)
            failure = Finding("COMPILE_FAILED", str(key), one_line(error), remedies=remedies, log=cause_chain(error))
        causes.setdefault(failure.why, _Cause(failure)).add(key, row)
    return [cause.finding for cause in causes.values()]


class _Cause:
    """A failure with all keys that it leaves without a kernel."""

    def __init__(self, failure: Finding) -> None:
        self._failure = failure
        self._where = dict.fromkeys(failure.where)
        self._layers = dict.fromkeys(failure.layers)
        self._explains: dict[str, None] = dict.fromkeys(failure.explains)

    def add(self, key: KernelKey, row: LookupRow) -> None:
        """Add a key and the places that asked for it."""
        self._where.update(dict.fromkeys(row.sites))
        self._layers.update(dict.fromkeys(row.layers))
        if str(key) != self._failure.subject:
            self._explains[message("consequence.no_code", key=key)] = None

    @property
    def finding(self) -> Finding:
        """The finding about the failure."""
        return replace(
            self._failure, where=tuple(self._where), layers=tuple(self._layers), explains=tuple(self._explains)
        )


def failed_proofs(evidence: Evidence) -> Iterator[Finding]:
    """Report what proofs found."""
    yield from evidence.proof_findings
