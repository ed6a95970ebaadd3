"""Loading, launching and proving compiled kernels on a real device."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from types import ModuleType

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.proofs import device_memory
from kernel_muster.registry.arch import parse_arch
from kernel_muster.registry.arrays import view_of
from kernel_muster.registry.backends import EntryPoint, builder
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan

pytestmark = pytest.mark.gpu

THREADS = 128
HEAD = f'extern "C" __global__ void __launch_bounds__({THREADS}) twice(const float* x, int n, float* out) {{\n'
INDEX = f"  const int i = blockIdx.x * {THREADS} + threadIdx.x;\n"
GOOD = HEAD + INDEX + "  if (i < n) out[i] = x[i] * 2;\n}\n"
BROKEN = {
    "NUMERICS_FAILED": GOOD.replace("* 2;", "* 2.02f;"),
    "UNWRITTEN_OUTPUT": GOOD.replace("i < n", f"i < (n < {THREADS} ? n : n / {THREADS} * {THREADS})"),
    "OUT_OF_BOUNDS": GOOD.replace("if (i < n) out[i] = x[i] * 2", "out[i] = i < n ? x[i] * 2 : 0.0f"),
    "NOT_DETERMINISTIC": GOOD.replace("* 2;", "* 2 + 1e-5f * (clock64() % 97);"),
}
CHANGED_INPUT = (
    HEAD.replace("const float* x", "float* x") + INDEX + "  if (i < n) { out[i] = x[i] * 2; x[i] = 0; }\n}\n"
)
WILD = GOOD.replace("out[i] =", "out[i + (1ll << 40)] =")
# Long enough that whoever waits for it is found out; then all launches have ended, whatever became of the process.
SPIN_S = 25
SPINS = f"""
__device__ unsigned long long first;
__device__ unsigned long long now() {{
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}}
{HEAD}  const unsigned long long own = now(), other = atomicCAS(&first, 0, own);
  for (const unsigned long long start = other == 0 ? own : other; now() - start < {SPIN_S}000000000ull;) {{
  }}
{GOOD.removeprefix(HEAD)}"""
FAMILY = (
    *(f"w4a16_gemv::w4a16_gemv{tier}" for tier in ("", *(f"_batch{rows}" for rows in (*range(2, 9), 16, 256)))),
    *(f"w4a16_gemv::w4a16_gemv_{form}{tier}" for form in ("qg", "dual") for tier in ("", "_batch2", "_batch3")),
    "w4a16_gemv::w4a16_gemv_qkvz",
    "gemv::dense_gemv_bf16",
    "gemv::dense_gemv_bf16_batchm",
)


def plan(bound, entries, dynamic_shared_bytes=0):
    rows = bound.dims["M"]
    grid = (-(-rows // THREADS), 1, 1)
    arguments = (bound.views["x"], rows, bound.views["out"])
    return LaunchPlan("twice", grid, arguments, dynamic_shared_bytes=dynamic_shared_bytes)


def plugin(folder, text, dynamic_shared_bytes=0, **options):
    """Return a plugin with ``acme::twice`` from this source, and ``acme::good``."""
    params = (km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out"))
    contract = km.Contract(
        "acme_twice",
        "out = 2 x",
        km.Signature(params),
        lambda arguments, dims: {"out": arguments["x"].astype(np.float64) * 2},
        (km.Case("empty", {"M": 0}), km.Case("one", {"M": 1}), km.Case("tile", {"M": 128}), km.Case("odd", {"M": 301})),
        km.Tolerance(2.0**-24, 2e-3, "exact; the absolute part lets two different results both be right"),
    )
    specs = []
    for name, source in (("twice", text), ("good", GOOD)):
        path = folder / f"{name}.cu"
        path.write_text(source)
        shared = dynamic_shared_bytes if name == "twice" else 0
        entry = EntryPoint("twice", ("ptr", "i32", "ptr"), shared)
        backend = CudaKernel(path, (entry,), partial(plan, dynamic_shared_bytes=shared))
        more = options if name == "twice" else {}
        common = {"contract": "acme_twice", "archs": ("sm_80+",), "backend": backend}
        specs.append(km.KernelSpec(key=f"acme::{name}", **common, **more))
    module = ModuleType("acme")
    module.muster_contracts = km.hookimpl(lambda: [contract])
    module.muster_kernels = km.hookimpl(lambda: specs)
    for hook in ("muster_contracts", "muster_kernels"):
        getattr(module, hook).__name__ = hook
    return module


def boot(folder, cache, *keys, local=None, stage="proven"):
    """Boot on the device, ask for the keys, and return the session, passed or refused."""
    manifest = folder / "MODEL.toml"
    manifest.write_text('[model]\nname = "tiny"\nquant = "nvfp4"\n')
    levers = {"MUSTER_CACHE_DIR": cache}
    session = km.boot(manifest=manifest, target="cuda", stage=stage, levers=levers, local_plugins=local or {})
    try:
        with session:
            for key in keys:
                session.kernels.kernel(*key.split("::"))
    except km.BootRefused:
        pass
    return session


def codes(session):
    return [(f.code, f.subject) for f in session.report.findings if f.severity != "note"]


@pytest.fixture
def arguments(cupy):
    """Return a maker of device arguments for a GEMV of M rows, with the exact result."""

    def make(handle, rows, features=129, depth=256):
        memory = device_memory(0)
        case = km.Case("here", {"M": rows, "N": features, "K": depth})
        given = handle.contract.arguments(case, np.random.default_rng(rows))
        exact = handle.contract.reference(given, case.dims)["out"]
        weight = given["w"]
        arrays = {name: memory.to(v) for name, v in vars(weight).items() if isinstance(v, np.ndarray) and v.ndim}
        made = {"x": memory.to(given["x"]), "out": memory.to(given["out"])}
        return {**made, "w": handle.prepare_weight(replace(weight, **arrays))}, exact

    return make


def gemv(kernels, rows=2):
    return kernels.kernel("w4a16_gemv", "w4a16_gemv" if rows == 1 else f"w4a16_gemv_batch{rows}")


def as_float(cupy, array):
    return cupy.asnumpy(array).astype(np.float64)


def bits(cupy, array):
    return cupy.asnumpy(array).tobytes()


def raw(array):
    """Return BF16 as the integers that CuPy has every operation for."""
    return array.view(np.uint16)


def with_gaps(cupy, array, gap):
    """Return a copy whose rows lie some elements further apart."""
    wide = cupy.zeros((array.shape[0], array.shape[1] + gap), np.uint16)
    wide[:, :-gap] = raw(array)
    return wide.view(array.dtype)[:, :-gap]


# launches


def test_launch_gives_the_exact_result_rounded_to_bf16(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, exact = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    np.testing.assert_allclose(as_float(cupy, given["out"]), exact, rtol=2**-8, atol=1e-3)


def test_prepared_launch_on_a_stream_reads_what_the_arguments_hold_when_it_runs(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, exact = arguments(handle, 2)
    stream = cupy.cuda.Stream(non_blocking=True)
    launch = handle.prepare(**given)
    raw(given["x"])[...] = 0
    cupy.cuda.Device().synchronize()
    launch(stream)
    stream.synchronize()
    assert not as_float(cupy, given["out"]).any()
    fresh, _ = arguments(handle, 2)
    raw(given["x"])[...] = raw(fresh["x"])
    cupy.cuda.Device().synchronize()
    launch(stream)
    stream.synchronize()
    np.testing.assert_allclose(as_float(cupy, given["out"]), exact, rtol=2**-8, atol=1e-3)


def test_launch_inside_a_graph_capture_replays_to_the_same_bits(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    expected = bits(cupy, given["out"])
    stream = cupy.cuda.Stream(non_blocking=True)
    launch = handle.prepare(**given)
    stream.begin_capture()
    launch(stream)
    graph = stream.end_capture()
    raw(given["out"])[...] = 0
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    assert bits(cupy, given["out"]) == expected


def test_launch_that_may_overlap_gives_the_same_bits(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    expected = bits(cupy, given["out"])
    raw(given["out"])[...] = 0
    handle.prepare(**given, overlap=True)()
    cupy.cuda.Device().synchronize()
    assert bits(cupy, given["out"]) == expected


def test_rows_of_a_batch_have_the_bits_of_one_row(cupy, kernels, arguments):
    many, one = gemv(kernels, 8), gemv(kernels, 1)
    given, _ = arguments(many, 8)
    many(**given)
    alone = cupy.empty_like(given["out"])
    for row in range(8):
        x, out = given["x"][row : row + 1].copy(), cupy.empty_like(alone[:1])
        one(x=x, w=given["w"], out=out)
        raw(alone)[row : row + 1] = raw(out)
    cupy.cuda.Device().synchronize()
    assert bits(cupy, alone) == bits(cupy, given["out"])


def test_no_rows_launch_nothing(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 0)
    handle(**given)
    cupy.cuda.Device().synchronize()


def test_rows_with_gaps_give_the_same_bits(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    handle(**given)
    out = cupy.empty_like(given["out"])
    handle(x=with_gaps(cupy, given["x"], 8), w=given["w"], out=out)
    cupy.cuda.Device().synchronize()
    assert bits(cupy, out) == bits(cupy, given["out"])


# what is refused


def test_array_in_host_memory_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match="x lies in host memory, expected cuda:0"):
        handle(**{**given, "x": cupy.asnumpy(given["x"])})


def test_slice_that_begins_between_vector_loads_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    flat = cupy.zeros(given["x"].size + 1, np.uint16).view(given["x"].dtype)
    with pytest.raises(km.ContractError, match=r"x begins at 0x[0-9a-f]+, expected a multiple of 16 bytes"):
        handle(**{**given, "x": flat[1:].reshape(given["x"].shape)})


def test_every_second_value_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    wide = cupy.zeros((2, 2 * given["x"].shape[1]), np.uint16).view(given["x"].dtype)
    with pytest.raises(km.ContractError, match=r"x has strides .*, expected a contiguous last axis"):
        handle(**{**given, "x": wide[:, ::2]})


def test_rows_that_begin_between_vector_loads_are_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match="expected a multiple of 8"):
        handle(**{**given, "x": with_gaps(cupy, given["x"], 1)})


def test_output_with_gaps_is_refused(cupy, kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match=r"out has shape .*, expected no gaps"):
        handle(**{**given, "out": with_gaps(cupy, given["out"], 8)})


def test_more_rows_than_the_tier_takes_are_refused(kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 3)
    with pytest.raises(km.ContractError, match="M is 3, expected at most 2"):
        handle(**given)


def test_stream_that_is_none_is_refused(kernels, arguments):
    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    with pytest.raises(km.ContractError, match="stream is str, expected a CuPy or torch stream"):
        handle(**given, stream="stream 7")


# torch


def test_torch_tensors_go_in_without_a_copy_on_their_stream(cupy, kernels, arguments):
    import torch

    handle = gemv(kernels)
    given, exact = arguments(handle, 2)
    handle(**given)
    cupy.cuda.Device().synchronize()
    x = torch.from_numpy(cupy.asnumpy(raw(given["x"])).view(np.int16)).cuda().view(torch.bfloat16)
    assert view_of(x).pointer == x.data_ptr()
    out = torch.full(tuple(given["out"].shape), float("nan"), dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    handle(x=x, w=given["w"], out=out, stream=stream)
    stream.synchronize()
    np.testing.assert_allclose(out.double().cpu().numpy(), exact, rtol=2**-8, atol=1e-3)
    assert out.view(torch.uint8).cpu().numpy().tobytes() == bits(cupy, given["out"])


def test_torch_tensor_on_the_host_is_refused(kernels, arguments):
    import torch

    handle = gemv(kernels)
    given, _ = arguments(handle, 2)
    x = torch.zeros(tuple(given["x"].shape), dtype=torch.bfloat16)
    with pytest.raises(km.ContractError, match="x lies in host memory"):
        handle(**{**given, "x": x})


# stages


def test_boot_without_a_stage_loads_every_kernel(tmp_path, cache):
    session = boot(tmp_path, cache, "w4a16_gemv::w4a16_gemv", stage=None)
    assert (codes(session), session.report.stage_reached) == ([], "loaded")
    assert session.report.device


def test_gemv_family_is_proven(tmp_path, cache):
    session = boot(tmp_path, cache, *FAMILY)
    assert codes(session) == []
    assert {row.key: row.stage for row in session.report.kernels} == dict.fromkeys(FAMILY, "proven")


def test_good_kernel_is_proven(tmp_path, cache):
    session = boot(tmp_path, cache, "acme::twice", local={"acme": plugin(tmp_path, GOOD)})
    assert (codes(session), session.report.stage_reached) == ([], "proven")


@pytest.mark.parametrize(
    ("code", "text"), [*BROKEN.items(), ("OUT_OF_BOUNDS", CHANGED_INPUT)], ids=[*BROKEN, "CHANGED_INPUT"]
)
def test_broken_kernel_trips_exactly_its_code_on_the_device(tmp_path, cache, code, text):
    session = boot(tmp_path, cache, "acme::twice", "acme::good", local={"acme": plugin(tmp_path, text)})
    assert codes(session) == [(code, "acme::twice")]
    assert {row.key: row.stage for row in session.report.kernels} == {"acme::twice": "loaded", "acme::good": "proven"}


def test_static_and_dynamic_shared_memory_may_exceed_48_kib_together(tmp_path, cache):
    text = HEAD + INDEX + (
        "  __shared__ float fixed[8192];\n  extern __shared__ float asked[];\n"
        "  fixed[8191 - threadIdx.x] = i < n ? x[i] : 0; asked[8191 - (threadIdx.x ^ 1)] = 2;\n  __syncthreads();\n"
        "  if (i < n) out[i] = fixed[8191 - threadIdx.x] * asked[8191 - threadIdx.x];\n}\n"
    )  # fmt: skip
    local = {"acme": plugin(tmp_path, text, dynamic_shared_bytes=32768)}
    assert codes(boot(tmp_path, cache, "acme::twice", local=local)) == []


def test_claim_of_other_bits_is_broken_on_the_device(tmp_path, cache):
    local = {"acme": plugin(tmp_path, GOOD.replace("* 2;", "* 2.0000002f;"), bit_identical_to=("acme::good",))}
    assert codes(boot(tmp_path, cache, "acme::twice", local=local)) == [("BIT_IDENTITY_BROKEN", "acme::twice")]


Builder = builder.Builder


class OtherCode(Builder):
    """A compiler whose code no driver of this device takes."""

    def finish(self, begun):
        return self.changed(super().finish(begun), begun.request)


class Corrupted(OtherCode):
    def changed(self, built, request):
        return replace(built, cubin=bytes(64) + built.cubin[64:])


class ForAnotherChip(OtherCode):
    def changed(self, built, request):
        other = "sm_80" if str(request.arch) != "sm_80" else "sm_90a"
        cubin = Builder().build(replace(request, arch=parse_arch(other))).cubin
        return replace(built, cubin=cubin)


@pytest.mark.parametrize("compiler", [Corrupted, ForAnotherChip])
def test_code_that_the_driver_refuses_is_load_failed(tmp_path, cache, monkeypatch, compiler):
    monkeypatch.setattr(builder, "Builder", compiler)
    session = boot(tmp_path, cache, "acme::twice", local={"acme": plugin(tmp_path, GOOD)}, stage=None)
    assert codes(session) == [("LOAD_FAILED", "acme::twice")]
    assert "cuModuleLoadData: CUDA_ERROR_" in session.report.findings[0].why
    assert session.report.kernels[0].stage == "compiled"


# An access that the device cannot survive needs a process of its own.
_CHILD = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("device_tests", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
folder = Path(sys.argv[2])
local = {"acme": tests.plugin(folder, tests.WILD)}
session = tests.boot(folder, sys.argv[3], "acme::twice", "gemv::dense_gemv_bf16", local=local)
report = session.report
found = [[f.code, f.subject, f.why] for f in report.findings if f.severity == "refuse"]
print(json.dumps([found, {row.key: row.stage for row in report.kernels}]))
"""


def test_access_that_stops_the_device_is_out_of_bounds_and_ends_the_proofs(tmp_path, cache):
    command = [sys.executable, "-c", _CHILD, __file__, str(tmp_path), cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (((code, subject, why),), stages) = json.loads(done.stdout.splitlines()[-1])
    assert (code, subject) == ("OUT_OF_BOUNDS", "acme::twice")
    assert "the device stopped" in why
    assert stages == {"acme::twice": "loaded", "gemv::dense_gemv_bf16": "loaded"}


# What does not end needs one too, and ends with it.
_PLUGIN = """
import importlib.util
from pathlib import Path

import kernel_muster as km

spec = importlib.util.spec_from_file_location("device_tests", {tests!r})
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
made = tests.plugin(Path({folder!r}), tests.SPINS)
muster_contracts, muster_kernels = made.muster_contracts, made.muster_kernels


@km.hookimpl
def muster_models():
    return [km.ModelBuilder("acme", ("acme_type",), "production", build)]


def build(manifest, kernels, weights=None):
    for key in ("acme::twice", "gemv::dense_gemv_bf16"):
        kernels.kernel(*key.split("::"))
"""
_COMMAND = """
import sys
from kernel_muster.audit import checking
from kernel_muster.bench import race
checking.CASE_S = 2
race.LONGEST_WAIT_S = 2
from kernel_muster.__main__ import main
sys.exit(main())
"""
_BOOTS = """
import json, os, sys
import kernel_muster as km
from kernel_muster.audit import checking
checking.CASE_S = 2
found = []
for _ in range(2):
    try:
        with km.boot(manifest=sys.argv[1], target="cuda", stage="proven") as boot:
            km.build_model(boot.manifest, boot.kernels)
    except km.BootRefused as refused:
        rows = [row for row in refused.report.findings if row.severity != "note" and "TUNING" not in row.code]
        found.append([[row.code, row.subject] for row in rows])
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture
def spinning(tmp_path, cache):
    """Return what runs a script where a plugin is installed whose kernel spins: its result, and how long it took."""
    site = tmp_path / "site"
    info = site / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernel_muster.v1]\nacme = acme_spins\n")
    (site / "acme_spins.py").write_text(_PLUGIN.format(tests=__file__, folder=str(tmp_path)))
    manifest = tmp_path / "spins" / "MODEL.toml"
    manifest.parent.mkdir()
    manifest.write_text('[model]\nname = "spins"\nquant = "nvfp4"\nmodel_type = "acme_type"\n')
    path = os.pathsep.join([str(site), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "MUSTER_CACHE_DIR": cache}

    def run(script, *arguments):
        command = [sys.executable, "-c", script, *(str(manifest) if part == "MANIFEST" else part for part in arguments)]
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        return done, time.monotonic() - start

    return run


def test_kernel_that_does_not_end_refuses_the_audit_and_the_command_ends_without_it(spinning, tmp_path, cache):
    options = ("audit", "--target", "cuda", "--stage", "proven", "--format", "json", "--manifest", "MANIFEST")
    done, seconds = spinning(_COMMAND, *options)
    assert done.returncode == 1, done.stderr
    assert seconds < SPIN_S - 2
    report = json.loads(done.stdout)
    rows = [row for row in report["findings"] if row["severity"] != "note" and "TUNING" not in row["code"]]
    found = {row["code"]: row for row in rows}
    assert {code: row["subject"] for code, row in found.items()} == {
        "NUMERICS_FAILED": "acme::twice",
        "UNCHECKED": "gemv::dense_gemv_bf16",
    }
    assert found["NUMERICS_FAILED"]["why"] == "case one: it was still running after 2 s, and cuda:0 is given up"
    assert {row["stage"] for row in report["kernels"]} == {"loaded"}
    again = boot(tmp_path, cache, "acme::good", local={"acme": plugin(tmp_path, GOOD)})
    assert again.report.passed


def test_boot_on_a_device_that_is_stuck_is_refused(spinning):
    done, seconds = spinning(_BOOTS, "MANIFEST")
    assert done.returncode == 0, done.stderr
    assert seconds < SPIN_S - 2
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first == [["NUMERICS_FAILED", "acme::twice"], ["UNCHECKED", "gemv::dense_gemv_bf16"]]
    assert second == [["NO_DEVICE", "cuda"]]


def test_launches_that_do_not_end_end_the_measurement(spinning):
    done, seconds = spinning(_COMMAND, "bench", "acme::twice", "--no-peers")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert seconds < SPIN_S - 2
    wanted = "muster: error: cuda:0 still runs the launches of acme::twice, which did not end: "
    assert wanted in done.stderr
