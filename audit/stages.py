"""How far the chosen kernels have been proven."""

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.contract.specs import STAGES, Stage
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.launch.runners import BuildState

_REGISTERED = BuildState("registered")


def stage_of(key: KernelKey, evidence: Evidence) -> Stage:
    """Return the stage that the kernel of a key has reached; a replay knows of registrations only."""
    state = evidence.states.get(key, _REGISTERED)
    return "proven" if key in evidence.proven else state.stage


def is_below(wanted: Stage | None, reached: Stage) -> bool:
    """Whether a stage that was asked for is not reached."""
    return wanted is not None and STAGES.index(wanted) > STAGES.index(reached)


def reached_stage(evidence: Evidence) -> Stage:
    """Return the lowest stage among the kernels that serve."""
    reached = [stage_of(key, evidence) for key in evidence.asked_keys if evidence.decide(key).chosen is not None]
    return min(reached, key=STAGES.index, default="registered")
