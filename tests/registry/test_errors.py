"""Exceptions as another process gets them."""

import copy
import pickle
from pathlib import Path

import kernel_muster as km
import pytest
from kernel_muster.models.checkpoints.errors import CheckpointError, MissingTensorError, UnsupportedQuantError
from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.errors import MusterError, UndeclaredLever


def every(kind: type[MusterError]) -> set[type[MusterError]]:
    return {kind} | {one for child in kind.__subclasses__() for one in every(child)}


def in_another_process(error: MusterError) -> MusterError:
    return pickle.loads(pickle.dumps(error))  # noqa: S301  (our own)


MADE = {
    UndeclaredLever: lambda: UndeclaredLever("MUSTER_X"),
    km.BootRefused: lambda: km.BootRefused("REFUSED: tiny", {"findings": 1}),
    CheckpointError: lambda: CheckpointError(Path("a"), "b", "c", "d", "e"),
    MissingTensorError: lambda: MissingTensorError(Path("a"), "b"),
    UnsupportedQuantError: lambda: UnsupportedQuantError(Path("a"), "b", "gptq", "config.json"),
    BuildFailure: lambda: BuildFailure("COMPILE_FAILED", "no", "log", ("repair",)),
}


@pytest.mark.parametrize("kind", sorted(every(MusterError), key=str))
@pytest.mark.parametrize("pass_on", [in_another_process, copy.copy])
def test_exception_is_the_same_in_another_process(kind, pass_on):
    if kind in MADE:
        error = MADE[kind]()
    else:  # any arguments for the constructor
        error = kind.__new__(kind, "because")
        error.failure = "what it holds"
    error.add_note("a note")
    other = pass_on(error)
    assert (type(other), str(other), other.args, vars(other)) == (type(error), str(error), error.args, vars(error))


def test_refused_boot_brings_its_report_along():
    with pytest.raises(km.BootRefused) as refused, km.boot("no-such-model", target="cpu", levers={}):
        pass
    other = in_another_process(refused.value)
    assert other.report == refused.value.report
    assert other.report.findings[0].code == "UNKNOWN_MODEL"
