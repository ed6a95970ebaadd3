import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_muster.registry.backends import BuildFailure, BuildRequest, EntryPoint
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.cubin.cubin import inspect_cubin
from kernel_muster.registry.backends.nvrtc.closure import read_closure
from kernel_muster.registry.backends.nvrtc.compiler import CompileInput, compile_cubin
from kernel_muster.registry.hardware.arch import Arch, parse_arch

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_121a")
BODY = "{ out[threadIdx.x] = factor; }"
SIGNATURE = 'extern "C" __global__ void scale(float factor, float* out) '
TWO = ("f32", "ptr")


def _failure(builder, request) -> BuildFailure:
    with pytest.raises(BuildFailure) as caught:
        builder.build(request)
    return caught.value


@pytest.mark.parametrize("arch", ARCHS)
def test_build_for_an_architecture_gives_its_code_and_resources(builder, make_request, arch):
    built = builder.build(make_request(arch=arch))
    assert inspect_cubin(built.cubin).capability == parse_arch(arch).capability
    assert f"for '{arch}'" in built.log
    needs = built.entries["scale"]
    assert needs.parameters == ((0, 8), (8, 4), (12, 4), (16, 8))
    assert (needs.max_threads, needs.static_shared_bytes, needs.stack_bytes, needs.cluster) == (128, 0, 0, None)
    assert (needs.spill_store_bytes, needs.spill_load_bytes) == (0, 0)
    assert 4 <= needs.registers <= 32
    assert needs.instructions > 5


@pytest.mark.parametrize("arch", ARCHS)
def test_build_twice_from_different_folders_gives_identical_bytes(builder, make_request, tmp_path, arch):
    text = '#include "../one.cuh"\n' + SIGNATURE + "{ out[threadIdx.x] = factor + file_of()[3]; }"
    digests = []
    for folder in ("here", "further/down/there"):
        source = tmp_path / folder / "kernels" / "scale.cu"
        request = make_request(text, TWO, arch, source=source)
        (source.parent.parent / "one.cuh").write_text("__device__ inline const char* file_of() { return __FILE__; }\n")
        digests.append(builder.build(request).digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("arch", ARCHS)
def test_declaration_checks_change_no_byte_of_the_code(builder, make_request, arch):
    request = make_request(arch=arch)
    bare = CompileInput(read_closure(request.source), request.arch, ("-std=c++17",))
    assert compile_cubin(bare, builder.toolkit).cubin == builder.build(request).cubin


def test_build_keeps_the_suffix_that_an_instruction_needs(builder, make_request):
    text = SIGNATURE + '{ asm volatile("wgmma.fence.sync.aligned;"); out[0] = factor; }'
    assert builder.build(make_request(text, TWO, "sm_90a")).entries
    failure = _failure(builder, make_request(text, TWO, "sm_90"))
    assert failure.code == "COMPILE_FAILED"
    assert "wgmma" in failure.why


def test_build_with_bf16_fp8_and_cooperative_groups_headers_compiles_from_wheels_only(builder, make_request):
    text = "#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n#include <cooperative_groups.h>\n"
    text += 'extern "C" __global__ void scale(__nv_bfloat16 factor, float* out) { *out = __bfloat162float(factor); }'
    assert builder.build(make_request(text, ("bf16", "ptr"), "sm_80")).entries["scale"].parameters == ((0, 2), (8, 8))


@pytest.mark.parametrize("arch", ARCHS)
def test_build_with_a_tensor_map_has_it_aligned_to_64_wherever_the_parameters_begin(builder, make_request, arch):
    text = "struct __align__(64) Map { unsigned char bytes[128]; };\n"
    text += (
        'extern "C" __global__ void scale(const __grid_constant__ Map m, float* out) { *out = m.bytes[threadIdx.x]; }'
    )
    (_, size), second = builder.build(make_request(text, ("tensormap", "ptr"), arch)).entries["scale"].parameters
    assert (size, second[1]) == (128, 8)


def test_build_that_spills_records_the_bytes_of_the_log(builder, make_request):
    body = "".join(f"float v{i} = out[{i} * threadIdx.x];" for i in range(96))
    body += "__syncthreads();" + "".join(f"out[{i} + threadIdx.x] = v{i} * v{(i * 7) % 96};" for i in range(96))
    needs = builder.build(make_request(SIGNATURE + f"{{ {body} }}", TWO, options=("-maxrregcount=32",))).entries[
        "scale"
    ]
    assert needs.spill_store_bytes > 100
    assert needs.spill_load_bytes > 100
    assert needs.stack_bytes > 100


def test_build_of_several_entry_points_reports_each(builder, make_request):
    text = (
        SIGNATURE + BODY + '\nextern "C" __global__ void __launch_bounds__(64) other(double d, double* o) { *o = d; }'
    )
    request = make_request(text, TWO)
    request = replace(request, entries=(*request.entries, EntryPoint("other", ("f64", "ptr"))))
    entries = builder.build(request).entries
    assert [(name, needs.max_threads) for name, needs in entries.items()] == [("scale", None), ("other", 64)]


def test_build_with_a_compiled_in_cluster_reports_its_size(builder, make_request):
    text = SIGNATURE.replace("void", "void __cluster_dims__(4, 2, 1)") + BODY
    assert builder.build(make_request(text, TWO)).entries["scale"].cluster == (4, 2, 1)


def test_options_reach_the_compiler(builder, make_request):
    text = SIGNATURE + "{ out[threadIdx.x] = factor * TILE; }"
    four, eight = (builder.build(make_request(text, TWO, options=(f"-DTILE={n}",))).digest for n in (4, 8))
    assert four != eight


def test_log_of_a_build_is_the_same_each_time(builder, make_request):
    logs = {builder.build(make_request()).log for _ in range(5)}
    assert len(logs) == 1
    assert "Used " in logs.pop()


def test_macro_that_breaks_the_checks_themselves_is_shown_as_a_compile_error(builder, make_request):
    with pytest.raises(BuildFailure, match=r"COMPILE_FAILED: .*declared parameters"):
        builder.build(make_request(SIGNATURE + BODY + "\n#define template broken", TWO))


def test_macros_of_the_source_do_not_disturb_the_declaration_checks(builder, make_request):
    text = "#define T 1\n#define A 2\n#define F 3\n#define I 4\n#define value 5\n#define kind 6\n#define count 7\n"
    assert builder.build(make_request(text + SIGNATURE + BODY, TWO)).entries


def test_source_that_does_not_compile_is_compile_failed_with_file_line_and_log(builder, make_request):
    request = make_request(SIGNATURE + "{\n  out[0] = nothing;\n}", TWO)
    failure = _failure(builder, request)
    assert failure.code == "COMPILE_FAILED"
    assert f"{request.source}(2): error:" in failure.why
    assert 'identifier "nothing" is undefined' in failure.log
    assert failure.finding("m::scale").log == failure.log


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("int f() { return 1;", r'scale\.cu\(2\): error: expected a "}" before the end of the source'),
        ("namespace open {", r'scale\.cu\(2\): error: expected a "}" before the end of the source'),
        ("struct Open {}", r'scale\.cu: error: expected a ";" before the end of the source'),
        ("template <class T>", r"scale\.cu: error: expected a declaration before the end of the source"),
        ("/* open", r"scale\.cu\(2\): error: comment unclosed at end of file"),
        ("int open(", r"scale\.cu: error: expected an expression before the end of the source"),
    ],
)
def test_source_that_does_not_end_is_named_and_not_what_stands_behind_it(builder, make_request, last, said):
    failure = _failure(builder, make_request(f"{SIGNATURE}{BODY}\n{last}\n", TWO))
    assert re.fullmatch(rf"for sm_90a: /[^<>]*{said}", failure.why), failure.why


def test_error_in_an_own_header_is_reported_with_the_path_of_the_header(builder, make_request, tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "part.cuh").write_text("\n#error broken on purpose\n")
    failure = _failure(builder, make_request('#include "parts/part.cuh"\n' + SIGNATURE + BODY, TWO))
    assert f"{tmp_path}/parts/part.cuh(2)" in failure.why


def test_bad_ptx_is_compile_failed(builder, make_request):
    failure = _failure(builder, make_request(SIGNATURE + '{ asm volatile("no.such;"); out[0] = factor; }', TWO))
    assert failure.code == "COMPILE_FAILED"
    assert "no.such" in failure.log or "'no'" in failure.log


@pytest.mark.parametrize(
    ("text", "parameters", "expected"),
    [
        ("", TWO, "scale: no kernel of this name is compiled for sm_90a"),
        (f"#if __CUDA_ARCH__ >= 1000\n{SIGNATURE}{BODY}\n#endif", TWO, "scale: no kernel of this name is compiled"),
        (f"namespace mine {{ {SIGNATURE[11:]}{BODY} }}", TWO, "scale: no kernel of this name"),
        (f"{SIGNATURE[11:]}{BODY}", TWO, "scale is not in the cubin for sm_90a; entry points: _Z5scalefPf"),
        (SIGNATURE + BODY, ("i32", "ptr"), "scale: parameter 0 is declared as i32, the kernel takes f32"),
        (SIGNATURE + BODY, ("ptr", "f32"), "scale: parameter 0 is declared as ptr, the kernel takes f32"),
        (SIGNATURE + BODY, ("f32",), "scale: 1 parameters are declared, the kernel takes 2"),
        (SIGNATURE + BODY, ("f32", "ptr", "i32"), "scale: 3 parameters are declared, the kernel takes 2"),
        (f"{SIGNATURE}{{\n#if __CUDA_ARCH__ >= 1000\n{BODY}\n#endif\n}}", TWO, "scale has an empty body for sm_90a"),
        (SIGNATURE + '{ asm volatile("trap;"); }', TWO, "scale has an empty body for sm_90a"),
        ("struct P { float a, b, c; };\n" + SIGNATURE.replace("float f", "P f") + "{ *out = factor.b; }", TWO,
         "scale: parameter 0 is declared as f32, the kernel takes a class of 12 bytes"),
        ('extern "C" __device__ void scale(float f, float* o) { *o = f; }', TWO, "entry points: none"),
    ],
)  # fmt: skip
def test_code_that_is_not_as_declared_is_no_device_code(builder, make_request, text, parameters, expected):
    failure = _failure(builder, make_request(text, parameters))
    assert failure.code == "NO_DEVICE_CODE"
    assert expected in failure.why
    assert failure.remedies


def test_kernel_that_is_not_extern_c_is_told_to_be(builder, make_request):
    assert _failure(builder, make_request(f"{SIGNATURE[11:]}{BODY}", TWO)).remedies == ('declare scale extern "C"',)


@pytest.mark.parametrize("arch", ARCHS)
def test_empty_body_is_seen_on_every_architecture(builder, make_request, arch):
    assert "has an empty body" in _failure(builder, make_request(SIGNATURE + "{}", TWO, arch)).why


def test_kernel_without_parameters_may_be_empty(builder, make_request):
    assert builder.build(make_request('extern "C" __global__ void scale() {}', ())).entries["scale"].instructions == 2


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ('"not_there.cuh"', "not_there.cuh was not found: it is in none of the kernel's own folders"),
        ("<stdint.h>", "stdint.h was not found: NVRTC has no host headers"),
        ("<vector>", "vector was not found: NVRTC has no host headers"),
    ],
)
def test_header_that_is_nowhere_is_headers_missing(builder, make_request, include, expected):
    failure = _failure(builder, make_request(f"#include {include}\n{SIGNATURE}{BODY}", TWO))
    assert failure.code == "HEADERS_MISSING"
    assert expected in failure.why
    assert "scale.cu(1)" in failure.why
    assert failure.remedies


def test_header_in_the_current_folder_is_not_found_by_accident(builder, make_request, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lucky.cuh").write_text("")
    monkeypatch.chdir(elsewhere)
    assert _failure(builder, make_request('#include "lucky.cuh"\n' + SIGNATURE + BODY, TWO)).code == "HEADERS_MISSING"


def test_header_named_by_a_macro_is_refused_even_if_it_is_there(builder, make_request, tmp_path):
    (tmp_path / "own.cuh").write_text("")
    text = '#define OWN "own.cuh"\n#include OWN\n' + SIGNATURE + BODY
    failure = _failure(builder, make_request(text, TWO))
    assert failure.code == "COMPILE_FAILED"
    assert "an include must name a file" in failure.why


@pytest.mark.parametrize(
    ("arch", "kwargs", "expected"),
    [
        ("sm_121a", {"dynamic_shared_bytes": 200_000}, "200000 bytes of shared memory a block (0 static, 200000"),
        ("sm_90a", {"dynamic_shared_bytes": 227 * 1024 + 1}, "at most 232448"),
        ("sm_90a", {"threads": 1025}, "1025 threads a block, at most 1024"),
    ],
)
def test_kernel_that_no_block_can_run_is_over_limit(builder, make_request, arch, kwargs, expected):
    failure = _failure(builder, make_request(SIGNATURE + BODY, TWO, arch, **kwargs))
    assert failure.code == "OVER_LIMIT"
    assert expected in failure.why


def test_dynamic_shared_memory_at_the_limit_passes(builder, make_request):
    assert builder.build(make_request(SIGNATURE + BODY, TWO, dynamic_shared_bytes=227 * 1024)).entries


def test_launch_wider_than_the_launch_bounds_is_over_limit(builder, make_request):
    failure = _failure(builder, make_request(threads=256))
    assert (failure.code, "__launch_bounds__ allow 128" in failure.why) == ("OVER_LIMIT", True)


@pytest.mark.parametrize("arch", ARCHS)
def test_static_array_beyond_every_block_is_over_limit(builder, make_request, arch):
    text = SIGNATURE + "{ __shared__ float s[60000]; s[threadIdx.x] = factor; __syncthreads(); *out = s[*(int*)out]; }"
    assert _failure(builder, make_request(text, TWO, arch)).code == "OVER_LIMIT"


def test_cluster_of_sixteen_blocks_is_over_limit(builder, make_request):
    text = SIGNATURE.replace("void", "void __cluster_dims__(16, 1, 1)") + BODY
    failure = _failure(builder, make_request(text, TWO))
    assert (failure.code, "a cluster of 16 blocks, at most 8" in failure.why) == ("OVER_LIMIT", True)


def test_architecture_that_the_compiler_does_not_know_is_toolchain_too_old(builder, make_request):
    failure = _failure(builder, replace(make_request(), arch=Arch((13, 0), "a")))
    assert failure.code == "TOOLCHAIN_TOO_OLD"
    assert re.search(r"NVRTC \S+ does not compile for sm_130a; it knows .*sm_90", failure.why)


def test_option_that_is_not_allowed_is_compile_failed(builder, make_request):
    failure = _failure(builder, make_request(options=("-arch=sm_80",)))
    assert (failure.code, "'-arch=sm_80' is not allowed" in failure.why) == ("COMPILE_FAILED", True)


@pytest.mark.parametrize("text", [None, "float x;\0float y;"])
def test_source_that_cannot_be_read_is_compile_failed(builder, make_request, tmp_path, text):
    request = make_request("")
    request.source.unlink() if text is None else request.source.write_text(text)
    failure = _failure(builder, request)
    assert failure.code == "COMPILE_FAILED"
    assert str(request.source) in failure.why


def test_cached_build_equals_the_fresh_one_and_is_checked_again(make_request, tmp_path):
    builder = Builder(BuildCache(tmp_path / "cache"))
    request = make_request()
    fresh, cached = builder.build(request), builder.build(request)
    assert (fresh.from_cache, cached.from_cache) == (False, True)
    assert fresh == cached
    assert fresh.digest == cached.digest
    too_big = replace(request, entries=(replace(request.entries[0], dynamic_shared_bytes=1 << 20),))
    assert builder.key(too_big) == builder.key(request)
    assert _failure(builder, too_big).code == "OVER_LIMIT"


def test_cached_log_names_the_files_of_the_one_who_asks(make_request, tmp_path):
    builder = Builder(BuildCache(tmp_path / "cache"))
    text = SIGNATURE + "{ int unused_here; out[0] = factor; }"
    for folder in ("a", "b"):
        built = builder.build(make_request(text, TWO, source=tmp_path / folder / "scale.cu"))
        assert f"{tmp_path}/{folder}/scale.cu(1): warning" in built.log
    assert built.from_cache


def test_failed_build_leaves_nothing_in_the_cache(make_request, tmp_path):
    builder = Builder(BuildCache(tmp_path / "cache"))
    _failure(builder, make_request("no source"))
    assert not list((tmp_path / "cache").glob("*.*"))


def test_key_depends_on_everything_that_determines_the_code(make_request, tmp_path, builder):
    (tmp_path / "own.cuh").write_text("#define TILE 4\n")
    request = make_request('#include "own.cuh"\n' + SIGNATURE + "{ out[TILE] = factor; }", TWO)
    keys = [builder.key(request), builder.key(replace(request, options=("-lineinfo",)))]
    keys += [builder.key(replace(request, arch=parse_arch(arch))) for arch in ("sm_90", "sm_100a")]
    keys.append(Builder(toolkit=replace(builder.toolkit, nvrtc="13.9.99")).key(request))
    (tmp_path / "own.cuh").write_text("#define TILE 5\n")
    keys.append(builder.key(request))
    assert len(set(keys)) == len(keys)
    assert builder.key(replace(request, name="renamed")) == keys[-1]


def _python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env={"PATH": "", **environment}, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_backends_imports_no_cuda_package():
    code = "import sys, kernel_muster.registry.backends.pool\nprint([m for m in sys.modules if m.startswith('cuda.')])"
    assert _python(code).strip() == "[]"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("raise ImportError('libnvrtc.so.13: cannot open shared object file')", "ImportError: libnvrtc.so.13"),
        ("raise SystemError('initialisation failed')", "SystemError: initialisation failed"),
        (
            "class nvrtcResult: NVRTC_SUCCESS = 0\ndef nvrtcVersion(): return 0, 11, 8",
            "loaded NVRTC 11.8, expected",
        ),
    ],
)
def test_bindings_that_do_not_work_are_toolchain_missing(make_request, tmp_path, module, expected):
    package = tmp_path / "site" / "cuda" / "bindings"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    (package / "nvrtc.py").write_text(module)
    request = make_request()
    code = f"""
from pathlib import Path
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.backends import BuildFailure, BuildRequest, EntryPoint
from kernel_muster.registry.backends.builder import Builder
try:
    Builder().build(BuildRequest("scale", Path({str(request.source)!r}), parse_arch("sm_90a"), {request.entries!r}))
except BuildFailure as failure:
    print(failure, failure.remedies)
"""
    output = _python(code, PYTHONPATH=str(tmp_path / "site"))
    assert "TOOLCHAIN_MISSING" in output
    assert expected in output
    assert "install kernel-muster[nvrtc1" in output


@pytest.mark.parametrize(
    "make",
    [
        lambda: EntryPoint("not a name", ()),
        lambda: EntryPoint("k", ("float",)),
        lambda: EntryPoint("k", "ptr"),
        lambda: EntryPoint("k", (), threads=-1),
        lambda: BuildRequest("k", Path("k.cu"), parse_arch("sm_80"), ()),
        lambda: BuildRequest("k", Path("k.cu"), parse_arch("sm_80"), (EntryPoint("k", ()), EntryPoint("k", ()))),
    ],
)
def test_malformed_request_is_refused_when_it_is_made(make):
    with pytest.raises(ValueError, match=r"k|not a name"):
        make()


def test_build_failure_with_a_code_of_another_group_is_a_mistake():
    with pytest.raises(ValueError, match="MISSING"):
        BuildFailure("MISSING", "no")
