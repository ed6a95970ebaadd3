"""What a live boot does beyond asking: wait for builds and loads, and run the proofs that a stage asks for."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.contract.contracts import Case
from kernel_muster.registry.contract.specs import STAGES, KernelSpec, Stage
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.launch.runners import BuildState, Progress, Runner
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.running import running
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.values import frozen

if TYPE_CHECKING:
    from kernel_muster.audit.proof.proofs import CaseResult

#: For one case. It is what plugin check gives all cases of a kernel together, unless it is told otherwise.
CASE_S = 120.0


@frozen
class Checked:
    """How far each kernel that serves has come, what builds said of all together, and what proofs said."""

    states: Mapping[KernelKey, BuildState] = field(default_factory=dict)
    of_builds: tuple[Finding, ...] = ()
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


def _state(runner: Runner, spec: KernelSpec) -> BuildState:
    """Wait for a kernel; an exception that no builder foresaw is a finding about it, and hides no other kernel."""
    try:
        return runner.state(spec)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (sources and backends are a plugin's)
        why = message("compile_failed.raised", error=one_line(error))
        remedies = (message("remedy.correct_sources"), message("remedy.report_it"))
        return BuildState(
            "registered", Finding("COMPILE_FAILED", spec.key, why, remedies=remedies, log=cause_chain(error))
        )


def _planned(session: LookupSession, spec: KernelSpec, state: BuildState) -> BuildState:
    """Refuse a compiled kernel that would read an argument as something that it is not: of that its cubin says nothing.

    It is a plugin's planner that is asked, which no kernel but Numba's needs.
    """
    if state.failure is not None or not state.resources or spec.backend_name != "numba_cuda":
        return state
    from kernel_muster.audit.proof.plan_check import elements_finding

    failure = elements_finding(spec, session.catalog.contracts[spec.contract], state.resources)
    return replace(state, failure=failure) if failure is not None else state


def _show_case(show: Progress, done: int, total: int, key: KernelKey, case: Case) -> None:
    """Say which case begins: one that does not end is the last that was named."""
    show(done, total, f"proof of {key}, case {case.name}")


def check_kernels(
    session: LookupSession, evidence: Evidence, stage: Stage | None, progress: Progress | None = None
) -> Checked:
    """Wait for all kernels that serve; with stage ``proven`` run the cases of those that are loaded."""
    with suppress(Exception, SystemExit), running("the builds"):  # what a build raised, its kernel's state says
        session.runner.join(progress)
    chosen = {key: d.chosen for key in sorted(evidence.asked_keys) if (d := evidence.decide(key)).chosen is not None}
    states = {
        key: _planned(session, registered.spec, _state(session.runner, registered.spec))
        for key, registered in chosen.items()
        if registered
    }
    of_builds = session.runner.findings()
    if stage != "proven":
        return Checked(states, of_builds)
    from kernel_muster.audit.proof.proofs import (  # an audit without proofs starts faster
        device_memory,
        host_memory,
        prove,
    )

    results: list[CaseResult] = []
    device = session.target.device
    memory = host_memory() if device is None else device_memory(device.ordinal)
    show = progress or (lambda done, total, name: None)
    for done, (key, state) in enumerate(states.items()):
        handle = session.handle_of(key)
        if handle is None or state.failure is not None or STAGES.index(state.stage) < STAGES.index("loaded"):
            continue
        begin = partial(_show_case, show, done, len(states), key)
        results.extend(prove(handle, memory, session.handle_of, begin=begin, seconds=CASE_S))
        if results and results[-1].is_last:
            break
        show(done + 1, len(states), f"proof of {key}")
    return Checked(states, of_builds, tuple(results))
