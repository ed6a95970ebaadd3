"""The decision to draft: a verify pass must give more tokens than plain steps in the same time."""

from kernel_muster.models.policy.evidence import GB10, Evidence, Threshold
from kernel_muster.registry.errors import UsageError

# A mean over fewer steps is unreliable: acceptance moved between 1.72 and 1.93 in single runs of one pair.
LEAST_STEPS = Threshold(
    "least verify steps before speculation may be suspended",
    16,
    Evidence(GB10, "1.72 against 1.93 accepted drafts a step in single runs of one pair", "the edge itself"),
)


def speculation_pays(steps: int, accepted: int, cost_ratio: float, arch: str, forced: bool = False) -> bool:
    """Whether to go on drafting after ``steps`` verify steps with ``accepted`` drafts in all.

    ``cost_ratio`` is the time of one drafting and verify step over that of one plain step. A step gives its accepted
    drafts and one token more. ``forced`` (MUSTER_MTP_GATE_FORCE) passes the gate.
    """
    if steps < 0 or accepted < 0 or not cost_ratio > 0:
        raise UsageError(
            f"{steps} steps, {accepted} accepted, cost {cost_ratio}: expected none below 0, a cost above 0"
        )
    if forced or steps < LEAST_STEPS.at(arch):
        return True
    return (steps + accepted) / steps > cost_ratio
