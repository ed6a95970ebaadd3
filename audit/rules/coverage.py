"""Rules against the check that passes because it checked nothing."""

from collections.abc import Iterator

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.sethash import set_hash as compute_set_hash
from kernel_muster.audit.stages import reached_stage
from kernel_muster.registry.findings import Finding, Severity
from kernel_muster.registry.specs import STAGES


def vacuous(evidence: Evidence) -> Iterator[Finding]:
    """No layer looked anything up."""
    # A live block that raised goes on as its exception; a trace has nothing else that would stop anybody.
    if not evidence.rows and (evidence.is_complete or evidence.is_replay):
        yield Finding(
            "VACUOUS_AUDIT",
            evidence.manifest.name,
            "the boot ended without a single lookup, so that nothing was checked",
            remedies=("build the model inside the boot: km.build_model(boot.manifest, boot.kernels)",),
        )


def set_hash(evidence: Evidence) -> Iterator[Finding]:
    """The kernels chosen are not the ones that were expected."""
    expected = evidence.asked.expect_set_hash
    actual = compute_set_hash(evidence)
    if expected is not None and expected != actual:
        yield Finding(
            "SET_HASH_MISMATCH",
            "set hash",
            f"expected {expected}, got {actual}",
            remedies=(
                "compare with the report of the expected set: muster diff A.json B.json",
                "install the expected versions, or qualify this set and expect its hash",
            ),
        )


def unchecked_stage(evidence: Evidence) -> Iterator[Finding]:
    """A stage was asked for that did not run."""
    wanted = evidence.asked.stage
    reached = reached_stage(evidence)
    # A build or proof that failed says itself why the stage was not reached; so does what kept the model from the end.
    explained = (
        not evidence.is_complete
        or evidence.proof_findings
        or any(state.failure for state in evidence.states.values())
        or any(finding.severity("serve") is Severity.REFUSE for finding in evidence.opening)
    )
    if wanted is not None and STAGES.index(wanted) > STAGES.index(reached) and not explained:
        yield Finding(
            "UNCHECKED",
            wanted,
            f"stage {wanted} was asked for, but the kernels reached {reached} on {evidence.target}",
            remedies=(f"ask for --stage {reached}", f"or audit where stage {wanted} can run"),
        )
