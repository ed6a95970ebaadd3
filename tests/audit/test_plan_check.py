"""A planner's launches for its contract's cases, without a device."""

from dataclasses import replace
from types import SimpleNamespace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.proof.plan_check import plan_findings
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.hardware.arch import parse_arch

ENTRY = EntryPoint("twice", ("ptr", "i32", "ptr"), dynamic_shared_bytes=64)
RESOURCES = EntryResources(16, 0, 0, 128, None, (), 1)
CONTRACT = km.Contract(
    "acme_twice",
    "out = 2 x",
    km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out"))),
    lambda arguments, dims: {"out": np.asarray(arguments["x"], np.float64) * 2},
    (km.Case("empty", {"M": 0}), km.Case("one", {"M": 1}), km.Case("odd", {"M": 301})),
    km.Tolerance(0, 0, "exact"),
)


def good(bound, entries):
    rows = bound.dims["M"]
    return km.LaunchPlan("twice", (-(-rows // 128), 1, 1), (bound.views["x"], rows, bound.views["out"]))


def whys(planner):
    def plans(bound, entries):
        plan = planner(bound, entries)
        return plan if isinstance(plan, tuple) else (plan,)

    backend = SimpleNamespace(plan=plans)
    spec = SimpleNamespace(key="acme::twice", prepare=None)
    built = SimpleNamespace(entries={"twice": RESOURCES}, arch=parse_arch("sm_90a"))
    found = list(plan_findings(spec, backend, CONTRACT, built, [ENTRY]))
    assert {finding.code for finding in found} <= {"BAD_SPEC"}
    return [finding.why for finding in found]


def test_planner_that_fits_its_entry_points_gives_no_finding():
    assert whys(good) == []


def test_planner_may_launch_nothing_where_no_row_meets_the_state(monkeypatch):
    state = km.TensorParam("state", "f32", ("S",), role="inout")
    params = (km.TensorParam("x", "f32", ("M",)), state, km.TensorParam("out", "f32", ("M",), role="out"))
    cases = (km.Case("no_rows", {"M": 0, "S": 3}), km.Case("one", {"M": 1, "S": 3}))
    moved = replace(CONTRACT, signature=km.Signature(params), cases=cases)
    monkeypatch.setitem(globals(), "CONTRACT", moved)
    assert whys(lambda bound, entries: good(bound, entries) if bound.dims["M"] else ()) == []
    only_state = replace(moved, signature=km.Signature(params[:2]))
    monkeypatch.setitem(globals(), "CONTRACT", only_state)
    (said,) = whys(lambda bound, entries: ())
    assert said == "case one on sm_90a: the planner launches nothing, although every argument has elements"


def changed(**parts):
    return lambda bound, entries: replace(good(bound, entries), **parts)


@pytest.mark.parametrize(
    ("planner", "why"),
    [
        (changed(entry="thrice"), "it launches thrice, which is no declared entry point (twice)"),
        (changed(grid=(0, 1, 1)), "grid is (0, 1, 1), expected three positive integers"),
        (changed(grid=(True, 1, 1)), "grid is (True, 1, 1), expected three positive integers"),
        (changed(grid=[1, 1, 1]), "grid is [1, 1, 1], expected three positive integers"),
        (changed(grid=None), "grid is None, expected three positive integers"),
        (changed(grid=(2**31, 1, 1)), "grid is (2147483648, 1, 1), expected at most (2147483647, 65535, 65535)"),
        (changed(grid=(1, 65536, 1)), "grid is (1, 65536, 1), expected at most"),
        (changed(block=(1, 1, 65)), "block is (1, 1, 65), expected at most (1024, 1024, 64)"),
        (changed(cluster=(2, 1, 1)), "clusters of (2, 1, 1) blocks, expected at most 16, and a grid of whole clusters"),
        (changed(grid=(32, 1, 1), cluster=(8, 4, 1)), "clusters of (8, 4, 1) blocks, expected at most 16"),
        (changed(dynamic_shared_bytes=-1), "-1 dynamic shared bytes, 64 are declared"),
        (changed(dynamic_shared_bytes=1.5), "1.5 dynamic shared bytes, 64 are declared"),
        (changed(block=(256, 1, 1)), "exceeds the launch bound of 128 threads"),
        (changed(dynamic_shared_bytes=65), "65 dynamic shared bytes, 64 are declared"),
        (changed(arguments=()), "0 arguments, 3 parameters are declared"),
        (changed(arguments=(0, 1.5, 0)), "argument 1 is float, the parameter is i32"),
        (changed(arguments=(0, 2**31, 0)), "argument 1 is 2147483648, the parameter is i32"),
        (changed(arguments=(None, 1, 0)), "argument 0 is NoneType, the parameter is ptr"),
        (lambda bound, entries: (), "the planner launches nothing, although out has elements"),
        (lambda bound, entries: 1 / 0, "the planner refuses what the contract allows: ZeroDivisionError"),
        (lambda bound, entries: km.NoSuchThing, "AttributeError"),
    ],
)
def test_planner_that_does_not_fit_is_one_finding_with_its_case(planner, why):
    (said,) = whys(planner)
    assert said.startswith("case one on sm_90a: ")
    assert why in said
