"""What refused an arm, in the words of its options: boots speak of levers and plugins that they were given."""

import re
from collections.abc import Iterator
from dataclasses import replace

from kernel_muster.ab.arms import Arm
from kernel_muster.audit.report import FindingRow, Report
from kernel_muster.audit.rules.levers import GIVEN

_OTHER = re.compile(r"contradicts (MUSTER_\w+)=")


def told(report: Report, arm: Arm) -> Report:
    """Return an arm's report whose findings name ``--b NAME=VALUE`` and ``--b-plugin`` where those are meant."""
    return replace(report, findings=tuple(_told(row, arm) for row in report.findings))


def _told(row: FindingRow, arm: Arm) -> FindingRow:
    letter = arm.name.lower()
    if row.code == "PLUGIN_NOT_FOUND" and row.subject in arm.plugins:
        option = f"--{letter}-plugin"
        return replace(row, why=row.why.replace("--plugin", option, 1), where=(option,))
    remedies = row.remedies
    for name in (row.subject, *_OTHER.findall(row.why)):
        if name in arm.levers:
            drop = rf"drop --{letter} {name}"
            remedies = tuple(re.sub(rf"\bunset (it|{name})\b", drop, text) for text in remedies)
    return replace(row, where=tuple(_where(row, arm)), remedies=remedies)


def _where(row: FindingRow, arm: Arm) -> Iterator[str]:
    """Yield where a finding comes from; what its boot was given is the arm's, or stood in the environment."""
    names = iter((row.subject, *_OTHER.findall(row.why)))
    for place in row.where:
        name = next(names, "")
        if place != GIVEN:
            yield place
        elif name in arm.levers:
            yield f"--{arm.name.lower()} {name}={arm.levers[name]}"
        else:
            yield "environment"
