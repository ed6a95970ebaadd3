"""Remedies that fit a command: without a GPU an audit can take another target, a measurement cannot."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

from kernel_muster.audit.report import FindingRow, Report

Purpose = Literal["measure", "decode"]
_FOLDER = "or write a manifest for it, and give the folder that its own lies in: --manifests FOLDER"
_VISIBLE = "make the GPU and its driver visible to this process"


def fitted(report: Report, purpose: Purpose) -> Report:
    """Return a report whose NO_DEVICE findings say what helps here: it is written for an audit otherwise."""
    return replace(report, findings=tuple(_fitted(row, purpose) for row in report.findings))


def _fitted(row: FindingRow, purpose: Purpose) -> FindingRow:
    if row.code != "NO_DEVICE":
        return row
    remedies = _to_measure(row.why) if purpose == "measure" else _to_decode()
    return replace(row, remedies=tuple(remedies))


def of_folders(report: Report) -> Report:
    """Return a report whose remedies name ``--manifests``, for commands of several models: these have no --manifest."""
    return replace(report, findings=tuple(map(_of_folders, report.findings)))


def _of_folders(row: FindingRow) -> FindingRow:
    def fits(remedy: str) -> str:
        return _FOLDER if row.code == "UNKNOWN_MODEL" and "--manifest FILE" in remedy else remedy

    return replace(row, remedies=tuple(map(fits, row.remedies)))


def _to_decode() -> Iterator[str]:
    yield _VISIBLE
    yield "decode on the host on purpose, at reduced size: --target cpu"
    yield "audit without a device, and decode nothing: muster audit MODEL --target sm_90a"


def _to_measure(why: str) -> Iterator[str]:
    if why.startswith("the driver sees") and not why.startswith("the driver sees 0 "):
        yield "name a GPU that the driver sees (nvidia-smi -L lists them), or make this one visible to this process"
        return
    yield "run it on a machine with an NVIDIA GPU, sm_80 or newer: it measures, and nothing can stand in for the GPU"
    if why.startswith("libcuda"):
        yield "on that machine: install NVIDIA's driver, which brings libcuda.so.1; start a container with its GPUs"
    else:
        yield f"on that machine: {_VISIBLE} (CUDA_VISIBLE_DEVICES, options of the container)"
    if find_spec("cupy") is None:
        yield "CuPy is not installed here: install the extra for the driver's CUDA, kernel-muster[cuda13] or [cuda12]"
