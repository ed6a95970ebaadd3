from pathlib import Path

import pytest
from kernel_muster.registry.backends.nvrtc.options import ALLOWED, normalise_options

EXAMPLES = {"c++NN": "c++20", "true|false": "false", "MODE": "ca", "-O0..3": "-O3", "=N": "=64"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ("-std=c++17",)),
        (("-DA=1",), ("-std=c++17", "-DA=1")),
        (("-D", "A=1"), ("-std=c++17", "-DA=1")),
        (("--define-macro=A=1",), ("-std=c++17", "-DA=1")),
        (("--define-macro", "A"), ("-std=c++17", "-DA")),
        (("-std", "c++20"), ("-std=c++20",)),
        (("--std=c++20", "-lineinfo"), ("-std=c++20", "-lineinfo")),
        (("-Xptxas", "-O2"), ("-std=c++17", "-Xptxas=-O2")),
        (("--ptxas-options=-dlcm=ca",), ("-std=c++17", "-Xptxas=-dlcm=ca")),
        ((" --use_fast_math ",), ("-std=c++17", "-use_fast_math")),
        (("-DA=1", "-DB", "-DA=1"), ("-std=c++17", "-DB", "-DA=1")),
        (("-DA=1", "-UA", "-DA=2"), ("-std=c++17", "-DA=1", "-UA", "-DA=2")),
        (("-maxrregcount=64", "-fmad=false"), ("-std=c++17", "-maxrregcount=64", "-fmad=false")),
    ],
)
def test_options_have_one_spelling(options, expected):
    assert normalise_options(options) == ("-default-device", *expected)


def test_option_for_device_functions_given_by_the_kernel_is_not_doubled():
    assert normalise_options(("--device-as-default-execution-space",)) == ("-std=c++17", "-default-device")


@pytest.mark.parametrize(
    "options",
    [
        ("-arch=sm_80",),
        ("--gpu-architecture=compute_90",),
        ("-I/usr/include",),
        ("--pre-include=x.h",),
        ("-dlto",),
        ("-rdc=true",),
        ("@options.txt",),
        ("-D",),
        ("-D1",),
        ("-DA=1\n-I/etc",),
        ("-DA=\0",),
        ("-Xptxas=-o /tmp/x",),
        ("-Xptxas", "--output-file=x"),
        ("-fmad=maybe",),
        ("",),
        (1,),
        "-DA",
    ],
)
def test_option_that_is_not_allowed_is_named(options):
    with pytest.raises(ValueError, match="option"):
        normalise_options(options)


@pytest.mark.parametrize(
    "option",
    ["-lineinfo", "-use_fast_math", "-maxrregcount=64", "-ftz=true", "-prec-sqrt=false", "-prec-div=true",
     "-fmad=false", "-extra-device-vectorization", "-default-device", "-restrict", "-w", "-diag-suppress=177",
     "-diag-error=177", "-Xptxas=-O1", "-Xptxas=-dlcm=ca", "-Xptxas=--warn-on-spills",
     "-Xptxas=--allow-expensive-optimizations=true",
     "-Xptxas=--warn-on-local-memory-usage", "-DA=1", "-UA"],
)  # fmt: skip
def test_allowed_option_is_one_that_the_compiler_takes(builder, make_request, option):
    assert builder.build(make_request(options=(option,))).cubin


@pytest.mark.parametrize("shown", ALLOWED)
def test_option_that_messages_and_manual_list_is_allowed(shown):
    option = shown
    for word, example in EXAMPLES.items():
        option = option.replace(word, example)
    assert option in normalise_options((option,))
    assert f"`{shown}`" in (Path(__file__).parents[3] / "docs" / "write-a-plugin.md").read_text(encoding="utf-8")


def test_refused_option_is_told_what_is_allowed():
    with pytest.raises(ValueError, match=r"option '--foo' is not allowed; what is: -DNAME=VALUE, .*, -Xptxas=-v$"):
        normalise_options(("--foo",))
