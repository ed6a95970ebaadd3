"""Targets by name, and the messages of a machine without a usable GPU."""

import sys

import pytest
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware import stuck, target
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Device, resolve_target


def devices(*capabilities):
    return [Device(n, f"GPU {n}", capability, 1, 2**30, "13.0") for n, capability in enumerate(capabilities)]


@pytest.fixture
def two_gpus(monkeypatch):
    """Pretend that the driver sees two GPUs and that CuPy imports."""
    monkeypatch.setattr(target, "read_devices", lambda: devices((9, 0), (12, 1)))
    monkeypatch.setitem(sys.modules, "cupy", sys)


@pytest.fixture
def no_driver(monkeypatch):
    def read():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(target, "read_devices", read)


def test_device_that_is_stuck_is_none(two_gpus, monkeypatch):
    monkeypatch.setattr(stuck, "_STUCK", {})
    monkeypatch.setattr(stuck, "_KEPT", [])
    stuck.mark_stuck(1, "acme::double, case one")
    found, finding = resolve_target("cuda:1")
    assert (found, finding.code) == (None, "NO_DEVICE")
    assert finding.why.startswith("cuda:1 still runs acme::double, case one, which did not end: ")
    assert resolve_target("cuda:0")[0].device.ordinal == 0


def test_cpu_only_when_named(no_driver):
    assert resolve_target("cpu") == (CPU_TARGET, None)
    for name in (None, "cuda", "cuda:0"):
        found, finding = resolve_target(name)
        assert found is None
        assert finding.code == "NO_DEVICE"
        assert "libcuda" in finding.why
        assert any("--target cpu" in remedy for remedy in finding.remedies)


@pytest.mark.parametrize("name", ["sm_90a", "sm_121a", "sm_100f", "sm_80", "sm_90"])
def test_architecture_alone_needs_no_device(no_driver, name):
    found, finding = resolve_target(name)
    assert finding is None
    assert (found.name, str(found.arch), found.device, found.is_cpu) == (name, name, None, False)


@pytest.mark.parametrize(
    ("name", "ordinal", "arch"), [(None, 0, "sm_90a"), ("cuda", 0, "sm_90a"), ("cuda:1", 1, "sm_121a")]
)
def test_device_has_its_canonical_architecture(two_gpus, name, ordinal, arch):
    found, finding = resolve_target(name)
    assert finding is None
    assert (found.device.ordinal, str(found.arch), found.name) == (ordinal, arch, f"cuda:{ordinal}")
    assert str(found) == f"cuda:{ordinal} ({arch})"


def test_device_that_is_not_there_says_how_many_are(two_gpus):
    found, finding = resolve_target("cuda:2")
    assert (found, finding.code) == (None, "NO_DEVICE")
    assert "2 GPU(s)" in finding.why


def test_driver_without_cupy_is_a_finding_of_its_own(two_gpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    found, finding = resolve_target(None)
    assert (found, finding.code) == (None, "TOOLCHAIN_MISSING")


@pytest.mark.parametrize(
    "name", ["", "gpu", "cuda:", "cuda:-1", "cuda:1234", "cuda:\u0661", "cuda:0 ", "CPU", "sm_1", "sm_80a", "Sm_90a"]
)
def test_name_that_means_nothing_is_a_usage_error(name):
    with pytest.raises(UsageError, match=r"^target: "):
        resolve_target(name)


def test_arch_of_a_target_compares_as_a_tuple():
    assert resolve_target("sm_121a")[0].arch == Arch((12, 1), "a")
