"""Proofs: a kernel computes what its contract says, on the device it will serve on.

Each case runs between guard bands, twice, on outputs that are poisoned, in the second run integers with other bits; the
first small one runs once more, with other numbers of the same sizes. Checked: every output is written; nothing outside
is; inputs stay as they are; the result lies within the tolerance; both runs give the same bits; and claims of bit
identity hold. A kernel is not proven if zeros, or what was there before, would pass for an output in every case. A case
that does not end is left where it runs; if it runs on a device, nothing else runs there.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import numpy as np
from kernel_muster.audit.proof.claims import FindHandle, check_claims, same_bits
from kernel_muster.audit.proof.judges import FaultyContract, check_sizes, drawn, expected_of
from kernel_muster.audit.proof.proof_words import errors_of, touched
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract
from kernel_muster.registry.contract.specs import is_host_backend
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.stuck import mark_stuck, why_stuck
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.watch import Outcome, Worker, cause_chain, is_interrupt, one_line
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.values import frozen

# Elements before and after each output: more than a tile's overhang in any direction.
_GUARD = 4096
_GUARD_BYTE = 0xA5
# The first case whose arguments have no more elements runs once more, with other numbers.
_FEW_ELEMENTS = 1 << 16


@frozen
class Memory:
    """Where a proof's arrays live: how to bring an array there and back.

    ``watched`` runs a case there for a limited time; ``device`` is the ordinal, None for the host.
    """

    to: Callable[[Any], Any]
    back: Callable[[Any], Any]
    wait: Callable[[], None]
    watched: Callable[[Callable[[], Any], float, str], Outcome[Any]]
    device: int | None = None


def host_memory() -> Memory:
    """Return host memory; arrays are copied, so that a proof never shares them."""
    return Memory(np.copy, np.copy, lambda: None, Worker().watched)


def device_memory(ordinal: int) -> Memory:
    """Return a device's memory, through CuPy."""
    import cupy

    def to(array: Any) -> Any:
        with cupy.cuda.Device(ordinal):
            return cupy.asarray(array)

    def wait() -> None:
        cupy.cuda.Device(ordinal).synchronize()

    def enter() -> None:
        cupy.cuda.Device(ordinal).use()
        cupy.cuda.runtime.free(0)  # the driver's launches take the context of the thread

    return Memory(to, cupy.asnumpy, wait, Worker(enter).watched, ordinal)


@frozen
class CaseResult:
    """How one case went: the largest error in units of the tolerance, and the relative L2 error."""

    key: KernelKey
    case: str
    worst: float
    relative_l2: float
    findings: tuple[Finding, ...]
    is_last: bool = False  # the device has stopped: nothing more can be proven in this process
    is_hanging: bool = False  # the kernel was left where it runs: it gets no more cases


def prove(
    handle: Handle,
    memory: Memory,
    find: FindHandle,
    keep: Callable[[Case], bool] = lambda case: True,
    *,
    begin: Callable[[Case], object] = lambda case: None,
    seconds: float | None = None,
) -> Iterator[CaseResult]:
    """Run the cases of a handle's contract. ``find`` returns the handle of another key on the same target.

    Only a tool that is too slow for all of them passes ``keep``: what it leaves out is not proven. ``begin`` hears of
    each case before it runs. ``seconds`` is the time that a case may take: one that takes longer has not passed, and
    its kernel gets no other. A device where that happens is given up: whatever comes there later is UNCHECKED.
    """
    proof, results = _Proof(handle, memory, find), []
    for case in filter(keep, handle.contract.cases):
        if why := why_stuck(memory.device):
            yield _unproven(handle, case, why)
            return
        begin(case)
        result = _tried(proof, case, seconds)
        results.append(result)
        if len(results) == len(handle.contract.cases) and not any(one.findings for one in results):
            result = replace(result, findings=_unchecked(handle, proof.checked))
        yield result
        if result.is_last or result.is_hanging:
            return


@dataclass
class _Proof:
    """What the cases of a kernel share: of which outputs one could tell a wrong result, and whether one ran again."""

    handle: Handle
    memory: Memory
    find: FindHandle
    checked: set[str] = field(default_factory=set)
    has_run_again: bool = False


def _unchecked(handle: Handle, checked: set[str]) -> tuple[Finding, ...]:
    """Say of which outputs no case can tell a wrong result: they are empty or absent, or no work would pass too."""
    names = [param.name for param in handle.contract.signature.outputs]
    left = ", ".join(name for name in names if name not in checked)
    if not left:
        return ()
    why = message("unchecked.outputs", contract=handle.contract.name, outputs=left)
    return (_finding("UNCHECKED", handle, why, (message("remedy.correct_cases"),)),)


def _unproven(handle: Handle, case: Case, why: str) -> CaseResult:
    remedies = (message("remedy.end_kernel"),)
    finding = _finding("UNCHECKED", handle, message("unchecked.unproven", why=why), remedies)
    return CaseResult(handle.key, case.name, np.inf, np.inf, (finding,))


def _tried(proof: _Proof, case: Case, seconds: float | None) -> CaseResult:
    """Prove a case, with a limit in a thread of its own, which is left behind if it does not end.

    Python cannot end a thread, and nothing takes a launch back. Whatever the thread does with a device is bounded so:
    waiting, copying, a launch that finds no place in the queue.
    """
    if seconds is None:
        return _judged(proof, case)
    handle, memory = proof.handle, proof.memory
    outcome = memory.watched(lambda: _judged(proof, case), seconds, f"proof of {handle.key}")
    if outcome.error is not None:
        raise outcome.error
    if isinstance(outcome.value, CaseResult):
        return outcome.value
    given_up = message("numerics_failed.other_cases")
    if memory.device is not None:
        mark_stuck(memory.device, f"{handle.key}, case {case.name}")
        given_up = message("numerics_failed.given_up", device=f"cuda:{memory.device}")
    hanging = message("numerics_failed.hanging", seconds=f"{seconds:g}", given_up=given_up)
    why = message("of_case", case=case.name, why=hanging)
    remedies = (message("remedy.stack"), message("remedy.more_time", plugin=handle.provider.plugin))
    finding = replace(
        _finding("NUMERICS_FAILED", handle, why, remedies),
        log=outcome.stack,
    )
    return CaseResult(handle.key, case.name, np.inf, np.inf, (finding,), is_hanging=True)


def _judged(proof: _Proof, case: Case) -> CaseResult:
    handle = proof.handle
    try:
        return _prove_case(proof, case)
    except FaultyContract as fault:
        return _faulty(handle, case, fault)
    except BaseException as error:  # (a plugin's code prepares and launches)
        if is_interrupt(error):
            raise
        code, template, is_last = "NUMERICS_FAILED", "numerics_failed.raised", False
        try:
            proof.memory.wait()
        except Exception:  # noqa: BLE001  (whatever the driver says, it says it to every call from now on)
            code, template, is_last = "OUT_OF_BOUNDS", "out_of_bounds.stopped", True
        why = message("of_case", case=case.name, why=message(template, error=one_line(error)))
        finding = replace(_finding(code, handle, why), log=cause_chain(error))
        return CaseResult(handle.key, case.name, np.inf, np.inf, (finding,), is_last)


def _prove_case(proof: _Proof, case: Case) -> CaseResult:
    handle, memory, contract = proof.handle, proof.memory, proof.handle.contract
    given = drawn(contract, case)
    check_sizes(contract, case, given)
    expected = expected_of(contract, case, given)
    first, findings = _run(handle, case, given, memory)
    other = {**given, **_repoisoned(handle, given)}
    second, again = _run(handle, case, other, memory)
    findings += [finding for finding in again if finding not in findings]
    # Where two runs may differ, the second is judged as the first is; else it has the same bits.
    judged = (first,) if handle.spec.deterministic else (first, second)
    unwritten = _unwritten(handle, case, given, first, expected, other, second)
    findings += [
        _finding("UNWRITTEN_OUTPUT", handle, message("of_case", case=case.name, why=str(why))) for why in unwritten
    ]
    errors = [errors_of(contract, case, results, expected) for results in judged]
    worst, relative_l2 = max(one.worst for one in errors), max(one.relative_l2 for one in errors)
    if not worst <= 1.0 and not findings:
        said = max(errors, key=lambda one: one.worst)
        findings.append(_finding("NUMERICS_FAILED", handle, message("of_case", case=case.name, why=str(said))))
    if handle.spec.deterministic and not _are_same(handle, given, first, other, second):
        findings.append(_finding("NOT_DETERMINISTIC", handle, message("not_deterministic", case=case.name)))
    proof.checked |= {
        name for name in first if name not in proof.checked and _tells(contract, case, name, expected, given)
    }
    is_filled = any(result.size for result in first.values())
    if not findings and not proof.has_run_again and is_filled and _elements(given) <= _FEW_ELEMENTS:
        proof.has_run_again = True
        findings += _of_other_numbers(handle, case, memory)
    if not findings:
        findings += check_claims(handle, case, given, first, proof.find, lambda o, a: _run(o, case, a, memory)[0])
    return CaseResult(handle.key, case.name, worst, relative_l2, tuple(findings))


def _faulty(handle: Handle, case: Case, fault: FaultyContract) -> CaseResult:
    """Return the result of a case whose contract is to blame."""
    remedies = (message("remedy.faulty_contract"),)
    finding = replace(
        _finding("NUMERICS_FAILED", handle, message("of_case", case=case.name, why=str(fault)), remedies), log=fault.log
    )
    return CaseResult(handle.key, case.name, np.inf, np.inf, (finding,))


def _tells(contract: Contract, case: Case, output: str, expected: Mapping[str, Any], given: Arguments) -> bool:
    """Whether zeros fail a case, and what was there before: a kernel that computes nothing gives one of the two."""
    right = {output: expected[output]}
    idle = (np.zeros(right[output].shape), given[output])
    return all(errors_of(contract, case, {output: one}, right).worst > 1.0 for one in idle)


def _of_other_numbers(handle: Handle, case: Case, memory: Memory) -> list[Finding]:
    """Run a case on other numbers of the same sizes: a kernel may remember what it gave for them."""
    given = drawn(handle.contract, case, "/again")
    expected = expected_of(handle.contract, case, given)
    results, findings = _run(handle, case, given, memory)
    errors = errors_of(handle.contract, case, results, expected)
    if not errors.worst <= 1.0 and not findings:
        findings = [_finding("NUMERICS_FAILED", handle, message("of_case.again", case=case.name, why=str(errors)))]
    return findings


def _finding(code: str, handle: Handle, why: str, remedies: tuple[str, ...] = ()) -> Finding:
    return Finding(code, str(handle.key), why, (str(handle.provider),), remedies or _remedies(code, handle))


def _remedies(code: str, handle: Handle) -> tuple[str, ...]:
    on_host = is_host_backend(handle.spec.backend)
    if code == "NUMERICS_FAILED":
        template = "remedy.explain_on_host" if on_host else "remedy.explain"
        return message(template, key=str(handle.key)), message("remedy.correct_contract")
    if code == "OUT_OF_BOUNDS":
        shown = () if on_host else (message("remedy.memcheck"),)
        return (message("remedy.guard_edges"), *shown)
    return _REMEDIES[code]


_REMEDIES = {
    "UNWRITTEN_OUTPUT": (message("remedy.write_all"),),
    "NOT_DETERMINISTIC": (message("remedy.fixed_order"), message("remedy.not_deterministic")),
}
_LEAVE_INPUTS = (message("remedy.outputs_only"), message("remedy.inout"))


def _run(handle: Handle, case: Case, given: Arguments, memory: Memory) -> tuple[dict[str, Any], list[Finding]]:
    """Run once; return the outputs on the host, and what was touched that should not have been."""
    arguments, guards = {}, {}
    kept: dict[str, tuple[Any, Any]] = {}  # what the kernel must leave alone, and what it holds
    outputs = {param.name: param for param in handle.contract.signature.outputs}
    for name, value in given.items():
        if name in outputs and value is not None:
            guards[name] = memory.to(_guarded(value))
            arguments[name] = guards[name][_GUARD : _GUARD + value.size].reshape(value.shape)
        elif isinstance(value, np.ndarray):
            arguments[name] = memory.to(value)
            kept[name] = arguments[name], value
        elif hasattr(value, "layout"):
            logical = weight_in(value, memory)
            arguments[name] = handle.prepare_weight(logical)
            kept.update((f"{name}.{part}", (array, getattr(value, part))) for part, array in _arrays_of(logical))
            if arguments[name] is not logical:
                parts = _arrays_of(arguments[name])
                kept.update((f"prepared {name}.{part}", (array, memory.back(array))) for part, array in parts)
        else:
            arguments[name] = value
    handle(**arguments)
    memory.wait()
    results, findings = {}, []
    for name, guarded in guards.items():
        buffer = memory.back(guarded)
        size, shape = given[name].size, given[name].shape
        results[name] = buffer[_GUARD : _GUARD + size].reshape(shape)
        if outside := touched(name, buffer, _GUARD, size, _GUARD_BYTE):
            findings.append(_finding("OUT_OF_BOUNDS", handle, message("of_case", case=case.name, why=str(outside))))
    for name, (array, before) in kept.items():
        if not same_bits(memory.back(array), before):
            why = message("out_of_bounds.input", case=case.name, input=name)
            findings.append(_finding("OUT_OF_BOUNDS", handle, why, _LEAVE_INPUTS))
    return results, findings


def _elements(given: Arguments) -> int:
    weights = (array for value in given.values() for _, array in _arrays_of(value))
    return sum(array.size for array in (*given.values(), *weights) if isinstance(array, np.ndarray))


def _arrays_of(weight: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a weight, by the names of its fields."""
    return [(part, value) for part, value in getattr(weight, "__dict__", {}).items() if hasattr(value, "nbytes")]


def _guarded(array: Any) -> Any:
    """Return a flat buffer that holds the array between two guard bands."""
    buffer = np.empty(array.size + 2 * _GUARD, array.dtype)
    buffer.view(np.uint8)[:] = _GUARD_BYTE
    buffer[_GUARD : _GUARD + array.size] = array.ravel()
    return buffer


def weight_in(weight: Any, memory: Memory) -> Any:
    """Return a logical weight whose arrays lie in the given memory."""
    if not is_dataclass(weight) or isinstance(weight, type):
        raise ContractError(f"{type(weight).__name__} is no weight that a proof can move")
    arrays = {name: memory.to(value) for name, value in vars(weight).items() if isinstance(value, np.ndarray)}
    return replace(weight, **arrays)


def _repoisoned(handle: Handle, given: Arguments) -> Arguments:
    """Return the outputs whose poison may be a right result, with another poison: all bits turned round."""
    return {name: ~given[name] for name in _whole_numbers(handle, given)}


def _whole_numbers(handle: Handle, given: Arguments) -> list[str]:
    outputs = [param.name for param in handle.contract.signature.outputs if param.role == "out"]
    return [name for name in outputs if given[name] is not None and given[name].dtype.kind in "iub"]


def _untouched(result: Any, poison: Any) -> Any:
    """Return which elements hold what they held before."""
    in_bytes = (*result.shape, result.itemsize)
    return (result.view(np.uint8).reshape(in_bytes) == poison.view(np.uint8).reshape(in_bytes)).all(axis=-1)


def _unwritten(
    handle: Handle, case: Case, given: Arguments, first: Mapping[str, Any], expected: Mapping[str, Any],
    other: Arguments, second: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """Say which elements of outputs still hold their poison, in both runs where it may be the right result."""
    found = []
    whole, of_other = _whole_numbers(handle, given), None
    for param in handle.contract.signature.outputs:
        name = param.name
        if param.role != "out" or name not in first or first[name].size == 0:
            continue
        left = _untouched(first[name], given[name])
        if name in whole and (left := left & _untouched(second[name], other[name])).any():
            # What a contract leaves alone its reference gives back.
            of_other = expected_of(handle.contract, case, other) if of_other is None else of_other
            left &= ~((expected[name] == given[name]) & (of_other[name] == other[name]))
        if left.any():
            where = tuple(int(axis[0]) for axis in np.nonzero(left))
            found.append(f"{int(left.sum())} of {left.size} elements of {name} unwritten, first {where}")
    return found


def _are_same(
    handle: Handle, given: Arguments, first: Mapping[str, Any], other: Arguments, second: Mapping[str, Any]
) -> bool:
    """Whether two runs gave the same bits; what neither wrote has those of its poison."""
    for name in first:
        if name not in _whole_numbers(handle, given):
            if not same_bits(first[name], second[name]):
                return False
        elif (
            (first[name] != second[name])
            & ~(_untouched(first[name], given[name]) & _untouched(second[name], other[name]))
        ).any():
            return False
    return True
