"""Any kernel by its key, also a third party's: every case of its contract, proven, beside the floor of its bytes."""

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
from kernel_muster.audit.checking import CASE_S
from kernel_muster.audit.proof.proofs import Memory, device_memory, host_memory, prove, weight_in
from kernel_muster.bench import floor
from kernel_muster.bench.contestants import Contestant, Entry, found, launch_of
from kernel_muster.bench.families.small import MOST_COPIES, mover
from kernel_muster.bench.measure import BenchFamily
from kernel_muster.bench.problem import Problem, Request, Shape
from kernel_muster.bench.timing import copies_of
from kernel_muster.registry.contract.contracts import Arguments, Case
from kernel_muster.registry.contract.specs import is_host_backend
from kernel_muster.registry.errors import DeviceStuck, MusterError, UsageError
from kernel_muster.registry.hardware.stuck import why_stuck
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

_SEED = 7


def keys_family(pattern: str) -> BenchFamily:
    """Return the family of the keys that match a pattern: ``norm::rms_norm``, ``acme::*``."""

    def shape(text: str) -> Shape:
        raise UsageError(f"--shape {text}: {pattern} is measured at the cases of its contract")

    return BenchFamily(pattern, partial(_problems, pattern), range(0), (), shape)


def keys_like(kernels: Lookups, pattern: str) -> list[KernelKey]:
    """Return the keys of device kernels that match a pattern; UsageError with a suggestion if there is none."""
    specs = (row.spec for row in kernels.catalog.kernels if not is_host_backend(row.spec.backend))
    keys = {str(spec.key): spec.kernel_key for spec in specs}
    fitting = [key for text, key in sorted(keys.items()) if fnmatchcase(text, pattern)]
    if not fitting:
        near = get_close_matches(pattern, keys, 1)
        hint = f"; did you mean {near[0]}?" if near else "; muster kernels lists them"
        raise UsageError(f"no kernel of a device has the key {pattern}{hint}")
    return fitting


def _problems(pattern: str, kernels: Lookups, request: Request) -> Iterator[Problem]:
    for key in keys_like(kernels, pattern):
        handle = found(kernels, key.module, key.func)
        for case in handle.contract.cases:
            given = handle.contract.arguments(case, np.random.default_rng(_SEED))
            if not handle.contract.signature.bind(str(key), (), given).is_empty:  # otherwise nothing is launched
                yield problem_of(kernels, handle, case, given)


def problem_of(kernels: Lookups, handle: Handle, case: Case, given: Arguments) -> Problem:
    """Return one case with its floors. Every argument counts as read, and every output as written."""
    outputs = {param.name: param.role for param in handle.contract.signature.outputs}
    reads = sum(_bytes_of(value) for name, value in given.items() if outputs.get(name) != "out")
    writes = sum(_bytes_of(value) for name, value in given.items() if name in outputs)
    size = max(reads, writes)
    count = min(MOST_COPIES, copies_of(size))
    contestants = (
        mover(kernels, "move", reads, writes, size, count),
        mover(kernels, "empty", 0, 0, floor.VECTOR_BYTES, 2),
        Contestant(str(handle.key), "ours", partial(_ours, kernels, handle, case, given, count, size), (handle,)),
    )
    sizes = " ".join(f"{name}={value}" for name, value in case.dims.items())
    return Problem(f"{handle.key} {case.name}", sizes, case.dims.get("M", 0), contestants, None, np.inf, "move")


def _ours(kernels: Lookups, handle: Handle, case: Case, given: Arguments, count: int, size: int, stream: Any) -> Entry:
    device = kernels.target.device
    memory = host_memory() if device is None else device_memory(device.ordinal)
    ready = tuple(launch_of(handle, stream, **_there(handle, given, memory)) for _ in range(count))
    return Entry(ready, None, size, check=partial(_proven_error, kernels, handle, case, memory))


def _there(handle: Handle, given: Arguments, memory: Memory) -> Arguments:
    """Return the arguments in the kernel's memory, its weights in its layout."""
    there = dict(given)
    for name, value in given.items():
        if hasattr(value, "layout"):
            there[name] = handle.prepare_weight(weight_in(value, memory))
        elif isinstance(value, np.ndarray):
            there[name] = memory.to(value)
    return there


def _proven_error(kernels: Lookups, handle: Handle, case: Case, memory: Memory) -> float:
    """Prove one case like an audit, and return its relative L2 error. MusterError describes a failure."""
    (result,) = prove(handle, memory, partial(_find, kernels), lambda one: one is case, seconds=CASE_S)
    if why := why_stuck(memory.device):
        raise DeviceStuck(why)
    if result.findings:
        raise MusterError("; ".join(f"{finding.code}: {finding.why}" for finding in result.findings))
    return result.relative_l2


def _find(kernels: Lookups, key: KernelKey) -> Handle | None:
    handle = kernels.try_kernel(key.module, key.func)
    return handle if isinstance(handle, Handle) else None


def _bytes_of(value: Any) -> int:
    held = (value, *getattr(value, "__dict__", {}).values())
    return sum(int(getattr(one, "nbytes", 0)) for one in held)
