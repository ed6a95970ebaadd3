"""Rules about what happened after the seal."""

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.rules.lookups import declare, merge
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.messages.message import message, quoted
from kernel_muster.registry.selection.records import LookupRow

_LOOK_UP_EARLY = message("remedy.look_up_early")


def _late(evidence: Evidence, code: str, *, hit: bool) -> list[Finding]:
    found = []
    for row in evidence.late_rows:
        decisions = [evidence.decide(key) for key in evidence.evaluated(row)]
        resolved = decisions[-1].chosen is not None
        undeclared = [key for key in row.members if evidence.excuse(key) is None]
        if resolved is not hit or not (resolved or undeclared) or _compiled(evidence, row) is not None:
            continue
        reason = quoted(decisions[0].reason)
        why = message("late.hit", count=row.count) if hit else message("late.miss", count=row.count, reason=reason)
        remedies = (_LOOK_UP_EARLY, *(() if hit else (declare(evidence, key) for key in undeclared)))
        found.append(Finding(code, str(row.key), why, tuple(row.sites), remedies, tuple(row.layers)))
    return merge(found)


def late_misses(evidence: Evidence) -> list[Finding]:
    """Report lookups that missed after the seal and are not declared."""
    return _late(evidence, "LATE_MISS", hit=False)


def late_hits(evidence: Evidence) -> list[Finding]:
    """Report lookups that were answered after the seal, where no audit saw them."""
    return _late(evidence, "LATE_HIT", hit=True)


def late_compiles(evidence: Evidence) -> list[Finding]:
    """Report kernels that were built after the seal, because nothing had asked for them before."""
    why = message("late.compile")
    return merge(
        Finding("LATE_COMPILE", str(key), why, tuple(row.sites), (_LOOK_UP_EARLY,), tuple(row.layers))
        for row in evidence.late_rows
        if (key := _compiled(evidence, row)) is not None
    )


def _compiled(evidence: Evidence, row: LookupRow) -> KernelKey | None:
    """Return the kernel that had to be built for a late row; a trace that names no backend says nothing about it."""
    *_, key = evidence.evaluated(row)
    chosen = evidence.decide(key).chosen
    if chosen is None or evidence.options.stage == "registered" or key in evidence.asked_keys:
        return None
    return key if evidence.target.arch is not None and chosen.spec.backend_name not in ("", "python") else None


def late_registrations(evidence: Evidence) -> list[Finding]:
    """Report attempts to register after the seal; they had no effect."""
    return merge(
        Finding(
            "LATE_REGISTRATION",
            late.plugin,
            message("late.registration"),
            (late.site,),
            (message("remedy.register_early"),),
        )
        for late in sorted(evidence.late_registrations, key=lambda late: (late.plugin, late.site))
    )
