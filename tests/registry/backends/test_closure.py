import os
import sys
from pathlib import Path

import pytest
from kernel_muster.registry.backends.nvrtc.closure import MOST_BYTES, read_closure
from kernel_muster.registry.backends.request import BuildFailure


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_closure_holds_nested_headers_once_under_one_name(tmp_path):
    _write(
        tmp_path,
        {
            "k/k.cu": '#include "../a.cuh"\n  #  include "sub/b.cuh"\n#include <cuda_bf16.h>\n',
            "k/sub/b.cuh": '#pragma once\n#include "../../a.cuh"\n#include "c.cuh"\n',
            "k/sub/c.cuh": "",
            "a.cuh": "",
        },
    )
    closure = read_closure(tmp_path / "k/k.cu")
    assert [header.name for header in closure.headers] == ["<0>/../a.cuh", "<0>/sub/b.cuh", "<0>/sub/c.cuh"]
    assert closure.source.text.decode().splitlines() == [
        '#include "<0>/../a.cuh"',
        '  #  include "<0>/sub/b.cuh"',
        "#include <cuda_bf16.h>",
    ]
    assert closure.headers[1].text == b'#pragma once\n#include "<0>/../a.cuh"\n#include "<0>/sub/c.cuh"\n'


def test_closure_searches_the_includer_first_then_the_folders_in_order(tmp_path):
    _write(tmp_path, {"k.cu": '#include "x.h"\n#include "y.h"\n#include <z.h>\n', "x.h": "own", "z.h": "own"})
    _write(tmp_path / "one", {"x.h": "one", "y.h": "one"})
    _write(tmp_path / "two", {"y.h": "two", "z.h": "two"})
    closure = read_closure(tmp_path / "k.cu", (tmp_path / "one", tmp_path / "two"))
    assert [header.text for header in closure.headers] == [b"one", b"two", b"own"]


def test_closure_with_a_cycle_ends(tmp_path):
    _write(tmp_path, {"k.cu": '#include "a.h"\n', "a.h": '#include "b.h"\n', "b.h": '#include "a.h"\n'})
    assert [header.name for header in read_closure(tmp_path / "k.cu").headers] == ["<0>/a.h", "<0>/b.h"]


def test_headers_nested_deeper_than_python_calls_are_read_and_compile(builder, make_request, tmp_path):
    depth = 2 * sys.getrecursionlimit()
    _write(tmp_path, {f"h{number}.cuh": f'#include "h{number + 1}.cuh"\n' for number in range(depth)})
    _write(tmp_path, {f"h{depth}.cuh": 'extern "C" __global__ void scale(float f, float* o) { *o = f; }\n'})
    request = make_request('#include "h0.cuh"\n', ("f32", "ptr"))
    assert len(read_closure(request.source).headers) == depth + 1
    assert builder.build(request).entries


def test_readable_log_has_paths_for_names(tmp_path):
    _write(tmp_path, {"k.cu": '#include "sub/k.cu"\n', "sub/k.cu": ""})
    log = read_closure(tmp_path / "k.cu").readable('<0>/k.cu(3): error\n<0>/sub/k.cu(4): error in "<0>/k.cu".\n')
    assert log == f'{tmp_path}/k.cu(3): error\n{tmp_path}/sub/k.cu(4): error in "{tmp_path}/k.cu".\n'


def test_header_with_a_nul_byte_is_refused_by_name(tmp_path):
    _write(tmp_path, {"k.cu": '#include "a.h"\n', "a.h": "int x;\0#error"})
    with pytest.raises(BuildFailure, match=r"a\.h: holds a NUL byte at offset 6"):
        read_closure(tmp_path / "k.cu")


def test_nested_and_shared_headers_compile_under_their_names(builder, make_request, tmp_path):
    _write(
        tmp_path,
        {
            "sub/b.cuh": '#pragma once\n#include "../a.cuh"\n__device__ inline float b(float x) { return a(x); }\n',
            "a.cuh": "#pragma once\n__device__ inline float a(float x) { return 2 * x; }\n",
        },
    )
    text = '#include "a.cuh"\n#include "sub/b.cuh"\nextern "C" __global__ void scale(float f, float* o) { *o = b(f); }'
    assert builder.build(make_request(text, ("f32", "ptr"))).entries


NO_SOURCES = {
    "pipe": (os.mkfifo, "it is no regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
    "folder": (os.mkdir, "it is no regular file"),
    "link to itself": (lambda path: path.symlink_to(path), "its links lead nowhere"),
    "too large": (lambda path: path.touch() or os.truncate(path, MOST_BYTES + 1), "it is larger than 16777216 bytes"),
}


@pytest.mark.parametrize(("make", "why"), NO_SOURCES.values(), ids=NO_SOURCES)
def test_source_that_is_no_regular_file_of_a_sources_size_is_refused_at_once(make, why, tmp_path):
    source = tmp_path / "k.cu"
    make(source)
    with pytest.raises(BuildFailure) as caught:
        read_closure(source)
    assert (caught.value.code, caught.value.why) == ("COMPILE_FAILED", f"{source}: cannot be read: {why}")


def test_source_behind_a_link_is_read(tmp_path):
    _write(tmp_path, {"real.cu": "int x;\n"})
    (tmp_path / "k.cu").symlink_to(tmp_path / "real.cu")
    assert read_closure(tmp_path / "k.cu").source.text == b"int x;\n"


@pytest.mark.parametrize("header", ["pipe.h", "n" * 300])
def test_header_that_is_no_file_is_left_to_the_compiler(header, tmp_path):
    os.mkfifo(tmp_path / "pipe.h")
    _write(tmp_path, {"k.cu": f'#include "{header}"\n'})
    assert read_closure(tmp_path / "k.cu").headers == ()
