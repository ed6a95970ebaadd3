"""Every file that the compiler opens is in the closure: other forms of include are refused."""

import time
from contextlib import suppress

import pytest
from kernel_muster.registry.backends.nvrtc.closure import read_closure
from kernel_muster.registry.backends.nvrtc.includes import rename_includes
from kernel_muster.registry.backends.request import BuildFailure

KERNEL = 'extern "C" __global__ void scale(float f, float* o) { *o = f * FACTOR; }\n'
# FILE stands for a file outside all folders of the kernel, which NVRTC would open.
UNFOLLOWED = {
    "name in a macro": '#define H "FILE"\n#include H\n',
    "angled name in a macro": "#define H <FILE>\n#include H\n",
    "comment before the name": '#include /**/ "FILE"\n',
    "comment before the word": '#/* a\n comment */include "FILE"\n',
    "comment before the sign": '/* a comment */ #include "FILE"\n',
    "divided word": '#incl\\\nude "FILE"\n',
    "divided line": '#include \\\n"FILE"\n',
    "digraph": '%:include "FILE"\n',
    "trigraph": '??=include "FILE"\n',
    "vertical tab": '#\vinclude "FILE"\n',
    "next": '#include_next "FILE"\n',
    "import": '#import "FILE"\n',
    "embed": 'const unsigned char all[] = {\n#embed "FILE"\n};\n',
    "question": '#if __has_include("FILE")\n#define FACTOR 2.0f\n#endif\n',
    "question in a macro": '#define HAS(x) __has_include(x)\n#if HAS("FILE")\n#define FACTOR 2.0f\n#endif\n',
    "behind a name that looks like a comment": '#if 0\n#include <a/*b>\n#endif\n#include /**/ "FILE"\n',
    "behind a string that looks like a comment": 'const char* s = "/*";\n#include /**/ "FILE"\n',
    "behind a number with quotes": 'const int n = 1\'000; // \'"/*"\n#include /**/ "FILE"\n',
}


@pytest.fixture
def hidden(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "factor.cuh").write_text("#define FACTOR 2.0f\n")
    return folder / "factor.cuh"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    return folder / "k.cu"


@pytest.mark.parametrize("text", UNFOLLOWED.values(), ids=UNFOLLOWED)
def test_include_that_is_not_plain_is_refused_before_it_is_compiled(text, source, hidden):
    source.write_text(text.replace("FILE", str(hidden)) + KERNEL)
    with pytest.raises(BuildFailure, match="own folders or a CUDA header") as caught:
        read_closure(source)
    assert caught.value.code == "COMPILE_FAILED"
    assert str(source) in caught.value.why
    assert '#include "file.cuh"' in caught.value.remedies[0]


@pytest.mark.parametrize("name", ['"FILE"', "<FILE>"])
def test_file_with_an_absolute_name_is_hashed(name, source, hidden):
    source.write_text(f"#include {name}\n{KERNEL}".replace("FILE", str(hidden)))
    before = read_closure(source)
    assert [header.text for header in before.headers] == [b"#define FACTOR 2.0f\n"]
    hidden.write_text("#define FACTOR 3.0f\n")
    assert read_closure(source).sha256(()) != before.sha256(())


@pytest.mark.parametrize("name", ["<../../elsewhere/factor.cuh>", '"/nowhere/factor.cuh"', '"../nowhere/factor.cuh"'])
def test_name_that_leads_out_of_all_folders_is_not_left_to_the_compiler(name, source, hidden):
    source.write_text(f"#include {name}\n{KERNEL}")
    with pytest.raises(BuildFailure, match="own folders or a CUDA header"):
        read_closure(source)


FOLLOWED = {
    "line comment": '// #include H, to include or import more\n#include "own.cuh"\n',
    "block comment": '/* usage:\n#include H\n*/\n#include "own.cuh"\n',
    "raw string": 'const char* s = R"x(\n#include H\n)x";\n#include "own.cuh"\n',
    "question for a CUDA header": '#if __has_include(<cuda_bf16.h>)\n#include "own.cuh"\n#endif\n',
    "question whether there are questions": '#ifdef __has_include\n#include "own.cuh"\n#endif\n',
    "apostrophe in a comment": '// don\'t\n#include "own.cuh"\n',
    "macro over several lines": '#define TWO(x) \\\n  ((x) * 2)\n#include "own.cuh"\n',
}


@pytest.mark.parametrize("text", FOLLOWED.values(), ids=FOLLOWED)
def test_source_without_hidden_includes_is_read(text, source):
    source.write_text(text)
    (source.parent / "own.cuh").write_text("")
    assert [header.name for header in read_closure(source).headers] == ["<0>/own.cuh"]


LONG = (
    b"/*", b"*/", b"/**/", b"*/ /* */", b'R"x(', b"1'", b'"\\', b"#include<", b'#include"', b"\\ ", b"\n# ",
    b"__has_include(", b"'",
)  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=repr)
def test_time_is_linear_in_the_size_of_the_source(text):
    """200,000 bytes take below 1 s; one quadratic pattern took minutes."""
    start = time.process_time()
    with suppress(BuildFailure):
        rename_includes("k.cu", text * (200_000 // len(text)) + b"\n#import", lambda name, is_quoted: None)
    assert time.process_time() - start < 5
