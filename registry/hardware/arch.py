"""Architectures of devices and of code, and which code runs where.

Rules: CUDA C++ Programming Guide, "Compute Capabilities" and "Feature set compiler targets". Capabilities compare as
tuples of integers and a suffix is never stripped: ``sm_90a`` code runs on capability 9.0 only.
"""

import re
from typing import Literal

from kernel_muster.registry.values import frozen

CPU = "cpu"

# What NVRTC 13 can name and a user may mean. A scope or target outside this list is a mistake.
KNOWN_CAPABILITIES = (
    (7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
)  # fmt: skip
_FIRST_WITH = {"a": (9, 0), "f": (10, 0)}
_ARCH = re.compile(r"sm_([1-9][0-9]*)([0-9])([af]?)\Z")
_CODE = re.compile(r"(sm|compute)_([1-9][0-9]*)([0-9])([af]?)(\+?)\Z")
_SUFFIX_RANK = {"": 0, "f": 1, "a": 2}

CodeKind = Literal["source", "cubin", "ptx", "host"]


@frozen
class Arch:
    """The architecture of a device, as the compiler names it: ``sm_121a``."""

    capability: tuple[int, int]
    suffix: str = ""

    def __str__(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}{self.suffix}"


def parse_arch(text: str) -> Arch:
    """Read ``sm_90a``; ValueError says what is wrong."""
    match = _ARCH.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not an architecture: expected sm_<number>, for example sm_90a")
    arch = Arch((int(match[1]), int(match[2])), match[3])
    _check_known(text, arch.capability, arch.suffix)
    return arch


def canonical_arch(capability: tuple[int, int]) -> Arch:
    """Return the name we give a detected device: with ``a`` from capability 9.0 on."""
    return Arch(capability, "a" if capability >= _FIRST_WITH["a"] else "")


def _check_known(text: str, capability: tuple[int, int], suffix: str) -> None:
    if capability not in KNOWN_CAPABILITIES:
        names = ", ".join(str(canonical_arch(known)) for known in KNOWN_CAPABILITIES)
        raise ValueError(f"{text!r} names no known compute capability; known: {names}")
    if suffix and capability < _FIRST_WITH[suffix]:
        raise ValueError(f"{text!r}: suffix {suffix!r} begins at capability {_FIRST_WITH[suffix]}")


@frozen
class CodeArch:
    """One entry of a spec's ``archs``: what its code needs in order to run."""

    text: str
    kind: CodeKind
    capability: tuple[int, int] = (0, 0)
    suffix: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def specificity(self) -> tuple[int, tuple[int, int]]:
        """Order among entries that accept one target: ``a`` > ``f`` > plain, then the higher minimum."""
        return _SUFFIX_RANK[self.suffix], self.capability

    def rejects(self, target: Arch | None) -> str | None:
        """Say why this code does not run on the target (None is the host), or return None if it does."""
        if target is None:
            return None if self.kind == "host" else f"needs {self.text}, the target is {CPU}"
        if self.kind == "host":
            return "a host reference is only an oracle on a GPU target"
        if self._runs_on(target):
            return None
        return f"needs {self.text}, the target is {target}"

    def _runs_on(self, target: Arch) -> bool:
        have, need = target.capability, self.capability
        if self.suffix == "a":
            return have == need and target.suffix == "a"
        if self.suffix == "f":
            return have[0] == need[0] and have >= need and target.suffix in ("a", "f")
        if self.kind == "cubin":
            return have[0] == need[0] and have >= need
        return have >= need


def parse_code_arch(text: str) -> CodeArch:
    """Read one entry: ``sm_90+``, ``sm_90``, ``sm_90a``, ``sm_120f``, ``compute_90`` or ``cpu``."""
    if text == CPU:
        return CodeArch(CPU, "host")
    match = _CODE.match(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not an arch entry: expected sm_90+, sm_90, sm_90a, sm_120f, compute_90 or cpu")
    family, major, minor, suffix, plus = match.groups()
    if plus and (suffix or family == "compute"):
        raise ValueError(f"{text!r}: '+' goes with a plain sm_<number> only")
    capability = (int(major), int(minor))
    _check_known(text, capability, suffix)
    kind: CodeKind = "ptx" if family == "compute" else "source" if plus else "cubin"
    return CodeArch(text, kind, capability, suffix)
