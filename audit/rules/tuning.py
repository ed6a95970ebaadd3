"""Rules about the measured table that decides thresholds."""

from collections.abc import Iterator

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.findings import Finding


def stale_table(evidence: Evidence) -> Iterator[Finding]:
    """The table in force was measured on another device, with another driver, or with other kernels."""
    facts = evidence.tuning
    if facts is not None and facts.stale:
        yield Finding(
            "TUNING_STALE",
            facts.table,
            "; ".join(facts.stale),
            remedies=(
                "measure again on this device: muster tune --output FILE, and name it: MUSTER_TUNING_TABLE=FILE",
                "or decide by the built-in thresholds: MUSTER_TUNING_TABLE=none",
            ),
        )


def uncovered_shapes(evidence: Evidence) -> Iterator[Finding]:
    """Projections of the model lie outside the range that the table in force covers."""
    facts = evidence.tuning
    if facts is not None and facts.uncovered:
        yield Finding(
            "TUNING_UNCOVERED",
            facts.table,
            f"it covers {facts.range}; outside: {', '.join(facts.uncovered)}",
            remedies=("measure these shapes too: muster tune MODEL --output FILE, or --shape NxK",),
        )
