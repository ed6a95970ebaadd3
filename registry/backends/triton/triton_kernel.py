"""Triton kernels: what a spec says of one, and how its launch follows from checked arguments."""

import re
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from kernel_muster.registry.backends.cuda_kernel import LaunchPlan, path_problems
from kernel_muster.registry.backends.numba.python_sources import read_sources
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.triton.compiling import TritonRequest
from kernel_muster.registry.backends.triton.variant import Variant
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError, MusterError
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen

# Triton's names of types, ours of the parameter that carries a number, and NumPy's of the elements behind a pointer.
_INTEGERS = tuple(f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64))
_NUMBERS = {**{name: name for name in _INTEGERS}, "fp32": "f32", "fp64": "f64"}
_ELEMENTS = {
    **{name: f"{'int' if name[0] == 'i' else 'uint'}{name[1:]}" for name in _INTEGERS},
    "fp32": "float32",
    "fp64": "float64",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8e4nv": "float8_e4m3fn",
    "i1": "bool",
}
_PARAMETER = re.compile(r"(\*)?([a-z]+\d+(?:[a-z]+\d*[a-z]*)?)(:16)?")
_DIVISOR = 16
# Behind the declared parameters Triton 3.6 has two pointers of its own, to scratch that no kernel here may need.
_HIDDEN = ("ptr", "ptr")
_WARP, _MOST_WARPS = 32, 32


@frozen
class TritonKernel:
    """One Triton kernel of a file, which may import modules of its own package.

    ``function`` is the name of a ``@triton.jit`` function. ``parameters`` are the types of its parameters in order,
    without those that are ``tl.constexpr``: ``*bf16`` is a pointer, ``i32`` or ``fp32`` a number, ``i32:16`` one that
    is always a multiple of 16. Pointers begin at multiples of 16 bytes, and the code counts on that. ``constants`` are
    the values of the constexpr parameters by name. The path is absolute; the file is loaded only to be compiled.
    ``planner(bound, entries)`` is that of a CudaKernel, with one argument for each of ``parameters``; the block follows
    from ``num_warps``. ``shared_bytes`` is the dynamic shared memory that the kernel needs, which the build checks.
    ``strided`` names parameters whose rows may have gaps. No launch begins early.
    """

    source: Path
    function: str
    parameters: tuple[str, ...]
    planner: Callable[[Bound, Mapping[str, EntryResources]], LaunchPlan | tuple[LaunchPlan, ...]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    shared_bytes: int = 0
    strided: frozenset[str] = frozenset()
    name: str = "triton"

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        found = path_problems(self.source)
        if not isinstance(self.function, str) or not self.function.isidentifier():
            found.append(f"function is {self.function!r}, expected the name of a @triton.jit function")
        if not isinstance(self.parameters, tuple):
            found.append(f"parameters is {self.parameters!r}, expected a tuple of types such as *bf16, i32")
        else:
            known = f"expected such as *bf16, {', '.join(_NUMBERS)} or i32:16"
            found += [f"parameters: {one!r}, {known}" for one in self.parameters if not _is_type(one)]
        if not isinstance(self.constants, Mapping) or not all(map(_is_constant, self.constants.values())):
            found.append(f"constants is {self.constants!r}, expected integers, floats, bools, text and None by name")
        if not _is_count(self.num_warps) or self.num_warps & (self.num_warps - 1) or self.num_warps > _MOST_WARPS:
            found.append(f"num_warps is {self.num_warps!r}, expected a power of two up to {_MOST_WARPS}")
        if not _is_count(self.num_stages):
            found.append(f"num_stages is {self.num_stages!r}, expected a number from 1 on")
        if not isinstance(self.shared_bytes, int) or self.shared_bytes < 0:
            found.append(f"shared_bytes is {self.shared_bytes!r}, expected a number from 0 on")
        return found

    @property
    def source_sha256(self) -> str:
        """The digest of the file, of the modules of its own that it imports, and of what is compiled of it."""
        return self.variant.sha256(read_sources(self.source))

    @property
    def variant(self) -> Variant:
        """What is compiled of the file: function, types, constants and sizes."""
        constants = tuple(sorted(self.constants.items()))
        sizes = (self.num_warps, self.num_stages, self.shared_bytes)
        return Variant(self.function, self.parameters, constants, *sizes)

    @property
    def entry_point(self) -> EntryPoint:
        """The entry point with its parameters as they are in the cubin."""
        kinds = tuple("ptr" if one.startswith("*") else _NUMBERS[_element(one)] for one in self.parameters)
        return EntryPoint(self.function, (*kinds, *_HIDDEN), self.shared_bytes, _WARP * self.num_warps)

    def request(self, arch: Arch) -> "TritonRequest":
        """Return what must be built for an architecture."""
        return TritonRequest(self.source.name, self.source, arch, (self.entry_point,), variant=self.variant)

    def plan(self, bound: Bound, entries: Mapping[str, EntryResources]) -> tuple[LaunchPlan, ...]:
        """Return the launches for checked arguments, in order; ContractError for one that its declared type is not."""
        plan = self.planner(bound, entries)
        return tuple(self._launch(one) for one in (plan if isinstance(plan, tuple) else (plan,)))

    def _launch(self, plan: LaunchPlan) -> LaunchPlan:
        if plan.entry != self.function or len(plan.arguments) != len(self.parameters):
            got = f"{plan.entry} with {len(plan.arguments)} arguments"
            raise MusterError(f"{self.function}: the plan is of {got}, expected {len(self.parameters)}")
        for position, (kind, value) in enumerate(zip(self.parameters, plan.arguments, strict=True)):
            _check(f"{self.function}: argument {position}", kind, value)
        return replace(
            plan,
            arguments=(*plan.arguments, *(0 for _ in _HIDDEN)),
            block=(_WARP * self.num_warps, 1, 1),
            dynamic_shared_bytes=self.shared_bytes,
            may_overlap=False,
        )


def _is_type(text: object) -> bool:
    match = _PARAMETER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return False
    if match[1]:
        return match[2] in _ELEMENTS and match[3] is None
    return match[2] in _NUMBERS and (match[3] is None or match[2][0] in "iu")


def _element(text: str) -> str:
    return text.removeprefix("*").removesuffix(":16")


def _is_constant(value: object) -> bool:
    return value is None or isinstance(value, int | float | str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(what: str, kind: str, value: Any) -> None:
    """Refuse an argument that the compiled code would read as another than it is.

    An integer pointer may read any elements of its size, bit by bit.
    """
    if kind.startswith("*"):
        element = _element(kind)
        if isinstance(value, ArrayView) and value.dtype.name.removesuffix("_") != _ELEMENTS[element]:
            same_size = element[0] in "iu" and element != "i1" and value.dtype.itemsize == int(element[1:]) // 8
            if not same_size:
                raise ContractError(f"{what} is an array of {value.dtype}, declared as {kind}")
    elif kind.endswith(":16") and int(value) % _DIVISOR:
        raise ContractError(f"{what} is {value}, declared as {kind}: expected a multiple of {_DIVISOR}")
