"""Are the parameters of an entry point what the plugin declares? The compiler itself is asked.

The cubin knows sizes only, so that a float passed as int would go through. A few lines behind the source compare the
real C++ types with the declared ones; they add no code, the machine code is the same with and without them.
"""

import re
from collections.abc import Iterable

from kernel_muster.registry.backends.request import PARAMETER_TYPES, BuildFailure, EntryPoint
from kernel_muster.registry.hardware.arch import Arch

# The numbers are those of PARAMETER_TYPES, the types all that have one of them.
_NUMBERS = {
    "bool": 41, "char": 11, "signed char": 11, "short": 12, "int": 14, "long": 18, "long long": 18,
    "unsigned char": 21, "unsigned short": 22, "unsigned int": 24, "unsigned long": 28, "unsigned long long": 28,
    "float": 34, "double": 38,
}  # fmt: skip
# Macros of the source reach these lines too, hence the prefix on every name. One claim for each entry point, as one
# for each parameter took a tenth of what the front end takes.
_TEMPLATES = """
#line 1 "<declared parameters>"
namespace kernel_muster_declared {
template <int... km_N> struct km_list {};
template <class km_T> struct km_kind { enum { km_value = 1000 + sizeof(km_T) }; };
template <class km_T> struct km_kind<km_T*> { enum { km_value = 1 }; };
template <class km_A, class km_B> struct km_same { enum { km_value = 0 }; };
template <class km_A> struct km_same<km_A, km_A> { enum { km_value = 1 }; };
template <class km_F> struct km_kinds { typedef void km_type; };
"""
# After the specialisations of km_kind: this one uses them.
_KINDS_OF = """
template <class... km_A> struct km_kinds<void (*)(km_A...)> {
  typedef km_list<int(km_kind<km_A>::km_value)...> km_type;
};
"""
_KINDS = "\n".join(
    f"template <> struct km_kind<{name}> {{ enum {{ km_value = {number} }}; }};" for name, number in _NUMBERS.items()
)
_PRELUDE = _TEMPLATES + _KINDS + _KINDS_OF
_CHECK_FILES = "<entry point "
_CLAIM = "the declared parameters are "
_ERROR = re.compile(r"^(?P<file>[^\n]+?)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<text>.*)$", re.MULTILINE)
_FOUND = re.compile(r"km_found=(?:kernel_muster_declared::)?(?:km_list<([^>]*)>|void)")
_NUMBER = re.compile(r"(?:\(int\))?(-?\d+)")
_NAMES = {kind.number: name for name, kind in reversed(PARAMETER_TYPES.items())}


def declaration_checks(entries: Iterable[EntryPoint]) -> bytes:
    """Return the C++ text that compiles only if every entry point is there with its declared parameters."""
    lines = [_PRELUDE]
    for entry in entries:
        # A template of its own: every NVRTC prints the arguments that it failed with.
        name, numbers = f"km_claim_{entry.name}", _numbers(entry.parameters)
        lines.append(f'#line 1 "<entry point {entry.name}>"')
        lines.append(
            f"template <class km_declared, class km_found> struct {name} "
            f'{{ static_assert(km_same<km_declared, km_found>::km_value, "{_CLAIM}{", ".join(entry.parameters)}"); }}; '
            f"template struct {name}<km_list<{', '.join(map(str, numbers))}>, "
            f"km_kinds<decltype(&::{entry.name})>::km_type>;"
        )
    return "\n".join([*lines, "}", ""]).encode()


def _numbers(parameters: Iterable[str]) -> list[int]:
    return [PARAMETER_TYPES[name].number for name in parameters]


def undeclared(log: str, arch: Arch) -> BuildFailure | None:
    """Return the failure that a compiler's log means if nothing but the declarations is wrong; None otherwise."""
    errors = list(_ERROR.finditer(log))
    if not errors or not all(error["file"].startswith(_CHECK_FILES) for error in errors):
        return None
    problems: dict[str, str] = {}
    for position, error in enumerate(errors):
        entry = error["file"].removeprefix("<entry point ").removesuffix(">")
        end = errors[position + 1].start() if position + 1 < len(errors) else len(log)
        problems.setdefault(entry, _problem(error["text"], log[error.end() : end], arch))
    why = "; ".join(f"{entry}: {problem}" for entry, problem in problems.items())
    return BuildFailure(
        "NO_DEVICE_CODE", why, log, ('compare the entry points declared in the spec with the extern "C" kernels',)
    )


def _problem(text: str, notes: str, arch: Arch) -> str:
    if "static assertion failed" not in text:
        return f"no kernel of this name is compiled for {arch} (is it behind an #if, or in a namespace?)"
    declared = [name for name in text.partition(_CLAIM)[2].rstrip('"').split(", ") if name]
    found = _FOUND.search(notes)
    if found is None:
        return f"its parameters are not the declared ({', '.join(declared)})"
    if found[1] is None:
        return f"{len(declared)} parameters are declared, it is no __global__ function returning void"
    kinds = [int(number) for number in _NUMBER.findall(found[1])]
    if len(kinds) != len(declared):
        return f"{len(declared)} parameters are declared, the kernel takes {len(kinds)}"
    pairs = enumerate(zip(declared, _numbers(declared), kinds, strict=True))
    i, name, kind = next((i, name, kind) for i, (name, number, kind) in pairs if number != kind)
    return f"parameter {i} is declared as {name}, the kernel takes {_kind(kind)}"


def _kind(number: int) -> str:
    return _NAMES.get(number) or (f"a class of {number - 1000} bytes" if number > 1000 else "another type")
