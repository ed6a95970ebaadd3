"""Triton kernels: compiled for named architectures without a device, inspected, refused with the reason, launched."""

import re
from pathlib import Path
from types import SimpleNamespace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.contract.arrays import HOST, ArrayView
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.hardware.arch import parse_arch

pytest.importorskip("triton", reason="the extra triton is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # warnings of triton
TYPES = ("*bf16", "*bf16", "*bf16", "i32")
SILU = """
import triton
import triton.language as tl


@triton.jit
def silu_mul(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < count
    g = tl.load(gate + at, mask=kept).to(tl.float32)
    u = tl.load(up + at, mask=kept).to(tl.float32)
    tl.store(out + at, (g / (1 + tl.exp(-g)) * u).to(tl.bfloat16), mask=kept)
"""
SUM = """
import triton
import triton.language as tl


@triton.jit
def total(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + at), axis=0))
"""


def planner(bound, entries):
    count = bound.views["gate"].size
    views = tuple(bound.views[name] for name in ("gate", "up", "out"))
    return km.LaunchPlan("silu_mul", (-(-count // 1024), 1, 1), (*views, count))


@pytest.fixture
def write(tmp_path):
    def make(text, name="kernels.py"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


def kernel(source, function="silu_mul", parameters=TYPES, constants=None, **more):
    constants = {"BLOCK": 1024} if constants is None else constants
    return km.TritonKernel(source, function, parameters, planner, constants, **more)


def build(made, arch="sm_90a"):
    return Builder().build(made.request(parse_arch(arch)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_121a"])
def test_kernel_is_compiled_for_an_architecture_and_inspected(write, arch):
    built = build(kernel(write(SILU)), arch)
    needs = built.entries["silu_mul"]
    assert 0 < needs.registers < 256
    assert (needs.max_threads, needs.static_shared_bytes) == (128, 0)
    assert (needs.spill_store_bytes, needs.spill_load_bytes) == (0, 0)
    assert built.compiler.startswith("Triton 3.")


def test_code_is_the_same_from_any_folder_and_differs_by_constants(write, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = (build(kernel(write(SILU, name))) for name in ("a.py", "other/b.py"))
    assert first.digest == second.digest
    assert first.source_sha256 == second.source_sha256
    other = kernel(write(SILU), constants={"BLOCK": 512})
    assert build(other).source_sha256 != first.source_sha256
    assert build(other).digest != first.digest


def test_code_is_kept_in_the_cache_and_compiled_anew_when_the_file_changes(write, tmp_path):
    builder = Builder(BuildCache(tmp_path / "cubins"))
    made = kernel(write(SILU))
    request = made.request(parse_arch("sm_90a"))
    assert [builder.build(request).from_cache for _ in range(2)] == [False, True]
    before = made.source_sha256
    write(SILU.replace("1 + tl.exp", "2 + tl.exp"))
    assert not builder.build(request).from_cache
    assert made.source_sha256 != before


def test_module_of_its_own_that_a_kernel_imports_is_a_part_of_it(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write("import triton\n\n\n@triton.jit\ndef twice_of(x):\n    return x * 2\n", "helper_of_triton.py")
    text = SILU.replace("import triton\n", "import triton\nfrom helper_of_triton import twice_of\n", 1)
    made = kernel(write(text.replace("* u)", "* twice_of(u))")))
    first, digest = build(made), made.source_sha256
    write("import triton\n\n\n@triton.jit\ndef twice_of(x):\n    return x * 3\n", "helper_of_triton.py")
    assert made.source_sha256 != digest
    assert build(made).digest != first.digest


def test_shared_memory_beyond_what_is_declared_is_refused_with_the_amount(write):
    made = kernel(write(SUM), "total", ("*fp32", "*fp32"), {"BLOCK": 1024})
    with pytest.raises(
        BuildFailure, match=r"total: needs (\d+) bytes of shared memory, 0 are declared for sm_90a"
    ) as failed:
        build(made)
    needed = int(re.search(r"needs (\d+)", failed.value.why)[1])
    assert failed.value.remedies == (f"declare TritonKernel(shared_bytes={needed})",)
    enough = kernel(write(SUM), "total", ("*fp32", "*fp32"), {"BLOCK": 1024}, shared_bytes=needed)
    assert build(enough).entries["total"].max_threads == 128


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"text": SILU.replace("tl.exp", "tl.expp")}, "COMPILE_FAILED", r"expp.* \(at .*kernels.py:12\)"),
        ({"text": "import triton\n1 / 0\n"}, "COMPILE_FAILED", "ZeroDivisionError"),
        ({"text": "raise SystemExit(3)\n"}, "COMPILE_FAILED", "SystemExit"),
        ({"text": "def silu_mul(:\n"}, "COMPILE_FAILED", "kernels.py:1"),
        ({"text": SILU.replace("@triton.jit", "")}, "NO_DEVICE_CODE", "is no function under @triton.jit"),
        ({"function": "silu"}, "NO_DEVICE_CODE", "silu is no function under @triton.jit"),
        ({"constants": {}}, "NO_DEVICE_CODE", "BLOCK is tl.constexpr: give its value in constants"),
        ({"constants": {"BLOCK": 8, "B": 1}}, "NO_DEVICE_CODE", "constants has B, which is no parameter"),
        (
            {"parameters": TYPES[:3]},
            "NO_DEVICE_CODE",
            "3 parameters are declared, the kernel takes gate, up, out, count",
        ),
        ({"arch": "sm_90"}, "NO_DEVICE_CODE", "Triton makes code for sm_90a, the target is sm_90"),
    ],
    ids=["name", "import", "exit", "syntax", "no_jit", "function", "constant", "unknown", "parameters", "arch"],
)
def test_kernel_that_cannot_be_built_is_refused_with_the_reason(write, change, code, message):
    given = {"function": "silu_mul", "parameters": TYPES, "constants": {"BLOCK": 1024}} | change
    source, arch = write(given.pop("text", SILU)), given.pop("arch", "sm_90a")
    with pytest.raises(BuildFailure, match=message) as failed:
        build(kernel(source, **given), arch)
    assert failed.value.code == code


def test_interpreter_in_the_compilers_place_is_a_toolchain_that_is_missing(write, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BuildFailure, match="TRITON_INTERPRET is set") as failed:
        build(kernel(write(SILU)))
    assert failed.value.code == "TOOLCHAIN_MISSING"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": Path("kernels.py")}, "expected an absolute path"),
        ({"function": "silu mul"}, "expected the name of a @triton.jit function"),
        ({"parameters": ("*bf17",)}, r"parameters: '\*bf17', expected such as"),
        ({"parameters": ("fp32:16",)}, "parameters: 'fp32:16'"),
        ({"parameters": "i32"}, "expected a tuple of types"),
        ({"constants": {"BLOCK": []}}, "expected integers, floats, bools, text and None"),
        ({"num_warps": 3}, "expected a power of two up to 32"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"shared_bytes": -1}, "shared_bytes is -1"),
    ],
)
def test_malformed_kernel_is_named_as_a_problem_of_the_spec(change, message):
    made = kernel(**{"source": Path("/kernels.py")} | change)
    (problem,) = made.problems()
    assert re.search(message, problem)


def view(dtype, size=4):
    return ArrayView(0, numpy_dtype(dtype), (size,), (numpy_dtype(dtype).itemsize,), HOST, True, None)


def planned(arguments, parameters=TYPES, entry="silu_mul"):
    made = km.TritonKernel(
        Path("/k.py"),
        "silu_mul",
        parameters,
        lambda *given: km.LaunchPlan(entry, (1, 1, 1), arguments),
        {},
        num_warps=8,
    )
    return made.plan(SimpleNamespace(), {})


def test_launch_has_the_block_of_its_warps_and_triton_s_own_pointers():
    (plan,) = planned((view("bf16"), view("bf16"), view("bf16"), 4))
    assert (plan.block, plan.may_overlap, plan.arguments[3:]) == ((256, 1, 1), False, (4, 0, 0))


@pytest.mark.parametrize(
    ("arguments", "parameters", "message"),
    [
        ((view("f32"),), ("*bf16",), r"argument 0 is an array of float32, declared as \*bf16"),
        ((view("bf16"),), ("*fp16",), "declared as"),
        ((24,), ("i32:16",), "argument 0 is 24, declared as i32:16: expected a multiple of 16"),
    ],
)
def test_argument_that_its_declared_type_is_not_is_refused(arguments, parameters, message):
    with pytest.raises(km.ContractError, match=message):
        planned(arguments, parameters)


def test_integer_pointer_reads_elements_of_its_size_bit_by_bit():
    (plan,) = planned((view("bf16"), 32), ("*u16", "i32:16"))
    assert plan.arguments[1] == 32


@pytest.mark.parametrize(("arguments", "entry"), [((1,), "silu_mul"), ((1, 2, 3, 4), "other")])
def test_plan_of_something_else_is_refused(arguments, entry):
    with pytest.raises(km.MusterError, match="expected 4"):
        planned(arguments, entry=entry)


class Plugin:
    """A distribution that puts its Triton kernel in the place of a built-in one."""

    def __init__(self, source):
        self.source = source

    @km.hookimpl
    def muster_kernels(self):
        backend = kernel(self.source)
        yield km.KernelSpec(
            key="silu::silu_mul", contract="silu_mul", archs=("sm_80+",), backend=backend, overrides="kernel-muster"
        )


def audited(write, target, **more):
    levers = {"MUSTER_CACHE_DIR": str(write("", "nothing").parent / "cubins")}
    write('[model]\nname = "tiny"\nquant = "nvfp4"\n', "MODEL.toml")
    session = km.boot(
        manifest=write("", "nothing").parent / "MODEL.toml", target=target, levers=levers,
        local_plugins={"mine": Plugin(write(SILU))}, **more,
    )  # fmt: skip
    with session as boot:
        boot.kernels.kernel("silu", "silu_mul")
    return boot.report


def test_audit_compiles_a_triton_kernel_under_a_key_and_reports_what_it_needs(write):
    report = audited(write, "sm_90a")
    (row,) = report.kernels
    assert (row.key, row.backend, row.stage, row.distribution) == ("silu::silu_mul", "triton", "compiled", "(local)")


@pytest.mark.gpu
def test_triton_kernel_is_proven_on_a_device_against_its_contract(write):
    (row,) = audited(write, "cuda", stage="proven").kernels
    assert (row.backend, row.stage) == ("triton", "proven")


@pytest.mark.gpu
def test_triton_kernel_that_computes_something_else_is_refused(write):
    def other(text, name="kernels.py"):
        return write(text.replace("1 + tl.exp", "2 + tl.exp"), name)

    with pytest.raises(km.BootRefused, match="silu::silu_mul"):
        audited(other, "cuda", stage="proven")


@pytest.mark.gpu
def test_triton_kernel_serves_an_operator_of_torch(write):
    torch = pytest.importorskip("torch")
    from kernel_muster.torch import Kernels

    with Kernels(km.open_registry("cuda", levers={}, local_plugins={"mine": Plugin(write(SILU))})) as kernels:
        found = kernels.kernel("silu", "silu_mul")
        gate = torch.randn(7, 96, device="cuda").bfloat16()
        out = torch.empty_like(gate)
        found(gate, gate, out)
        exact = torch.nn.functional.silu(gate.double()) * gate.double()
        assert found.handle.spec.backend.name == "triton"
        assert torch.allclose(out.double(), exact, rtol=2**-7)
        assert np.isfinite(out.float().cpu().numpy()).all()
