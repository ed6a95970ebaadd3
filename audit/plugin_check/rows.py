"""The report of ``muster plugin check``, as plain data."""

from typing import Literal

from kernel_muster.audit.plugin_check.protocol.events import Kind, ListedPlugin
from kernel_muster.audit.plugin_check.protocol.machine_code import EntryRow, WarningRow
from kernel_muster.audit.report import FindingRow
from kernel_muster.registry.values import frozen

SCHEMA = "kernel-muster/plugin-check"
VERSION = "1.4"
Outcome = Literal["ok", "failed", "skipped"]
StageAsked = Literal["compiled", "proven"]


@frozen(kw_only=True)
class StepRow:
    """One step: its kind, its subject, its target and its outcome."""

    kind: Kind
    subject: str
    target: str
    outcome: Outcome
    seconds: float
    reason: str = ""


@frozen(kw_only=True)
class PluginReport:
    """Everything that the author's kit has found about one distribution, or about the one plugin of it that was named.

    ``stage_asked`` refuses for kernels below it, ``not_done`` counts those below proven. ``notes`` are no findings:
    processes that were left running, and lines on the check's channel that were not its own.
    """

    schema: str = SCHEMA
    version: str = VERSION
    distribution: str
    distribution_version: str
    verdict: Literal["passed", "refused"]
    plugins: tuple[ListedPlugin, ...] = ()
    steps: tuple[StepRow, ...] = ()
    findings: tuple[FindingRow, ...] = ()
    # since 1.1
    stage_asked: str = ""
    not_done: tuple[str, ...] = ()
    # since 1.2
    plugin_asked: str = ""
    entries: tuple[EntryRow, ...] = ()
    warnings: tuple[WarningRow, ...] = ()
    # since 1.3
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing refuses."""
        return self.verdict == "passed"
