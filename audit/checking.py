"""What a live boot does beyond asking: wait for builds and loads, and run the proofs that a stage asks for."""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.lookups import LookupSession
from kernel_muster.registry.running import BuildState, Progress
from kernel_muster.registry.specs import STAGES, Stage
from kernel_muster.registry.values import frozen

if TYPE_CHECKING:
    from kernel_muster.audit.proofs import CaseResult


@frozen
class Checked:
    """How far each kernel that serves has come, and what proofs said."""

    states: Mapping[KernelKey, BuildState] = field(default_factory=dict)
    results: "tuple[CaseResult, ...]" = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What proofs found: one finding for a code and a kernel, that of its first case."""
        first: dict[tuple[str, str], Finding] = {}
        for result in self.results:
            for finding in result.findings:
                first.setdefault((finding.code, finding.subject), finding)
        return tuple(first.values())

    @property
    def proven(self) -> frozenset[KernelKey]:
        """Kernels all of whose cases passed."""
        return frozenset(r.key for r in self.results) - {r.key for r in self.results if r.findings}


def check_kernels(
    session: LookupSession, evidence: Evidence, stage: Stage | None, progress: Progress | None = None
) -> Checked:
    """Wait for all kernels that serve; with stage ``proven`` run the cases of those that are loaded."""
    session.runner.join(progress)
    chosen = {key: d.chosen for key in sorted(evidence.asked_keys) if (d := evidence.decide(key)).chosen is not None}
    states = {key: session.runner.state(registered.spec) for key, registered in chosen.items() if registered}
    if stage != "proven":
        return Checked(states)
    from kernel_muster.audit.proofs import device_memory, host_memory, prove  # an audit without proofs starts faster

    results: list[CaseResult] = []
    device = session.target.device
    memory = host_memory() if device is None else device_memory(device.ordinal)
    for done, (key, state) in enumerate(states.items(), start=1):
        handle = session.handle_of(key)
        if handle is None or STAGES.index(state.stage) < STAGES.index("loaded"):
            continue
        results.extend(prove(handle, memory, session.handle_of))
        if results and results[-1].is_last:
            break
        if progress is not None:
            progress(done, len(states), f"proof of {key}")
    return Checked(states, tuple(results))
