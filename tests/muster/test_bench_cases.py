"""``muster bench KEY``: a kernel at the cases of its contract, proven before it is timed."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import host_memory
from kernel_muster.bench import cases, race
from kernel_muster.bench.problem import Request
from kernel_muster.registry.errors import DeviceStuck, UsageError
from kernel_muster.registry.hardware import stuck


@pytest.fixture
def kernels(measurable):
    return measurable


@pytest.fixture
def raced(raced_on_host, monkeypatch):
    monkeypatch.setattr(cases, "MOST_COPIES", 2)
    return raced_on_host


@pytest.mark.parametrize("key", ["norm::rms_norm", "w4a16_gemv::w4a16_gemv", "kv_cache::kv_cache_append"])
def test_every_case_of_a_key_is_proven_and_timed(kernels, raced, key):
    handle = kernels.kernel(*key.split("::"))
    seen = []
    for problem in cases.keys_family(key).problems(kernels, Request(())):
        row = raced(problem)[key]
        assert (row.us, row.note) == (2.0, "")
        assert row.relative_l2 <= 2e-3
        seen.append(row.shape.removeprefix(f"{key} "))
    names = [case.name for case in handle.contract.cases]
    assert seen == [name for name in names if name in seen]
    # A case without a row or feature launches nothing, so it is not measured.
    assert all(name.startswith(("no_", "empty")) for name in names if name not in seen)


def test_case_counts_what_it_reads_and_writes(kernels):
    handle = kernels.kernel("norm", "rms_norm")
    case = next(case for case in handle.contract.cases if case.dims["M"] > 1)
    given = handle.contract.arguments(case, np.random.default_rng(0))
    problem = cases.problem_of(kernels, handle, case, given)
    rows, width = case.dims["M"], case.dims["H"]
    assert (problem.rows, problem.floor) == (rows, "move")
    assert f"H={width}" in problem.size
    ours = problem.contestants[-1].make(None)
    assert ours.size_bytes == max(given["x"].nbytes + given["weight"].nbytes, given["out"].nbytes)


def test_wrong_kernel_gets_its_findings_and_no_time(kernels, raced, monkeypatch):
    finding = SimpleNamespace(code="NUMERICS_FAILED", why="case one: error is 9 times the tolerance")
    monkeypatch.setattr(
        cases, "prove", lambda *_, **given: iter([SimpleNamespace(findings=(finding,), relative_l2=9.0)])
    )
    handle = kernels.kernel("silu", "silu_mul")
    case = handle.contract.cases[0]
    given = handle.contract.arguments(case, np.random.default_rng(0))
    row = raced(cases.problem_of(kernels, handle, case, given))["silu::silu_mul"]
    assert row.us is None
    assert row.note == "MusterError: NUMERICS_FAILED: case one: error is 9 times the tolerance"


@pytest.mark.parametrize(("pattern", "message"), [
    ("norm::rms_nrom", "no kernel of a device has the key norm::rms_nrom; did you mean norm::rms_norm?"),
    ("acme::*", r"no kernel of a device has the key acme::\*; muster kernels lists them"),
])  # fmt: skip
def test_key_that_nobody_has_is_a_usage_error(kernels, pattern, message):
    with pytest.raises(UsageError, match=message):
        cases.keys_like(kernels, pattern)


def test_pattern_takes_all_that_fit(kernels):
    assert {"rope::rope_forward", "rope::rope_yarn"} <= set(map(str, cases.keys_like(kernels, "rope::*")))


def test_cases_give_shape_and_rows():
    family = cases.keys_family("norm::*")
    with pytest.raises(UsageError, match=r"--rows 4: norm::\* is measured at the cases of its contract"):
        family.check_rows((4,))
    with pytest.raises(UsageError, match=r"--shape 8x8: norm::\* is measured at the cases of its contract"):
        family.parse_shape("8x8")


def test_case_that_does_not_end_ends_the_measurement(kernels, raced, monkeypatch):
    monkeypatch.setattr(stuck, "_STUCK", {})
    monkeypatch.setattr(stuck, "_KEPT", [])
    monkeypatch.setattr(cases, "CASE_S", 0.2)
    is_over = threading.Event()
    memory = replace(host_memory(), wait=is_over.wait, device=5)
    monkeypatch.setattr(cases, "host_memory", lambda: memory)
    handle = kernels.kernel("silu", "silu_mul")
    case = handle.contract.cases[0]
    given = handle.contract.arguments(case, np.random.default_rng(0))
    try:
        with pytest.raises(DeviceStuck, match=f"cuda:5 still runs silu::silu_mul, case {case.name}, which did not end"):
            raced(cases.problem_of(kernels, handle, case, given))
    finally:
        is_over.set()


def test_launches_that_do_not_end_give_the_device_up(monkeypatch):
    monkeypatch.setattr(stuck, "_STUCK", {})
    monkeypatch.setattr(stuck, "_KEPT", [])
    race.wait_in_time(5, lambda: None, "the launches of x", 5)
    with pytest.raises(ZeroDivisionError):
        race.wait_in_time(5, lambda: 1 // 0, "the launches of x", 5)
    assert not stuck.has_stuck()
    is_over = threading.Event()
    try:
        with pytest.raises(DeviceStuck, match="cuda:5 still runs the launches of x, which did not end"):
            race.wait_in_time(5, is_over.wait, "the launches of x", 0.1)
    finally:
        is_over.set()
    assert stuck.has_stuck()
