"""Remedies that fit a command: without a GPU an audit can take another target, a measurement cannot."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

from kernel_muster.audit.render.audiences import for_audience
from kernel_muster.audit.report import FindingRow, Report
from kernel_muster.registry.messages.folders import FOLDERS
from kernel_muster.registry.messages.message import Message, message

Purpose = Literal["measure", "decode"]


def fitted(report: Report, purpose: Purpose) -> Report:
    """Return a report whose NO_DEVICE findings say what helps here: it is written for an audit otherwise."""
    return replace(report, findings=tuple(_fitted(row, purpose) for row in report.findings))


def _fitted(row: FindingRow, purpose: Purpose) -> FindingRow:
    if row.code != "NO_DEVICE":
        return row
    remedies = _to_measure(row) if purpose == "measure" else _to_decode()
    return replace(row, remedies=tuple(remedies))


def of_folders(report: Report) -> Report:
    """Return a report whose remedies name ``--manifests``, for commands of several models: these have no --manifest."""
    return for_audience(report, FOLDERS)


def _to_decode() -> Iterator[Message]:
    yield message("remedy.visible_gpu")
    yield message("remedy.decode_on_host", target="cpu")
    yield message("remedy.audit_only")


def _to_measure(row: FindingRow) -> Iterator[Message]:
    if row.template == "no_device.ordinal" and row.parameters["count"]:
        yield message("remedy.other_gpu")
        return
    yield message("remedy.gpu_machine")
    yield message("remedy.install_driver" if row.template == "no_device.driver" else "remedy.visible_there")
    if find_spec("cupy") is None:
        yield message("remedy.install_cupy")
