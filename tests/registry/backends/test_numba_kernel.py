import importlib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from kernel_muster.plugins.quantize_nvfp4 import launch
from kernel_muster.registry.backends import BuildFailure
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.cubin.cubin import inspect_cubin
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.numba import toolchain
from kernel_muster.registry.backends.numba.numba_kernel import NumbaEntry, NumbaKernel
from kernel_muster.registry.backends.numba.python_sources import read_sources
from kernel_muster.registry.backends.pool import build_all
from kernel_muster.registry.contract.arrays import view_of
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.hardware.arch import parse_arch

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_121a")
HEAD = "import numpy as np\nfrom numba import cuda\n\n\n"
HALF = "@cuda.jit(device=True)\ndef half(value):\n    return value * np.float32(0.5)\n\n\n"
SCALE = "@cuda.jit\ndef scale(x, factor, n, out):\n    i = cuda.grid(1)\n    if i < n:\n        out[i] = {value}\n"
GOOD = HEAD + HALF + SCALE.format(value="half(x[i]) * factor")
ENTRY = NumbaEntry("scale", ("f32*", "f32", "i32", "f32*"), 128)


@pytest.fixture
def kernel(tmp_path):
    def make(text=GOOD, *entries, plan=None):
        source = tmp_path / "kernels.py"
        source.write_text(text)
        return NumbaKernel(source, entries or (ENTRY,), plan)

    return make


@pytest.fixture
def failure(builder, kernel):
    def of(text=GOOD, *entries, arch="sm_90a"):
        with pytest.raises(BuildFailure) as caught:
            builder.build(kernel(text, *entries).request(parse_arch(arch)))
        return caught.value

    return of


@needs_numba
@pytest.mark.parametrize("arch", ARCHS)
def test_build_without_a_device_gives_the_code_of_the_architecture(builder, kernel, arch):
    built = builder.build(kernel().request(parse_arch(arch)))
    assert inspect_cubin(built.cubin).serves(parse_arch(arch))
    assert inspect_cubin(built.cubin).suffix == parse_arch(arch).suffix
    needs = built.entries["scale"]
    assert needs.parameters == ((0, 8), (8, 4), (12, 4), (16, 8))
    assert (needs.max_threads, needs.static_shared_bytes, needs.stack_bytes) == (128, 0, 0)
    assert (needs.spill_store_bytes, needs.spill_load_bytes) == (0, 0)
    assert f"for '{arch}'" in built.log
    assert built.compiler.startswith("numba-cuda ")


@needs_numba
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_the_quantiser_compile_without_spills_or_stack(builder, arch):
    built = builder.build(launch.QUANTIZE.request(parse_arch(arch)))
    assert set(built.entries) == {"clear", "absmax", "quantize", "quantize_t", "finish", "transpose"}
    for needs in built.entries.values():
        assert (needs.stack_bytes, needs.spill_store_bytes, needs.spill_load_bytes) == (0, 0, 0)
    assert built.entries["quantize_t"].static_shared_bytes == 72 * 33


@needs_numba
def test_builds_of_one_source_give_the_same_bytes_whatever_was_compiled_before(builder, kernel):
    request = kernel().request(parse_arch("sm_90a"))
    first = builder.build(request).digest
    builder.build(kernel().request(parse_arch("sm_80")))
    assert builder.build(request).digest == first


@needs_numba
def test_kernels_that_share_a_function_and_own_shared_memory_link_into_one_cubin(builder, kernel):
    body = "    tile = cuda.shared.array(128, np.float32)\n    i = cuda.grid(1)\n    tile[i % 128] = x[i]\n"
    body += "    cuda.syncthreads()\n    out[i] = half(tile[(i + 1) % 128])\n"
    text = HEAD + HALF + "".join(f"@cuda.jit\ndef {name}(x, out):\n{body}\n\n" for name in ("one", "two"))
    entries = [NumbaEntry(name, ("f32*", "f32*")) for name in ("one", "two")]
    built = builder.build(kernel(text, *entries).request(parse_arch("sm_90a")))
    assert [needs.static_shared_bytes for needs in built.entries.values()] == [512, 512]


@needs_numba
def test_array_parameters_are_what_the_cubin_takes_member_by_member(builder, kernel):
    text = HEAD + "@cuda.jit\ndef copy(x, out):\n    i, j = cuda.grid(2)\n    out[i, j] = x[i, j]\n"
    built = builder.build(kernel(text, NumbaEntry("copy", ("u16[:,:]", "u16[:,:]"))).request(parse_arch("sm_80")))
    assert built.entries["copy"].parameters == tuple((8 * position, 8) for position in range(2 * 9))


@needs_numba
def test_cache_knows_source_helpers_entries_architecture_and_versions(kernel, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "acme_numba_helper.py"
    helper.write_text(HEAD + HALF)
    builder = Builder(BuildCache(tmp_path / "cache"))
    text = HEAD + "from acme_numba_helper import half\n\n\n" + SCALE.format(value="half(x[i])")
    backend, arch = kernel(text), parse_arch("sm_90a")
    keys, digests = {builder.key(backend.request(arch))}, {backend.source_sha256}
    assert not builder.build(backend.request(arch)).from_cache
    assert builder.build(backend.request(arch)).from_cache
    assert kernel(text).source_sha256 in digests
    helper.write_text(HEAD + HALF.replace("0.5", "0.25"))
    digests.add(kernel(text).source_sha256)
    keys.add(builder.key(backend.request(arch)))
    keys.add(builder.key(kernel(text + "\n").request(arch)))
    digests.add(kernel(text + "\n").source_sha256)
    keys.add(builder.key(kernel(text + "\n", replace(ENTRY, threads=64)).request(arch)))
    keys.add(builder.key(kernel(text + "\n").request(parse_arch("sm_80"))))
    monkeypatch.setenv("NUMBA_OPT", "0")
    keys.add(builder.key(kernel(text + "\n").request(arch)))
    (tmp_path / ".numba_config.yaml").write_text("opt: 1\n")
    monkeypatch.chdir(tmp_path)
    keys.add(builder.key(kernel(text + "\n").request(arch)))
    versions = toolchain.versions()
    monkeypatch.setattr(toolchain, "versions", lambda: versions | {"numba": "0"})
    keys.add(builder.key(kernel(text + "\n").request(arch)))
    assert (len(keys), len(digests)) == (8, 3)


@needs_numba
def test_functions_of_a_helper_are_compiled_anew_for_each_architecture(builder, kernel, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_numba_again.py").write_text(HEAD + HALF)
    text = HEAD + "from acme_numba_again import half\n\n\n" + SCALE.format(value="half(x[i])")
    mine = importlib.import_module("acme_numba_again")
    built = {arch: builder.build(kernel(text).request(parse_arch(arch))) for arch in ("sm_80", "sm_121a")}
    assert built["sm_80"].digest != built["sm_121a"].digest
    assert sys.modules["acme_numba_again"] is mine
    assert not mine.half.overloads  # imports of this process take no part


@needs_numba
def test_helper_that_was_imported_before_it_changed_is_compiled_as_it_is_now(builder, kernel, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "acme_numba_edited.py"
    helper.write_text(HEAD + HALF)
    importlib.import_module("acme_numba_edited")
    text = HEAD + "from acme_numba_edited import half\n\n\n" + SCALE.format(value="half(x[i])")
    first = builder.build(kernel(text).request(parse_arch("sm_90a")))
    helper.write_text(HEAD + HALF.replace("0.5", "0.25"))
    again = builder.build(kernel(text).request(parse_arch("sm_90a")))
    assert first.digest != again.digest
    assert again.source_sha256 == kernel(text).source_sha256 != first.source_sha256


PACKAGE = {
    "__init__.py": "FACTOR = 2\n",
    "helpers.py": HEAD + "from . import factors\nfrom .deep.inner import SHARE\n\n\n" + HALF.replace("0.5", "SHARE"),
    "factors.py": "F = 1\n",
    "deep/__init__.py": "",
    "deep/inner.py": "from ..factors import F\nSHARE = F / 4\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that writes a package with some files of another text."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, **texts):
        for file, text in (PACKAGE | texts).items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)

    return write


@needs_numba
@pytest.mark.parametrize("imported", ["import {}.helpers as h", "import {}.helpers", "from {} import helpers as h"])
@pytest.mark.parametrize(("file", "text"), [("factors.py", "F = 3\n"), ("deep/inner.py", "SHARE = 7\n")])
def test_module_that_a_helper_imports_from_its_package_is_hashed_and_compiled_as_it_is_now(
    builder, kernel, package, imported, file, text
):
    name = f"acme_numba_{len(imported)}_{file[:2]}"
    package(name)
    importlib.import_module(f"{name}.helpers")
    called = "h.half(x[i])" if imported.endswith(" h") else f"{name}.helpers.half(x[i])"
    made = kernel(f"{imported.format(name)}\n{HEAD}{SCALE.format(value=called)}")
    first = builder.build(made.request(parse_arch("sm_90a")))
    package(name, **{file: text})
    again = builder.build(made.request(parse_arch("sm_90a")))
    assert first.source_sha256 != again.source_sha256 == made.source_sha256
    assert first.digest != again.digest


@needs_numba
def test_attribute_of_a_package_that_a_helpers_import_makes_usable_is_hashed(builder, kernel, package):
    package("acme_numba_whole")
    text = f"import acme_numba_whole.factors\n{HEAD}{SCALE.format(value='x[i] * acme_numba_whole.FACTOR')}"
    made = kernel(text)
    first = builder.build(made.request(parse_arch("sm_90a")))
    package("acme_numba_whole", **{"__init__.py": "FACTOR = 5\n"})
    again = builder.build(made.request(parse_arch("sm_90a")))
    assert first.source_sha256 != again.source_sha256
    assert first.digest != again.digest


def test_sources_of_the_host_are_not_followed_and_its_version_is_part_of_the_key(kernel):
    text = "import kernel_muster as km\nfrom kernel_muster.registry.contract import nvfp4\n"
    names = [name for name, _ in read_sources(kernel(text).source)]
    assert names == [""]
    text = "from kernel_muster.plugins.quantize_nvfp4 import kernels\n"
    names = [name for name, _ in read_sources(kernel(text).source)]
    assert "kernel_muster.plugins.quantize_nvfp4.kernels" in names
    assert all(name.startswith("kernel_muster.plugins") for name in names[1:])


@needs_numba
def test_versions_of_all_that_a_kernel_may_import_are_part_of_the_key():
    assert {"kernel-muster", "ml-dtypes", "numpy", "numba", "numba-cuda"} <= toolchain.versions().keys()


@needs_numba
def test_builds_in_a_pool_are_as_good_as_alone(builder, kernel):
    requests = [kernel().request(parse_arch(arch)) for arch in ARCHS]
    outcomes = build_all(Builder(), requests, workers=4)
    assert [outcome.built.digest for outcome in outcomes] == [builder.build(request).digest for request in requests]


@needs_numba
@pytest.mark.parametrize(
    ("text", "entry", "code", "why"),
    [
        (GOOD.replace("* factor", "* nowhere"), ENTRY, "COMPILE_FAILED", "nowhere"),
        (GOOD.replace("    if", "  if"), ENTRY, "COMPILE_FAILED", "kernels.py:13: unindent"),
        ("raise SystemExit(3)\n", ENTRY, "COMPILE_FAILED", "cannot be loaded: SystemExit: 3"),
        (GOOD, replace(ENTRY, name="missing"), "NO_DEVICE_CODE", "missing is no function under @cuda.jit"),
        (GOOD, NumbaEntry("half", ("f32",)), "NO_DEVICE_CODE", "half is no function under @cuda.jit"),
        (
            GOOD,
            NumbaEntry("scale", ("f32*",)),
            "NO_DEVICE_CODE",
            "scale: 1 parameters are declared, the kernel takes 4: x, factor, n, out (at ",
        ),
        (
            GOOD.replace("@cuda.jit\n", "@cuda.jit(debug=True, opt=False)\n"),
            ENTRY,
            "COMPILE_FAILED",
            "has debug, which is not carried; what is: device, fastmath, lineinfo",
        ),
        (HEAD + "@cuda.jit\ndef scale(x, factor, n, out):\n    pass\n", ENTRY, "NO_DEVICE_CODE", "empty body"),
        (GOOD, replace(ENTRY, dynamic_shared_bytes=1 << 20), "OVER_LIMIT", "bytes of shared memory"),
    ],
)
def test_broken_kernel_is_a_finding_that_says_why(failure, text, entry, code, why):
    found = failure(text, entry)
    assert found.code == code
    assert why in found.why
    assert found.remedies


@needs_numba
@pytest.mark.parametrize(
    ("old", "new", "said", "line"),
    [
        ("\n\n", "\nint('a')\n", "ValueError: invalid literal for int() with base 10: 'a'", "int('a')"),
        ("* factor", '* "x"', "found for signature: >>> mul(float32, Literal[str](x))", '* "x"'),
        ("* factor", "* factor.nothing", "TypingError: Unknown attribute 'nothing' of type float32", "factor.nothing"),
        ("* factor", "* nowhere", "TypingError: NameError: name 'nowhere' is not defined", "* nowhere"),
        (" * np.float32(0.5)", ' + "a"', "found for signature: >>> add(float32, Literal[str](a))", '+ "a"'),
        (
            "    if",
            '    with open("f") as f:\n        i = 0\n    if',
            "BytecodeError: The 'with (context manager) as (variable):' construct is not supported.. Raised from None",
            "with open",
        ),
    ],
)
def test_failure_says_what_is_not_found_and_in_which_line_before_numbas_own_lines(failure, old, new, said, line):
    text = GOOD.replace(old, new, 1)
    found = failure(text, ENTRY)
    number = text[: text.index(line)].count("\n") + 1
    assert f"{said} (at " in found.why
    place = found.why.rpartition("(at ")[2].removesuffix(")")
    assert place.endswith(f"kernels.py:{number}")
    assert found.remedies == (f"correct the source at {place}: the log says more",)
    first, _, rest = found.log.partition("\n\n")
    assert first == f"{place}: {text.splitlines()[number - 1].strip()}"
    assert said.split(": ")[1].split(" >>>")[0] in rest
    assert ("raised in, innermost last:" in rest) == said.startswith("ValueError")  # no frames of Numba


@needs_numba
def test_failure_in_the_linker_keeps_its_log(failure):
    text = GOOD.replace(
        "    i = cuda.grid(1)\n", "    i = cuda.grid(1)\n    big = cuda.shared.array(70000, np.float32)\n"
    )
    found = failure(text.replace("half(x[i])", "big[i]"), arch="sm_80")
    assert found.code == "OVER_LIMIT"
    assert "uses too much shared data (280000 bytes, 49152 max)" in found.why
    assert found.remedies == ("make the tile smaller for this architecture, or do not declare it in archs",)
    assert "too much shared" in found.log


def test_nothing_of_numba_is_imported_before_something_is_compiled(kernel):
    script = (
        "import sys; from kernel_muster.plugins.quantize_nvfp4 import launch\n"
        "launch.QUANTIZE.source_sha256\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'numba', 'llvmlite', 'cuda', 'cupy'}))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "\n"


@pytest.mark.parametrize("text", ["ptr", "bf16*", "u16[", "f32**", "u16[::1]", ""])
def test_parameter_that_is_no_type_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"scale: parameters ['{text}'], expected such as u16*")):
        NumbaEntry("scale", ("f32", text))


def test_plan_takes_arrays_apart_and_never_overlaps(kernel):
    data = view_of(np.zeros((3, 5), np.float32))
    entry = NumbaEntry("scale", ("u32[:,:]", "u32*", "i64"))
    plan = LaunchPlan("scale", (1, 1, 1), (data, data, 7))
    (planned,) = kernel(GOOD, entry, plan=lambda bound, entries: plan).plan(None, {})
    assert planned.arguments == (0, 0, 15, 4, data, 3, 5, 20, 4, data, 7)
    assert not planned.may_overlap


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((np.zeros((3, 5), np.float32),), "has 1 arguments, expected 2"),
        ((np.zeros(15, np.float32), 1), "an array of float32 (15,), expected a contiguous u32[:,:]"),
        ((np.zeros((3, 5), np.float64), 1), "an array of float64 (3, 5), expected a contiguous u32[:,:]"),
        ((np.zeros((3, 8), np.float32)[:, :5], 1), "an array of float32 (3, 5), expected a contiguous u32[:,:]"),
    ],
)
def test_plan_that_does_not_fit_the_parameters_is_refused(kernel, arguments, why):
    views = tuple(view_of(value) if isinstance(value, np.ndarray) else value for value in arguments)
    plan = LaunchPlan("scale", (1, 1, 1), views)
    backend = kernel(GOOD, NumbaEntry("scale", ("u32[:,:]", "i64")), plan=lambda bound, entries: plan)
    with pytest.raises(MusterError, match=re.escape(why)):
        backend.plan(None, {})


@needs_numba
def test_failure_in_a_helper_of_the_authors_names_the_helpers_line(failure, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "acme_numba_blamed.py"
    helper.write_text(HEAD + HALF.replace("value *", '"a" *'))
    found = failure(HEAD + "from acme_numba_blamed import half\n\n\n" + SCALE.format(value="half(x[i])"))
    assert f"(at {helper}:7)" in found.why


def test_source_that_is_not_there_says_what_ships_it(builder, tmp_path):
    backend = NumbaKernel(tmp_path / "gone.py", (ENTRY,), None)
    with pytest.raises(BuildFailure, match="cannot be read: No such file") as caught:
        builder.build(backend.request(parse_arch("sm_90a")))
    assert caught.value.remedies == ("let the distribution ship it as package data, and install it again",)


@pytest.mark.parametrize(
    ("text", "dtype", "expected"),
    [
        ("f64*", "f32", "f32* (or u32*, to carry its bits)"),
        ("f32*", "f64", "f64* (or u64*, to carry its bits)"),
        ("f32*", "bf16", "u16*, to carry its bits"),
        ("f32*", "f16", "u16*, to carry its bits"),
        ("f32*", "u8", "u8*, to carry its bits"),
        ("f64*", "i32", "u32*, to carry its bits"),
    ],
)
def test_float_pointer_to_elements_of_another_size_is_refused(kernel, text, dtype, expected):
    backend = _pointing(kernel, text, dtype)
    with pytest.raises(MusterError, match="scale: argument 0 is an array of ") as caught:
        backend.plan(None, {})
    assert str(caught.value).endswith(f", declared as {text}: expected {expected}")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("f32*", "f32"), ("f64*", "f64"), ("f32*", "u32"), ("u16*", "bf16"), ("u32*", "bf16"), ("u32*", "u8"),
     ("u8*", "e4m3"), ("u64*", "f32"), ("i32*", "i64")],
)  # fmt: skip
def test_pointer_that_reads_the_elements_or_carries_their_bits_is_planned(kernel, text, dtype):
    (planned,) = _pointing(kernel, text, dtype).plan(None, {})
    assert len(planned.arguments) == 1


def _pointing(kernel, text, dtype):
    plan = LaunchPlan("scale", (1, 1, 1), (view_of(np.zeros(8, numpy_dtype(dtype))),))
    return kernel(GOOD, NumbaEntry("scale", (text,)), plan=lambda bound, entries: plan)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_source_that_is_no_regular_file_is_refused_at_once(make, builder, tmp_path):
    make(tmp_path / "k.py")
    backend = NumbaKernel(tmp_path / "k.py", (ENTRY,), None)
    with pytest.raises(BuildFailure, match="cannot be read: it is no regular file"):
        builder.build(backend.request(parse_arch("sm_90a")))
