"""Rules against the check that passes because it checked nothing."""

from collections.abc import Iterator

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.sethash import set_hash as compute_set_hash
from kernel_muster.audit.stages import is_below, reached_stage
from kernel_muster.registry.findings import Finding, Severity
from kernel_muster.registry.hardware.arch import canonical_arch
from kernel_muster.registry.messages.message import message

_MOST_KEYS = 8


def vacuous(evidence: Evidence) -> Iterator[Finding]:
    """No layer looked anything up."""
    # A live block that raised goes on as its exception; a trace has nothing else that would stop anybody.
    if not evidence.rows and (evidence.is_complete or evidence.is_replay):
        yield Finding(
            "VACUOUS_AUDIT",
            evidence.manifest.name,
            message("vacuous_audit"),
            remedies=(message("remedy.build_inside"),),
        )


def set_hash(evidence: Evidence) -> Iterator[Finding]:
    """The kernels chosen are not the ones that were expected."""
    expected = evidence.options.expect_set_hash
    actual = compute_set_hash(evidence)
    if expected is not None and expected != actual:
        yield Finding(
            "SET_HASH_MISMATCH",
            "set hash",
            message("set_hash_mismatch", expected=expected, actual=actual),
            remedies=(message("remedy.diff"), message("remedy.expect_hash")),
        )


def plain_arch(evidence: Evidence) -> Iterator[Finding]:
    """The target is an architecture that no device is called by, and for which less may be chosen than for the device.

    What a model would ask for there is for its builder to say, so that the kernels named are all that are registered.
    """
    arch = evidence.target.arch
    if arch is None or arch == (device := canonical_arch(arch.capability)):
        return
    more = sorted(
        {
            str(one.spec.kernel_key)
            for one in evidence.catalog.kernels
            if any(code.rejects(arch) and not code.rejects(device) for code in one.spec.code_archs)
        }
    )
    shown = ", ".join(more[:_MOST_KEYS]) + (f" and {len(more) - _MOST_KEYS} more" * (len(more) > _MOST_KEYS))
    values = {"capability": f"{arch.capability[0]}.{arch.capability[1]}", "device": str(device)}
    if more:
        why = message("plain_arch", count=len(more), keys=shown, **values)
    else:
        why = message("plain_arch.unneeded", **values)
    yield Finding("PLAIN_ARCH", str(arch), why, remedies=(message("remedy.device_target", device=str(device)),))


def unchecked_stage(evidence: Evidence) -> Iterator[Finding]:
    """A stage was asked for that did not run."""
    wanted = evidence.options.stage
    reached = reached_stage(evidence)
    # A build or proof that failed says itself why the stage was not reached; so does what kept the model from the end.
    explained = (
        not evidence.is_complete
        or evidence.proof_findings
        or any(state.failure for state in evidence.states.values())
        or any(finding.severity("serve") is Severity.REFUSE for finding in evidence.opening)
    )
    if wanted is not None and is_below(wanted, reached) and not explained:
        yield Finding(
            "UNCHECKED",
            wanted,
            message("unchecked.stage", stage=wanted, reached=reached, target=str(evidence.target)),
            remedies=(message("remedy.ask_stage", stage=reached), message("remedy.audit_elsewhere", stage=wanted)),
        )
