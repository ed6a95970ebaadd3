"""What all child processes of one check have reported so far."""

from collections.abc import Sequence

from kernel_muster.audit.plugin_check.process.child import Ending
from kernel_muster.audit.plugin_check.protocol.events import (
    Builds,
    Done,
    Event,
    Finished,
    Kind,
    Listed,
    ListedPlugin,
    Loading,
    Started,
    StepHead,
    Stopped,
)
from kernel_muster.audit.plugin_check.protocol.machine_code import EntryRow, WarningRow
from kernel_muster.audit.plugin_check.rows import Outcome, StepRow
from kernel_muster.audit.plugin_check.steps.step import is_refusing
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.messages.message import message

#: The code of a step that ended its process, by its kind.
CODES: dict[Kind, str] = {
    "load": "PLUGIN_LOAD_FAILED",
    "contract": "BAD_SPEC",
    "compile": "COMPILE_FAILED",
    "plan": "BAD_SPEC",
    "prove": "NUMERICS_FAILED",
}


class Collected:
    """Steps, findings and rows; ``open`` is the step that runs, ``loading`` the plugin that loads."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: list[str] = []
        self.heads: list[StepHead] = []
        self.steps: list[StepRow] = []
        self.findings: list[tuple[Finding, str]] = []  # with the target of the step
        self.listings: list[Listed] = []
        self.entries: list[EntryRow] = []
        self.warnings: list[WarningRow] = []
        self.of_builds: tuple[Finding, ...] = ()
        self.has_finished = False
        self.open: StepHead | None = None
        self.loading = Loading()
        self.stopped: Stopped | None = None
        self.endings: list[Ending] = []

    @property
    def running(self) -> str:
        """The name of the step that runs."""
        return self.open.name if self.open is not None else ""

    @property
    def total(self) -> int:
        """How many steps there are; 0 as long as that is not known."""
        return self.listings[-1].steps if self.listings else 0

    @property
    def plugins(self) -> tuple[ListedPlugin, ...]:
        """The plugins as the last child has listed them."""
        return self.listings[-1].plugins if self.listings else ()

    def begin(self) -> None:
        """Begin with a new child."""
        self.loading = Loading()

    def take(self, event: Event) -> bool:
        """Take one event of a child; whether it begins or ends a step, so that time counts anew."""
        match event:
            case Loading():
                self.loading = event
                return False
            case Listed():
                self.listings.append(event)
            case Builds():
                self.of_builds = event.findings
            case Stopped():
                self.stopped = event
            case Started():
                self._lose_open_step()
                self.open = event.step
            case Finished():
                self._lose_open_step()
                self.has_finished = True
            case Done():
                self.open = None
                self.entries.extend(event.entries)
                self.warnings.extend(event.warnings)
                self.add(event.step, event.findings, event.seconds, event.skipped)
        return True

    def add(self, step: StepHead, found: Sequence[Finding], seconds: float, skipped: str = "") -> None:
        """Add a step that is over."""
        outcome: Outcome = "skipped" if skipped else "failed" if any(map(is_refusing, found)) else "ok"
        reason = skipped or ", ".join(dict.fromkeys(finding.code for finding in found))
        row = StepRow(
            kind=step.kind,
            subject=step.subject,
            target=step.target,
            outcome=outcome,
            seconds=round(seconds, 3),
            reason=reason,
        )
        self.heads.append(step)
        self.steps.append(row)
        self.findings.extend((finding, step.target) for finding in found)
        self.done.append(step.name)
        self.failed.extend([step.name] if outcome == "failed" else [])

    def _lose_open_step(self) -> None:
        """Fail a step whose end never came, though the process went on."""
        if self.open is not None:
            why = message("plugin_check.lost", step=self.open.kind)
            remedies = (message("remedy.stray_writes"),)
            found = Finding(CODES[self.open.kind], self.open.subject, why, self.open.where, remedies)
            self.add(self.open, [found], 0.0)
        self.open = None
