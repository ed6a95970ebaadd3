"""Does a planner give launches that its compiled code can take? No device is needed to ask it.

Each case of the contract is bound on the host and planned; nothing is launched, so that pointers do not matter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from kernel_muster.registry.backends.cuda_kernel import DeviceBackend, LaunchPlan, idle_problem
from kernel_muster.registry.backends.numba.numba_kernel import NumbaKernel, WrongElements
from kernel_muster.registry.backends.request import INTEGERS, Built, EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.contracts import Case, Contract
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.launch.workspace import Counters, Scratch, TensorMap
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line

# CUDA C++ Programming Guide, technical specifications: the same from compute capability 7.5 on.
_LARGEST = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64), "cluster": (16, 16, 16)}
_MOST_BLOCKS_OF_A_CLUSTER = 16
_ELEMENTS = (
    "declare in the NumbaEntry what the contract's tensor holds",
    "or, where its bits are meant, an unsigned integer: u16* for BF16",
)
_REMEDIES = ("correct the planner, or the entry points of the spec", "or take the case out of what the contract allows")


def plan_findings(
    spec: KernelSpec, backend: DeviceBackend, contract: Contract, built: Built, entries: Iterable[EntryPoint]
) -> Iterator[Finding]:
    """Plan every case, and say which give no launch that these entry points take; one finding a kernel."""
    declared = {entry.name: entry for entry in entries}
    for case in contract.cases:
        remedies = _REMEDIES
        try:
            problems = _problems(spec, backend, contract, case, built, declared)
            why, log = "; ".join(problems), ""
        except WrongElements as error:
            why, log, remedies = str(error), "", _ELEMENTS
        except Exception as error:  # noqa: BLE001  (a plugin's planner may raise anything)
            why, log = f"the planner refuses what the contract allows: {one_line(error)}", cause_chain(error)
        if why:
            where = f"case {case.name} on {built.arch}: {why}"
            yield Finding("BAD_SPEC", spec.key, where, remedies=remedies, log=log)
            return


def elements_finding(spec: KernelSpec, contract: Contract, entries: Mapping[str, EntryResources]) -> Finding | None:
    """Say which argument a compiled kernel would read as something that it is not, by its smallest case; None if none.

    Only Numba's parameters name the elements that a pointer leads to. What else may be wrong with a plan, a boot leaves
    to ``plugin check`` and to the launch, which refuses.
    """
    if not isinstance(spec.backend, NumbaKernel):
        return None
    for case in sorted(contract.cases, key=lambda case: prod(case.dims.values())):
        try:
            bound = _bound(spec, contract, case)
            if not bound.is_empty:
                spec.backend.plan(bound, entries)
                return None
        except WrongElements as error:
            return Finding("BAD_SPEC", spec.key, f"case {case.name}: {error}", remedies=_ELEMENTS)
        except Exception:  # noqa: BLE001  (a plugin's contract or planner may raise anything)
            return None
    return None


def _problems(
    spec: KernelSpec,
    backend: DeviceBackend,
    contract: Contract,
    case: Case,
    built: Built,
    declared: Mapping[str, EntryPoint],
) -> list[str]:
    bound = _bound(spec, contract, case)
    if bound.is_empty:
        return []
    plans = backend.plan(bound, built.entries)
    if not plans:
        problem = idle_problem(bound)
        return [problem] if problem else []
    return [problem for plan in plans for problem in _plan_problems(plan, built, declared)]


def _bound(spec: KernelSpec, contract: Contract, case: Case) -> Bound:
    """Return a case's arguments in host memory, with weights prepared, as a handle would check them."""
    import numpy as np

    given = contract.arguments(case, np.random.default_rng(0))
    if spec.prepare is not None:
        for param in contract.signature.weights:
            given[param.name] = spec.prepare(given[param.name])
    return contract.signature.bind(spec.key, (), given)


def _plan_problems(plan: LaunchPlan, built: Built, declared: Mapping[str, EntryPoint]) -> Iterator[str]:
    if not isinstance(plan, LaunchPlan):
        yield f"the planner returned {type(plan).__name__}, expected a LaunchPlan or a tuple of them"
        return
    entry = declared.get(plan.entry)
    if entry is None:
        yield f"it launches {plan.entry}, which is no declared entry point ({', '.join(sorted(declared))})"
        return
    extents = {"grid": plan.grid, "block": plan.block or (1, 1, 1), "cluster": plan.cluster or (1, 1, 1)}
    for name, extent in extents.items():
        if problem := _extent_problem(extent, _LARGEST[name]):
            yield f"{plan.entry}: {name} is {extent!r}, expected {problem}"
            return
    cluster, blocks = extents["cluster"], prod(extents["cluster"])
    if blocks > _MOST_BLOCKS_OF_A_CLUSTER or any(g % c for g, c in zip(plan.grid, cluster, strict=True)):
        most = _MOST_BLOCKS_OF_A_CLUSTER
        yield f"{plan.entry}: clusters of {cluster} blocks, expected at most {most}, and a grid of whole clusters"
    limit, block = built.entries[plan.entry].max_threads, plan.block
    if block is None and limit is None:
        yield f"{plan.entry}: no block is planned, and its code has no launch bound"
    if block is not None and limit is not None and block[0] * block[1] * block[2] > limit:
        yield f"{plan.entry}: a block of {block} exceeds the launch bound of {limit} threads"
    if plan.dynamic_shared_bytes not in range(entry.dynamic_shared_bytes + 1):
        most = entry.dynamic_shared_bytes
        yield f"{plan.entry}: {plan.dynamic_shared_bytes!r} dynamic shared bytes, {most} are declared"
    if len(plan.arguments) != len(entry.parameters):
        yield f"{plan.entry}: {len(plan.arguments)} arguments, {len(entry.parameters)} parameters are declared"
        return
    for position, (value, kind) in enumerate(zip(plan.arguments, entry.parameters, strict=True)):
        if not _fits(value, kind):
            what = repr(value) if type(value) is int else type(value).__name__
            yield f"{plan.entry}: argument {position} is {what}, the parameter is {kind}"


def _extent_problem(extent: Any, largest: tuple[int, int, int]) -> str:
    """Say what is wrong with a grid, a block or a cluster; nothing if it can be launched."""
    if not isinstance(extent, tuple) or len(extent) != 3 or not all(type(size) is int and size > 0 for size in extent):
        return "three positive integers"
    return f"at most {largest}" if any(size > most for size, most in zip(extent, largest, strict=True)) else ""


_POINTERS: tuple[type, ...] = (ArrayView, Scratch, Counters, int)
_NUMBERS: dict[str, Callable[[Any], Any]] = {"f32": float, "f64": float, "bool": bool}


def _fits(value: Any, kind: str) -> bool:
    """Whether an argument can be coerced to a parameter's type, as a launch does."""
    if kind == "ptr":
        return isinstance(value, _POINTERS)
    if kind == "tensormap":
        return isinstance(value, TensorMap)
    try:
        if kind in INTEGERS:
            return bool(int(value) == value) and int(value) in INTEGERS[kind]
        return kind in _NUMBERS and bool(_NUMBERS[kind](value) == value)
    except (TypeError, ValueError, OverflowError):
        return False
