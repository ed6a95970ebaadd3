"""Rules about the measured table that decides thresholds."""

from collections.abc import Iterator

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.messages.message import message, quoted


def stale_table(evidence: Evidence) -> Iterator[Finding]:
    """The table in force was measured on another device, with another driver, or with other kernels."""
    facts = evidence.tuning
    if facts is not None and facts.stale:
        yield Finding(
            "TUNING_STALE",
            facts.table,
            message("tuning_stale", differences=tuple(map(quoted, facts.stale))),
            remedies=(message("remedy.measure_again"), message("remedy.built_in_thresholds")),
        )


def uncovered_shapes(evidence: Evidence) -> Iterator[Finding]:
    """Projections of the model lie outside the range that the table in force covers."""
    facts = evidence.tuning
    if facts is not None and facts.uncovered:
        why = message("tuning_uncovered", range=facts.range, shapes=tuple(facts.uncovered))
        yield Finding("TUNING_UNCOVERED", facts.table, why, remedies=(message("remedy.measure_shapes"),))
