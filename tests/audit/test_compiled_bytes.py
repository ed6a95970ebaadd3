"""The set hash covers the compiled bytes, at whatever time the files of a kernel change."""

import importlib.util
import json
from dataclasses import replace

import kernel_muster as km
import pytest
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
from kernel_muster.registry.backends.nvrtc import closure
from kernel_muster.registry.backends.request import EntryPoint
from kernel_muster.registry.keys import parse_key

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs the extra nvrtc13")
SOURCE = """\
#include "factor.cuh"
extern "C" __global__ void scale_rows(const float* x, int n, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * FACTOR;
}
"""
EDGE = km.Lever(name="MUSTER_ACME_EDGE", kind="int", default=32, doc="an edge", tuning="same_bits")
TWO, THREE = "#define FACTOR 2.0f\n", "#define FACTOR 3.0f\n"


@pytest.fixture
def kernel(tmp_path):
    (tmp_path / "scale.cu").write_text(SOURCE)
    (tmp_path / "factor.cuh").write_text(TWO)
    return CudaKernel(tmp_path / "scale.cu", (EntryPoint("scale_rows", ("ptr", "i32", "ptr")),), lambda *given: None)


@pytest.fixture
def boot(world, kernel, tmp_path):
    def boot(stage="compiled", build=None, backend=kernel, more=(), **options):
        spec = world.spec("acme::a", archs=("sm_80+",), backend=backend)
        plugin = world.plugin("acme_plugin", kernels=[spec], levers=[EDGE])
        levers = {"MUSTER_CACHE_DIR": str(tmp_path / "cache")} | dict(more)
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
def test_header_edited_while_the_boot_compiles_is_hashed_as_it_was_compiled(boot, tmp_path, request):
    expected = dict.fromkeys((TWO, THREE), "")
    for text in expected:
        (tmp_path / "factor.cuh").write_text(text)
        expected[text] = boot().report.set_hash
    (tmp_path / "factor.cuh").write_text(TWO)
    request.getfixturevalue("edited_after_reading")
    outcome = boot()  # compiles TWO; the file holds THREE by the time of the report
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


@pytest.fixture
def edited_after_reading(tmp_path, monkeypatch):
    """Let the header change as soon as it was read."""
    read = closure.read_source

    def edit_after_reading(path):
        text = read(path)
        if path.name == "factor.cuh":
            path.write_text(THREE)
        return text

    monkeypatch.setattr(closure, "read_source", edit_after_reading)


@needs_compiler
@pytest.mark.parametrize("stage", ["registered", "compiled"])
def test_trace_written_after_an_edit_has_the_set_hash_of_its_report(boot, tmp_path, stage):
    outcome = boot(stage)
    (tmp_path / "factor.cuh").write_text(THREE)
    assert outcome.replay(expect_set_hash=outcome.report.set_hash).passed


@needs_compiler
def test_handle_has_the_digest_of_what_was_compiled(boot, kernel, tmp_path):
    compiled = kernel.source_sha256
    handle = boot().session.handle_of(parse_key("acme::a"))
    (tmp_path / "factor.cuh").write_text(THREE)
    assert handle.source_sha256 == compiled
    assert handle.spec.backend.source_sha256 != compiled


@needs_compiler
@pytest.mark.parametrize("measured", [TWO, THREE])
def test_tuning_table_is_compared_with_what_was_compiled(boot, world, kernel, tmp_path, measured, request):
    (tmp_path / "factor.cuh").write_text(measured)
    table = world.tuning_table({"acme::a": kernel.source_sha256}, {EDGE.name: 64})
    (tmp_path / "table.json").write_text(json.dumps(table))
    (tmp_path / "factor.cuh").write_text(TWO)
    request.getfixturevalue("edited_after_reading")
    outcome = boot(more={"MUSTER_TUNING_TABLE": str(tmp_path / "table.json")})
    assert outcome.codes == ([] if measured == TWO else ["TUNING_STALE"])


class Fickle(CudaKernel):
    """A backend that asks for another factor each time."""

    def request(self, arch):
        asked.append(arch)
        return replace(super().request(arch), options=(f"-DN={len(asked)}",))


asked: list[object] = []


@needs_compiler
def test_kernel_is_built_once_in_a_boot_whatever_its_backend_asks_for_later(boot, kernel):
    asked.clear()
    outcome = boot(backend=Fickle(kernel.source, kernel.entries, kernel.planner))
    assert outcome.report.passed
    assert len(asked) == 1
    expected = closure.read_closure(kernel.source).sha256(("-DN=1",))
    assert outcome.session.handle_of(parse_key("acme::a")).source_sha256 == expected
    assert outcome.session.trace()["kernels"][0]["source_sha256"] == expected


@needs_compiler
def test_trace_holds_the_digest_of_the_bytes_that_were_compiled(boot, kernel):
    outcome = boot()
    assert outcome.replay().set_hash == outcome.report.set_hash
