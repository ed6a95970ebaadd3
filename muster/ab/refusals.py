"""A refused arm, in the words of its options: a boot names the levers and plugins that it was given."""

from collections.abc import Iterator
from dataclasses import replace

from kernel_muster.ab.arms import Arm
from kernel_muster.audit.report import FindingRow, Report
from kernel_muster.audit.rules.levers import GIVEN
from kernel_muster.registry.messages.arm import of_arm
from kernel_muster.registry.messages.message import Message, quoted


def told(report: Report, arm: Arm) -> Report:
    """Return an arm's report whose findings name ``--b NAME=VALUE`` and ``--b-plugin`` where those are meant."""
    return replace(report, findings=tuple(_told(row, arm) for row in report.findings))


def _told(row: FindingRow, arm: Arm) -> FindingRow:
    if row.code == "PLUGIN_NOT_FOUND" and row.subject in arm.plugins:
        option = f"--{arm.name.lower()}-plugin"
        return replace(row, why=quoted(row.why).with_values(option=option), where=(option,))
    remedies = tuple(_of_arm(quoted(remedy), arm) for remedy in row.remedies)
    return replace(row, where=tuple(_where(row, arm)), remedies=remedies)


def _of_arm(remedy: Message, arm: Arm) -> Message:
    named = {str(remedy.values.get(name)) for name in ("lever", "other")}
    return remedy.for_audience(of_arm(arm.name.lower())) if named & arm.levers.keys() else remedy


def _where(row: FindingRow, arm: Arm) -> Iterator[str]:
    """Yield where a finding comes from: an option of the arm, or the environment."""
    names = iter((row.subject, *filter(None, [row.parameters.get("other")])))
    for place in row.where:
        name = next(names, "")
        if place != GIVEN:
            yield place
        elif name in arm.levers:
            yield f"--{arm.name.lower()} {name}={arm.levers[name]}"
        else:
            yield "environment"
