"""The set hash is that of the bytes that were compiled, whenever the files of a kernel change."""

import importlib.util

import pytest
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
from kernel_muster.registry.backends.nvrtc import closure
from kernel_muster.registry.backends.request import EntryPoint

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs the extra nvrtc13")
SOURCE = """\
#include "factor.cuh"
extern "C" __global__ void scale_rows(const float* x, int n, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * FACTOR;
}
"""
TWO, THREE = "#define FACTOR 2.0f\n", "#define FACTOR 3.0f\n"


@pytest.fixture
def kernel(tmp_path):
    (tmp_path / "scale.cu").write_text(SOURCE)
    (tmp_path / "factor.cuh").write_text(TWO)
    return CudaKernel(tmp_path / "scale.cu", (EntryPoint("scale_rows", ("ptr", "i32", "ptr")),), lambda *given: None)


@pytest.fixture
def boot(world, kernel, tmp_path):
    plugin = world.plugin("acme_plugin", kernels=[world.spec("acme::a", archs=("sm_80+",), backend=kernel)])

    def boot(stage="compiled", build=None, **options):
        levers = {"MUSTER_CACHE_DIR": str(tmp_path / "cache")}
        build = build or world.ask("acme::a")
        return world.run(build, {"acme": plugin}, target="sm_90a", stage=stage, levers=levers, **options)

    return boot


@needs_compiler
@pytest.mark.parametrize("stage", ["registered", "compiled"])
def test_header_edited_between_two_boots_of_one_process_gives_another_set_hash(boot, tmp_path, stage):
    first = boot(stage)
    assert first.report.passed
    (tmp_path / "factor.cuh").write_text(THREE)
    outcome = boot(stage, expect_set_hash=first.report.set_hash)
    assert outcome.codes == ["SET_HASH_MISMATCH"]
    (tmp_path / "factor.cuh").write_text(TWO)
    assert boot(stage, expect_set_hash=first.report.set_hash).report.passed


@needs_compiler
def test_header_edited_while_the_boot_compiles_is_hashed_as_it_was_compiled(boot, kernel, tmp_path, monkeypatch):
    expected = dict.fromkeys((TWO, THREE), "")
    for text in expected:
        (tmp_path / "factor.cuh").write_text(text)
        expected[text] = boot().report.set_hash
    (tmp_path / "factor.cuh").write_text(TWO)
    read = closure.read_source

    def edit_after_reading(path):
        text = read(path)
        if path.name == "factor.cuh":
            path.write_text(THREE)
        return text

    monkeypatch.setattr(closure, "read_source", edit_after_reading)
    outcome = boot()  # compiles TWO; the file holds THREE when the report is made
    assert (tmp_path / "factor.cuh").read_text() == THREE
    assert outcome.report.set_hash == expected[TWO]


@needs_compiler
def test_source_edited_between_lookup_and_compilation_is_hashed_as_it_was_compiled(boot, kernel, tmp_path):
    def edit_and_ask(opened):
        kernel.source_sha256  # noqa: B018  (what a lookup, a table or a report may have asked for before)
        (tmp_path / "factor.cuh").write_text(THREE)
        opened.kernels.kernel("acme", "a")

    got = boot(build=edit_and_ask).report.set_hash
    assert got == boot().report.set_hash
    (tmp_path / "factor.cuh").write_text(TWO)
    assert got != boot().report.set_hash


@needs_compiler
def test_trace_holds_the_digest_of_the_bytes_that_were_compiled(boot, kernel):
    outcome = boot()
    assert outcome.replay().set_hash == outcome.report.set_hash
