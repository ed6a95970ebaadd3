"""The rules of the audit: each module looks at the evidence and yields findings.

A new rule is one function here or in a new module, listed in :data:`RULES`.
"""

from collections.abc import Callable, Iterable

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.rules import builds, coverage, late, levers, lookups, manifest, plugins, tuning
from kernel_muster.registry.findings import Finding

Rule = Callable[[Evidence], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    lookups.absent_keys,
    lookups.renamed_keys,
    lookups.slow_tiers,
    lookups.signatures,
    lookups.layouts,
    plugins.duplicate_kernels,
    plugins.overridden_kernels,
    plugins.override_circles,
    plugins.dead_registrations,
    manifest.waiver_states,
    manifest.expected_present,
    levers.failed_requests,
    levers.disabled_unknown,
    levers.preferred_unused,
    tuning.stale_table,
    tuning.uncovered_shapes,
    builds.failed_builds,
    builds.unreadable_sources,
    builds.of_all_builds,
    builds.failed_proofs,
    coverage.vacuous,
    coverage.set_hash,
    coverage.unchecked_stage,
    coverage.plain_arch,
    late.late_misses,
    late.late_hits,
    late.late_compiles,
    late.late_registrations,
)
