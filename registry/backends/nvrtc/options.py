"""Compiler options: which a kernel may give, in one spelling each.

The list says what is allowed, not what is forbidden: an option that reads a file, changes the architecture or makes
something other than a cubin would break the cache or the checks, and new versions bring new ones.
Source: NVRTC documentation, "Supported Compile Options".
"""

import re
from collections.abc import Sequence

_LONG = {
    "--define-macro": "-D",
    "--undefine-macro": "-U",
    "--std": "-std",
    "--generate-line-info": "-lineinfo",
    "--use_fast_math": "-use_fast_math",
    "--ptxas-options": "-Xptxas",
    "--maxrregcount": "-maxrregcount",
    "--ftz": "-ftz",
    "--prec-sqrt": "-prec-sqrt",
    "--prec-div": "-prec-div",
    "--fmad": "-fmad",
    "--extra-device-vectorization": "-extra-device-vectorization",
    "--device-as-default-execution-space": "-default-device",
    "--restrict": "-restrict",
    "--diag-suppress": "-diag-suppress",
    "--diag-error": "-diag-error",
    "--disable-warnings": "-w",
}
_TAKES_WORD = ("-D", "-U", "-std", "-Xptxas", "-maxrregcount", "-diag-suppress", "-diag-error")
_BOOLEAN = "(=(true|false))"
_ALLOWED = re.compile(
    r"-D[A-Za-z_]\w*(\([^)]*\))?(=.*)?|-U[A-Za-z_]\w*|-std=c\+\+\d\d|-lineinfo|-use_fast_math|-maxrregcount=\d{1,3}"
    rf"|-(ftz|prec-sqrt|prec-div|fmad){_BOOLEAN}|-extra-device-vectorization|-default-device|-restrict|-w"
    r"|-diag-(suppress|error)=[\w,-]+"
    r"|-Xptxas=(-O[0-3]|-dlcm=\w+|-dscm=\w+|--allow-expensive-optimizations=(true|false)"
    r"|--warn-on-spills|--warn-on-local-memory-usage|-w|-v)"
)
#: The same in words, for messages and the manual.
ALLOWED = (
    "-DNAME=VALUE", "-UNAME", "-std=c++NN", "-lineinfo", "-use_fast_math", "-maxrregcount=N", "-ftz=true|false",
    "-prec-sqrt=true|false", "-prec-div=true|false", "-fmad=true|false", "-extra-device-vectorization",
    "-default-device", "-restrict", "-w", "-diag-suppress=N", "-diag-error=N", "-Xptxas=-O0..3", "-Xptxas=-dlcm=MODE",
    "-Xptxas=-dscm=MODE", "-Xptxas=--allow-expensive-optimizations=true|false", "-Xptxas=--warn-on-spills",
    "-Xptxas=--warn-on-local-memory-usage", "-Xptxas=-w", "-Xptxas=-v",
)  # fmt: skip
DEFAULT_STANDARD = "-std=c++17"
# There is no host here. Without it NVRTC 13.0 takes generic lambdas for host functions and refuses them; 13.5 does not.
ON_DEVICE = "-default-device"


def normalise_options(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options in one spelling each, without repetitions, in their order; ValueError names one not allowed.

    ``-D NAME``, ``-DNAME`` and ``--define-macro=NAME`` become ``-DNAME``. C++17 unless a standard is given; functions
    without a mark are device functions.
    """
    if isinstance(options, str):
        raise ValueError(f"options are {options!r}, expected a tuple of them")
    words: list[str] = []
    rest = list(options)
    while rest:
        option = rest.pop(0)
        if not isinstance(option, str):
            raise ValueError(f"option {option!r} is not text")
        option = _short(option.strip())
        if option in _TAKES_WORD:
            if not rest:
                raise ValueError(f"option {option} lacks its value")
            option = _joined(option, str(rest.pop(0)).strip())
        if not _ALLOWED.fullmatch(option) or not option.isprintable():
            raise ValueError(f"option {option!r} is not allowed; what is: {', '.join(ALLOWED)}")
        words.append(option)
    if not any(word.startswith("-std=") for word in words):
        words.insert(0, DEFAULT_STANDARD)
    if ON_DEVICE not in words:
        words.insert(0, ON_DEVICE)
    # A repetition decides by its last place, as it does for the compiler.
    last = {word: position for position, word in enumerate(words)}
    return tuple(word for position, word in enumerate(words) if last[word] == position)


def _short(option: str) -> str:
    name, equals, value = option.partition("=")
    short = _LONG.get(name, name)
    return _joined(short, value) if equals and short in ("-D", "-U") else short + equals + value


def _joined(option: str, value: str) -> str:
    return option + value if option in ("-D", "-U") else f"{option}={value}"
