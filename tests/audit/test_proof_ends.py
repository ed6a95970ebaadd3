"""Proofs of kernels that do not end, and of a stopped device: no case passes, and the audit continues."""

import gc
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import kernel_muster as km
import pytest
from kernel_muster.audit.proof import proofs
from kernel_muster.audit.proof.proofs import host_memory, prove
from kernel_muster.registry.hardware import stuck
from kernel_muster.registry.plugin_code.watch import Worker


def test_device_that_stops_ends_the_proofs(handle_of):
    def dead():
        raise RuntimeError("cudaErrorIllegalAddress")

    memory = replace(host_memory(), wait=dead)
    (result,) = prove(handle_of("silu::silu_mul"), memory, handle_of)
    assert result.is_last
    assert result.findings[0].code == "OUT_OF_BOUNDS"
    assert "kernels after this one are not proven" in result.findings[0].why


def test_host_kernel_that_does_not_end_has_not_passed_and_hides_no_other(world, monkeypatch):
    monkeypatch.setattr("kernel_muster.audit.checking.CASE_S", 0.5)
    is_over = threading.Event()

    def loops(x, out):
        while not is_over.is_set():
            time.sleep(0.01)

    kernels = [world.spec("acme::a", backend=km.PythonKernel(loops)), world.spec("acme::b")]
    plugins = {"acme": world.plugin(kernels=kernels)}
    try:
        outcome = world.run(world.ask("acme::a", "acme::b"), plugins, stage="proven")
    finally:
        is_over.set()
    (found,) = outcome.report.findings
    assert (found.code, found.subject, found.severity) == ("NUMERICS_FAILED", "acme::a", "refuse")
    assert found.why == "case one: it was still running after 0.5 s, and other cases were not tried"
    assert "in loops" in found.log
    assert {row.key: row.stage for row in outcome.report.kernels} == {"acme::a": "loaded", "acme::b": "proven"}


@pytest.fixture
def device(monkeypatch):
    """Stand in for a device: what a hanging kernel has launched ends when the test does, and no earlier."""
    monkeypatch.setattr("kernel_muster.audit.checking.CASE_S", 0.5)
    monkeypatch.setattr(stuck, "_STUCK", {})
    monkeypatch.setattr(stuck, "_KEPT", [])
    is_over, launched, entered = threading.Event(), [], []

    def wait():
        if launched:
            is_over.wait()

    worker = Worker(lambda: entered.append(threading.get_ident()))
    memory = replace(host_memory(), wait=wait, watched=worker.watched, device=3)
    monkeypatch.setattr(proofs, "host_memory", lambda: memory)
    yield SimpleNamespace(launched=launched, entered=entered, memory=memory)
    is_over.set()


def hanging(device, then=None):
    """Return a kernel whose launch does not end, and which may raise after it."""

    def launches(x, out):
        device.launched.append("x")
        if then is not None:
            raise then

    return km.PythonKernel(launches)


@pytest.mark.parametrize("then", [None, RuntimeError("its second launch was refused")])
def test_launch_that_does_not_end_gives_the_device_up_and_the_boot_is_judged(world, device, then):
    kernels = [world.spec("acme::a"), world.spec("acme::b", backend=hanging(device, then)), world.spec("acme::c")]
    build = world.ask("acme::a", "acme::b", "acme::c")
    outcome = world.run(build, {"acme": world.plugin(kernels=kernels)}, stage="proven")
    assert isinstance(outcome.error, km.BootRefused)
    assert outcome.codes == ["NUMERICS_FAILED", "UNCHECKED"]
    failed, unchecked = outcome.finding("NUMERICS_FAILED"), outcome.finding("UNCHECKED")
    assert (failed.subject, failed.severity) == ("acme::b", "refuse")
    assert failed.why == "case one: it was still running after 0.5 s, and cuda:3 is given up"
    assert "in wait" in failed.log
    assert unchecked.subject == "acme::c"
    assert unchecked.why.startswith("it was not proven: cuda:3 still runs acme::b, case one, which did not end: ")
    stages = {"acme::a": "proven", "acme::b": "loaded", "acme::c": "loaded"}
    assert {row.key: row.stage for row in outcome.report.kernels} == stages


def test_thread_of_the_cases_enters_the_device_once_and_first(world, device):
    world.run(world.ask("acme::a"), {"acme": world.acme("acme::a")}, stage="proven")
    assert len(device.entered) == 1
    assert threading.get_ident() not in device.entered


def test_what_holds_memory_of_a_stuck_device_is_kept(world, device):
    class Model:
        pass

    def serves():
        model = Model()
        outcome = world.run(world.ask("acme::b"), {"acme": acme}, stage="proven")
        return weakref.ref(model), outcome.error is not None

    acme = world.plugin(kernels=[world.spec("acme::b", backend=hanging(device))])
    held, was_refused = serves()
    assert was_refused
    assert held() is not None
    stuck._KEPT.clear()
    gc.collect()
    assert held() is None


def test_device_that_is_stuck_gets_no_other_case(handle_of, device):
    stuck.mark_stuck(3, "acme::b, case one")
    (result,) = prove(handle_of("silu::silu_mul"), device.memory, handle_of)
    assert [finding.code for finding in result.findings] == ["UNCHECKED"]
    assert device.entered == []
    others = replace(device.memory, device=4)
    assert [f for result in prove(handle_of("silu::silu_mul"), others, handle_of) for f in result.findings] == []
