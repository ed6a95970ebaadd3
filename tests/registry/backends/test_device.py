"""Refusals of a device's runner before it uses the device."""

from types import SimpleNamespace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.contract.arrays import HOST
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.launch.device import DeviceRunner
from kernel_muster.registry.launch.runners import LaunchOptions

SIGNATURE = km.Signature(
    (
        km.TensorParam("x", "f32", ("M",)),
        km.TensorParam("state", "f32", ("S",), role="inout"),
        km.TensorParam("out", "f32", ("R",), role="out"),
    )
)
IDLE = SimpleNamespace(name="own", strided=frozenset(), request=None, plan=lambda bound, entries: ())


class Runner(DeviceRunner):
    """A runner whose code is loaded already, on a device whose memory is the host's."""

    def _module(self, spec):
        return SimpleNamespace(built=SimpleNamespace(entries={}))


@pytest.fixture
def runner():
    return Runner(SimpleNamespace(ordinal=HOST, name="a device"), parse_arch("sm_90a"), Builder())


def bound(rows, states, outputs):
    given = {name: np.zeros(size, np.float32) for name, size in (("x", rows), ("state", states), ("out", outputs))}
    return SIGNATURE.bind("acme::move", (), given)


@pytest.mark.parametrize(
    ("sizes", "left"), [((3, 3, 3), "out"), ((0, 3, 3), "out"), ((3, 0, 3), "out"), ((0, 0, 3), "out")]
)
def test_planner_that_launches_nothing_where_there_is_work_is_refused(runner, sizes, left):
    spec, said = SimpleNamespace(backend=IDLE, key="acme::move"), f"^acme::move: the planner launches nothing, .*{left}"
    with pytest.raises(MusterError, match=said):
        runner.prepare("acme::move", spec, bound(*sizes), LaunchOptions())
    with pytest.raises(MusterError, match=said):
        runner.scratch_bytes("acme::move", spec, bound(*sizes))


def test_planner_that_launches_nothing_where_every_argument_has_elements_is_refused(runner):
    signature = km.Signature(SIGNATURE.params[:2])
    given = signature.bind("acme::move", (), {"x": np.zeros(3, np.float32), "state": np.zeros(3, np.float32)})
    with pytest.raises(MusterError, match="launches nothing, although every argument has elements"):
        runner.prepare("acme::move", SimpleNamespace(backend=IDLE), given, LaunchOptions())


def test_planner_may_launch_nothing_where_no_row_meets_the_state(runner):
    spec = SimpleNamespace(backend=IDLE)
    assert runner.scratch_bytes("acme::move", spec, bound(0, 3, 0)) == 0
    runner.prepare("acme::move", spec, bound(0, 3, 0), LaunchOptions())(None)
