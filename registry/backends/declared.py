"""Are the parameters of an entry point what the plugin declares? The compiler itself is asked.

The cubin knows sizes only, so that a float passed as int would go through. A few lines behind the source compare the
real C++ types with the declared ones; they add no code, the machine code is the same with and without them.
"""

import re
from collections.abc import Iterable

from kernel_muster.registry.arch import Arch
from kernel_muster.registry.backends.request import PARAMETER_TYPES, BuildFailure, EntryPoint

# The numbers are those of PARAMETER_TYPES, the types all that have one of them.
_NUMBERS = {
    "bool": 41, "char": 11, "signed char": 11, "short": 12, "int": 14, "long": 18, "long long": 18,
    "unsigned char": 21, "unsigned short": 22, "unsigned int": 24, "unsigned long": 28, "unsigned long long": 28,
    "float": 34, "double": 38,
}  # fmt: skip
# Macros of the source reach these lines too, hence the prefix on every name.
_TEMPLATES = """
#line 1 "<declared parameters>"
namespace kernel_muster_declared {
template <class km_T> struct km_kind { enum { km_value = 1000 + sizeof(km_T) }; };
template <class km_T> struct km_kind<km_T*> { enum { km_value = 1 }; };
template <class km_F> struct km_count { enum { km_value = -1 }; };
template <class... km_A> struct km_count<void (*)(km_A...)> { enum { km_value = sizeof...(km_A) }; };
template <int km_I, class km_F> struct km_at { enum { km_value = 0 }; };
template <int km_I, class km_T, class... km_A> struct km_at<km_I, void (*)(km_T, km_A...)> {
  enum { km_value = km_at<km_I - 1, void (*)(km_A...)>::km_value };
};
"""
# After the specialisations of km_kind: this one uses them.
_FIRST = """
template <class km_T, class... km_A> struct km_at<0, void (*)(km_T, km_A...)> {
  enum { km_value = km_kind<km_T>::km_value };
};
"""
_KINDS = "\n".join(
    f"template <> struct km_kind<{name}> {{ enum {{ km_value = {number} }}; }};" for name, number in _NUMBERS.items()
)
_PRELUDE = _TEMPLATES + _KINDS + _FIRST
_CHECK_FILES = "<entry point "
_ERROR = re.compile(r"^(?P<file>[^\n]+?)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<text>.*)$", re.MULTILINE)
_FOUND = re.compile(r"km_found=\(?(?:int\))?(-?\d+)\]")
_NAMES = {kind.number: name for name, kind in reversed(PARAMETER_TYPES.items())}


def declaration_checks(entries: Iterable[EntryPoint]) -> bytes:
    """Return the C++ text that compiles only if every entry point is there with its declared parameters."""
    lines = [_PRELUDE]
    for entry in entries:
        kernel, total = f"decltype(&::{entry.name})", len(entry.parameters)
        lines.append(f'#line 1 "<entry point {entry.name}>"')
        lines.append(_claim(f"{total} parameters are declared", entry, "all", total, f"km_count<{kernel}>"))
        for i, name in enumerate(entry.parameters):
            claim = f"parameter {i} is declared as {name}"
            lines.append(_claim(claim, entry, str(i), PARAMETER_TYPES[name].number, f"km_at<{i}, {kernel}>"))
    return "\n".join([*lines, "}", ""]).encode()


def _claim(text: str, entry: EntryPoint, suffix: str, declared: int, found: str) -> str:
    """Return a template of its own for one claim: every NVRTC prints the arguments that it failed with."""
    name = f"km_claim_{entry.name}_{suffix}"
    return (
        f"template <int km_declared, int km_found> struct {name} "
        f'{{ static_assert(km_declared == km_found, "{text}"); }}; '
        f"template struct {name}<{declared}, int({found}::km_value)>;"
    )


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
    claim = text.partition('"')[2].rstrip('"')
    found = _FOUND.search(notes)
    if found is None:
        return claim
    number = int(found[1])
    if claim.endswith("parameters are declared"):
        return f"{claim}, the kernel takes {number}" if number >= 0 else "it is no __global__ function returning void"
    return f"{claim}, the kernel takes {_kind(number)}"


def _kind(number: int) -> str:
    return _NAMES.get(number) or (f"a class of {number - 1000} bytes" if number > 1000 else "another type")
