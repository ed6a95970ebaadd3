"""How far the chosen kernels have been proven."""

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.specs import Registered, Stage


def stage_of(registered: Registered, evidence: Evidence) -> Stage:
    """Return the stage of one chosen kernel.

    A host kernel is loaded once its plugin is imported: there is nothing to compile. Device kernels stay registered
    until a build says otherwise.
    """
    return "loaded" if evidence.target.is_cpu and not evidence.is_replay else "registered"


def reached_stage(evidence: Evidence) -> Stage:
    """Return the lowest stage among the chosen kernels."""
    return "loaded" if evidence.target.is_cpu and not evidence.is_replay else "registered"
