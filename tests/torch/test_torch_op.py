"""Operators of torch as kernels: looked up, loaded, proven, and refused where they are not what a contract says."""

import sys

import kernel_muster as km
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
pytestmark = pytest.mark.torch
LIBRARY = torch.library.Library("acme_ops", "DEF")


def silu_mul(gate, up, out):
    out.copy_(torch.nn.functional.silu(gate.float()) * up.float())


def wrong(gate, up, out):
    out.copy_(gate.float() * up.float())


for name, function in (("silu_mul", silu_mul), ("wrong", wrong), ("undeclared", silu_mul)):
    alias = "" if name == "undeclared" else "(a!)"
    LIBRARY.define(f"{name}(Tensor gate, Tensor up, Tensor{alias} out) -> ()")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
LIBRARY.define("other_order(Tensor(a!) out, Tensor gate, Tensor up) -> ()")
LIBRARY.impl("other_order", lambda out, gate, up: silu_mul(gate, up, out), "CompositeExplicitAutograd")


class Plugin:
    """A distribution that puts an operator in the place of a built-in kernel."""

    def __init__(self, archs=("cpu",), key="silu::silu_mul", contract="silu_mul", **backend):
        self.given = {"key": key, "contract": contract, "archs": archs}
        made = km.TorchOpKernel(packages=("torch",), **backend)
        self.backend = made.on_host() if archs == ("cpu",) else made

    @km.hookimpl
    def muster_kernels(self):
        yield km.KernelSpec(backend=self.backend, overrides="kernel-muster", **self.given)


def opened(target="cpu", **given):
    return km.open_registry(target, levers={}, local_plugins={"acme": Plugin(**given)})


def bf16(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype("bfloat16")


def silu_of(handle):
    gate, up, out = bf16(3, 40), bf16(3, 40, seed=2), bf16(3, 40)
    handle(gate, up, out)
    wide = gate.astype("f8")
    return out.astype("f8"), wide / (1 + np.exp(-wide)) * up.astype("f8")


def test_operator_serves_a_key_on_the_host_on_the_memory_of_the_arrays():
    handle = opened(op="acme_ops::silu_mul").kernel("silu", "silu_mul")
    assert handle.spec.backend.name == "torch_op"
    got, exact = silu_of(handle)
    assert np.allclose(got, exact, rtol=2**-7)


def test_operator_of_torch_itself_serves_through_an_adapter():
    def add(op, given):
        op(given["residual"], given["x"])

    handle = opened(
        key="residual_add::bf16_residual_add", contract="bf16_residual_add", op="aten::add_.Tensor", adapter=add
    ).kernel("residual_add", "bf16_residual_add")
    x, residual = bf16(3, 8), bf16(3, 8, seed=2)
    exact = x.astype("f8") + residual.astype("f8")
    handle(x, residual)
    assert np.allclose(residual.astype("f8"), exact, rtol=2**-8)


def boot(target="cpu", stage=None, **given):
    manifest = given.pop("manifest")
    session = km.boot(manifest=manifest, target=target, levers={}, stage=stage, local_plugins={"acme": Plugin(**given)})
    with session as booted:
        booted.kernels.kernel("silu", "silu_mul")
    return booted.report


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "MODEL.toml"
    path.write_text('[model]\nname = "tiny"\nquant = "nvfp4"\n', encoding="utf-8")
    return path


def test_audit_proves_an_operator_against_its_contract(manifest):
    (row,) = boot(stage="proven", manifest=manifest, op="acme_ops::silu_mul").kernels
    assert (row.backend, row.stage, row.distribution) == ("torch_op", "proven", "(local)")


def test_audit_refuses_an_operator_that_computes_something_else(manifest):
    with pytest.raises(km.BootRefused, match="silu::silu_mul"):
        boot(stage="proven", manifest=manifest, op="acme_ops::wrong")


def test_operator_whose_schema_writes_nothing_is_refused():
    handle = opened(op="acme_ops::undeclared").kernel("silu", "silu_mul")
    with pytest.raises(km.ContractError, match="its schema writes no argument: give an adapter"):
        silu_of(handle)


def test_operator_that_nobody_defines_is_refused_when_it_is_called():
    handle = opened(op="acme_ops::nothing").kernel("silu", "silu_mul")
    with pytest.raises(km.MusterError, match="torch has no operator acme_ops::nothing: name the module that defines"):
        silu_of(handle)


def test_module_that_defines_an_operator_is_imported_when_it_is_called(tmp_path, monkeypatch):
    text = (
        "import torch\nLIBRARY = torch.library.Library('late_ops', 'DEF')\n"
        "LIBRARY.define('silu_mul(Tensor gate, Tensor up, Tensor(a!) out) -> ()')\n"
        "def run(gate, up, out):\n    out.copy_(torch.nn.functional.silu(gate.float()) * up.float())\n"
        "LIBRARY.impl('silu_mul', run, 'CompositeExplicitAutograd')\n"
    )
    (tmp_path / "late_ops_of_acme.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    handle = opened(op="late_ops::silu_mul", module="late_ops_of_acme").kernel("silu", "silu_mul")
    assert "late_ops_of_acme" not in sys.modules
    got, exact = silu_of(handle)
    assert np.allclose(got, exact, rtol=2**-7)


def test_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_ops_of_acme.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    handle = opened(op="broken_ops::silu_mul", module="broken_ops_of_acme").kernel("silu", "silu_mul")
    with pytest.raises(km.MusterError, match="which broken_ops_of_acme was to define: SystemExit"):
        silu_of(handle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "silu_mul"}, "op is 'silu_mul', expected namespace::name"),
        ({"packages": ()}, "expected a tuple of the distributions"),
        ({"adapter": 3}, "adapter is 3, expected a function"),
    ],
)
def test_malformed_backend_is_named_as_a_problem_of_the_spec(change, message):
    (problem,) = km.TorchOpKernel(**{"op": "acme::silu", "packages": ("torch",)} | change).problems()
    assert message in problem


def test_distribution_that_is_not_installed_has_no_source():
    backend = km.TorchOpKernel("acme::silu", ("no-such-distribution",))
    with pytest.raises(km.MusterError, match="the distribution no-such-distribution is not installed"):
        backend.source_sha256  # noqa: B018  (a property)
    assert (
        km.TorchOpKernel("acme::silu", ("torch",)).source_sha256 != km.TorchOpKernel("a::b", ("torch",)).source_sha256
    )


def test_operator_for_a_device_is_registered_where_there_is_none(manifest):
    (row,) = boot("sm_90a", stage="registered", manifest=manifest, archs=("sm_80+",), op="acme_ops::silu_mul").kernels
    assert (row.backend, row.stage) == ("torch_op", "registered")


def test_operator_for_a_device_does_not_run_on_the_host():
    plugin = Plugin(archs=("cpu",), op="acme_ops::silu_mul")
    plugin.backend = km.TorchOpKernel("acme_ops::silu_mul", ("torch",))
    with pytest.raises(km.BootRefused, match="does not run on the host"):
        km.open_registry("cpu", levers={}, local_plugins={"acme": plugin})


@pytest.mark.gpu
def test_operator_serves_and_is_proven_on_a_device(manifest):
    (row,) = boot("cuda", stage="proven", manifest=manifest, archs=("sm_80+",), op="acme_ops::silu_mul").kernels
    assert (row.backend, row.stage) == ("torch_op", "proven")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["wrong", "undeclared", "other_order", "nothing"])
def test_operator_that_is_not_the_contract_is_refused_on_a_device(manifest, op):
    with pytest.raises(km.BootRefused, match="silu::silu_mul"):
        boot("cuda", stage="proven", manifest=manifest, archs=("sm_80+",), op=f"acme_ops::{op}")


@pytest.mark.gpu
def test_operator_runs_in_the_stream_of_its_launch_on_arrays_of_cupy_and_torch():
    cupy = pytest.importorskip("cupy")
    handle = opened("cuda", archs=("sm_80+",), op="acme_ops::silu_mul").kernel("silu", "silu_mul")
    gate = torch.randn(4, 64, device="cuda").bfloat16()
    exact = torch.nn.functional.silu(gate.double()) * gate.double()
    out, side = torch.empty_like(gate), torch.cuda.Stream()
    torch.cuda.synchronize()
    handle(gate, gate, out, stream=side)
    side.synchronize()
    assert torch.allclose(out.double(), exact, rtol=2**-7)
    theirs = cupy.from_dlpack(gate)
    result = cupy.empty_like(theirs)
    handle(theirs, theirs, result)
    cupy.cuda.get_current_stream().synchronize()
    assert torch.equal(torch.from_dlpack(result), out)
    launch = handle.prepare(gate, gate, out)
    out.zero_()
    torch.cuda.synchronize()
    launch(side)
    side.synchronize()
    assert torch.allclose(out.double(), exact, rtol=2**-7)
