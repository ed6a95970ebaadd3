"""Refusals without a compiler: options, entry points, and unreadable sources."""

import zipfile
from dataclasses import replace

import pytest
from kernel_muster.registry.backends import EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
from kernel_muster.registry.backends.numba.numba_kernel import NumbaEntry, NumbaKernel

GOOD = 'extern "C" __global__ void k(float* out) { *out = 1; }\n'
ENTRY = EntryPoint("k", ("ptr",))


@pytest.fixture
def kernel(tmp_path):
    (tmp_path / "k.cu").write_text(GOOD)
    return CudaKernel(tmp_path / "k.cu", (ENTRY,), lambda bound, entries: None)


@pytest.fixture
def ask(world, tmp_path):
    """Boot for an architecture, and ask for a kernel with this backend."""

    def ask(backend, stage):
        plugin = world.plugin("acme_plugin", kernels=[world.spec("acme::a", archs=("sm_80+",), backend=backend)])
        levers = {"MUSTER_CACHE_DIR": str(tmp_path / "cache")}
        return world.run(world.ask("acme::a"), {"acme": plugin}, target="sm_90a", stage=stage, levers=levers)

    return ask


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"options": ("-arch=sm_80",)}, "options: option '-arch=sm_80' is not allowed; what is: -DNAME=VALUE"),
        ({"options": ("-I", "/usr/include")}, "options: option '-I' is not allowed"),
        ({"options": ("-D",)}, "options: option -D lacks its value"),
        ({"options": (64,)}, "options: option 64 is not text"),
        ({"options": "-lineinfo"}, "options is '-lineinfo', expected a tuple of text"),
        ({"options": ["-lineinfo"]}, "options is ['-lineinfo'], expected a tuple of text"),
        ({"entries": ()}, "entries is empty: no entry point is named"),
        ({"entries": (ENTRY, ENTRY)}, "entries: entry points named twice: k"),
        ({"entries": ENTRY}, "entries is EntryPoint("),
        ({"entries": ("k",)}, "entries is ('k',), expected a tuple of EntryPoint"),
    ],
)
def test_kernel_that_nothing_could_compile_is_a_bad_spec_without_a_compiler(world, kernel, change, said):
    spec = world.spec("acme::a", archs=("sm_80+",), backend=replace(kernel, **change))
    outcome = world.run(world.ask("acme::b"), {"acme": world.plugin("acme_plugin", kernels=[spec])})
    assert "BAD_SPEC" in outcome.codes
    assert said in outcome.finding("BAD_SPEC").why


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ((), "entries is empty"),
        ((ENTRY,), "expected a tuple of NumbaEntry"),
        ((NumbaEntry("k", ()), NumbaEntry("k", ())), "entries: entry points named twice: k"),
    ],
)
def test_numba_kernel_without_entries_of_its_own_is_a_bad_spec(world, tmp_path, entries, said):
    backend = NumbaKernel(tmp_path / "k.py", entries, lambda bound, entries: None)
    spec = world.spec("acme::a", archs=("sm_80+",), backend=backend)
    outcome = world.run(world.ask("acme::b"), {"acme": world.plugin("acme_plugin", kernels=[spec])})
    assert said in outcome.finding("BAD_SPEC").why


@pytest.mark.parametrize("stage", ["registered", "compiled"])
def test_source_in_a_wheel_on_the_path_is_not_blamed_on_package_data(ask, kernel, tmp_path, stage):
    wheel = tmp_path / "acme-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("acme/k.cu", GOOD)
    found = ask(replace(kernel, source=wheel / "acme" / "k.cu"), stage).finding("COMPILE_FAILED")
    assert (
        f"k.cu: cannot be read: it is in the archive {wheel}, and only modules can be imported from there" in found.why
    )
    assert found.remedies == (f"install it, and take it off sys.path: pip install {wheel}",)


@pytest.mark.parametrize("stage", ["registered", "compiled"])
def test_include_that_is_not_followed_has_its_remedy_at_every_stage(ask, kernel, stage):
    kernel.source.write_text("#include HEADER\n" + GOOD)
    found = ask(kernel, stage).finding("COMPILE_FAILED")
    assert found.remedies == ('name the file plainly, on one line of its own: #include "file.cuh"',)
