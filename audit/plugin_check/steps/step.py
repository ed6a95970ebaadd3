"""One step of ``muster plugin check``."""

from collections.abc import Callable, Iterable

from kernel_muster.audit.plugin_check.protocol.events import Kind, StepHead
from kernel_muster.audit.plugin_check.protocol.machine_code import EntryRow, WarningRow
from kernel_muster.registry.findings import Finding, Severity
from kernel_muster.registry.values import frozen

Told = Finding | EntryRow | WarningRow


@frozen
class Step:
    """One thing to check, or the reason why it is ``skipped`` here. ``where`` lies the code that it runs, if known.

    ``keys`` are the kernels that a compilation is for. ``number`` tells steps apart that are otherwise called alike.
    """

    kind: Kind
    subject: str
    target: str
    run: Callable[[], Iterable[Told]]
    skipped: str = ""
    where: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    number: int = 1

    @property
    def name(self) -> str:
        """What the step is called between the processes."""
        number = f"({self.number})" if self.number > 1 else ""
        return " ".join(filter(None, (self.kind, self.subject, self.target, number)))

    @property
    def head(self) -> StepHead:
        """The step without its work."""
        return StepHead(
            name=self.name,
            kind=self.kind,
            subject=self.subject,
            target=self.target,
            keys=self.keys,
            where=self.where,
        )


class DeviceStopped(Exception):
    """The device answers nothing more in this process."""


def is_refusing(finding: Finding) -> bool:
    """Whether a finding refuses a plugin: an author's kit judges as for a release."""
    return finding.severity("qualify") is Severity.REFUSE
