"""A host kernel whose function does not match its contract's parameters is refused at discovery."""

from types import ModuleType

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.discovery.discover import discover


def found(function, role="out"):
    """Discover a plugin with one kernel of this function, and return its findings."""
    params = (km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role=role))
    contract = km.Contract(
        name="acme_c", summary="zeros", signature=km.Signature(params), cases=(km.Case("one", {"M": 1}),),
        tolerance=km.Tolerance(0, 0, "exact"), reference=lambda arguments, dims: {"out": np.zeros(dims["M"])},
    )  # fmt: skip
    spec = km.KernelSpec(key="acme::mul", contract="acme_c", archs=("cpu",), backend=km.PythonKernel(function))
    plugin = ModuleType("acme_module")
    plugin.muster_contracts = km.hookimpl(lambda: [contract])
    plugin.muster_kernels = km.hookimpl(lambda: [spec])
    return discover(local={"acme": plugin}, path=[]).findings


@pytest.mark.parametrize(
    "function",
    [lambda x, out: None, lambda out, x, eps=1: None, lambda **arguments: None, lambda *, out, **rest: None, print],
)
def test_function_that_takes_its_contracts_parameters_is_sound(function):
    assert found(function) == ()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: None, "its function does not take out, which contract acme_c passes by name"),
        (lambda *arguments: None, "its function does not take x, out, which"),
        (lambda x, out, /: None, "its function does not take x, out, which"),
        (lambda x, out, stream: None, "its function needs stream, which contract acme_c does not pass by name"),
        (lambda size, **arguments: None, "its function needs size, which"),
    ],
)
def test_function_that_cannot_be_called_as_its_contract_says_is_a_bad_spec(function, problem):
    assert {(f.code, f.subject) for f in found(function)} == {("BAD_SPEC", "acme")}
    assert any(f.why.startswith(f"acme::mul: {problem}") for f in found(function))


def test_role_that_means_nothing_is_a_bad_spec():
    (finding,) = [f for f in found(lambda x, out: None, role="output") if "role" in f.why]
    assert finding.code == "BAD_SPEC"
    assert finding.why.endswith("out: role is 'output', expected in, out, inout")


@pytest.mark.parametrize("group", ["kernel_muster", "kernel_muster.V1", "kernel-muster.v1", "kernel_muster.plugins"])
def test_group_that_is_almost_ours_is_a_mismatch(tmp_path, group):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nacme = no_such_module\n[muster_of_others]\na = b\n")
    catalog = discover(path=[str(tmp_path)])
    assert [(f.code, f.subject) for f in catalog.findings] == [("API_MISMATCH", "acme")]
    assert f"it is registered for {group}, this host speaks kernel_muster.v1" in catalog.findings[0].why
    assert [row.status for row in catalog.plugins] == ["mismatched"]


def test_failed_hook_says_the_exceptions_message():
    def broken():
        raise RuntimeError("no\ndriver")

    plugin = ModuleType("acme_module")
    plugin.muster_kernels = km.hookimpl(broken)
    (finding,) = discover(local={"acme": plugin}, path=[]).findings
    assert finding.why == "hook muster_kernels failed: RuntimeError: no driver"
