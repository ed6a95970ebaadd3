"""Claims of bit identity: the kernel that a spec names makes the same bits.

Where both have the same parameters, the other kernel runs on as many rows (M) at a time as it takes; where not, the
claiming contract says how (``by_rows``). A claim that cannot be checked is UNCHECKED, never passed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract, Run
from kernel_muster.registry.contract.signature import TensorParam, evaluate_dim
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey, parse_key
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.watch import one_line
from kernel_muster.registry.selection.handles import Handle

FindHandle = Callable[[KernelKey], Handle | None]
RunOther = Callable[[Handle, Arguments], Mapping[str, Any]]


class _Unclear(MusterError):
    """Nothing says how the other kernel makes these outputs."""


def check_claims(
    handle: Handle, case: Case, given: Arguments, results: Mapping[str, Any], find: FindHandle, run: RunOther
) -> Iterator[Finding]:
    """Yield what is wrong with a spec's claims in one case. ``find`` gives the handle of a key on the same target."""
    for name in handle.spec.bit_identical_to:
        other = find(parse_key(name))
        if other is None:
            yield _unchecked(handle, message("unchecked.claim_absent", other=name))
            continue
        if other.is_same_kernel(handle):
            yield _unchecked(handle, message("unchecked.claim_own", other=name))
            continue
        try:
            made = dict(_made_by(other, handle.contract, case, given, run))
        except Exception as error:  # noqa: BLE001  (code of two plugins runs in here)
            said = str(error) if isinstance(error, MusterError) else one_line(error)
            yield _unchecked(handle, message("unchecked.claim", case=case.name, other=name, why=said))
            continue
        wrong = [output for output in results if not same_bits(results[output], made.get(output))]
        if wrong:
            why = message("bit_identity_broken", case=case.name, outputs=wrong, other=name)
            remedies = (message("remedy.same_order"), message("remedy.drop_claim"))
            yield Finding("BIT_IDENTITY_BROKEN", str(handle.key), why, (str(handle.provider),), remedies)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two arrays are equal bit for bit, NaN included."""
    return isinstance(other, np.ndarray) and one.shape == other.shape and one.tobytes() == other.tobytes()


def _unchecked(handle: Handle, why: str) -> Finding:
    remedies = (
        message("remedy.claim_served"),
        message("remedy.by_rows"),
        message("remedy.drop_bits"),
    )
    return Finding("UNCHECKED", str(handle.key), why, (str(handle.provider),), remedies)


def _made_by(other: Handle, contract: Contract, case: Case, given: Arguments, run: RunOther) -> Mapping[str, Any]:
    """Return a contract's outputs as another kernel makes them."""

    def run_other(arguments: Arguments) -> Mapping[str, Any]:
        return run(other, arguments)

    how = contract.by_rows.get(other.contract.name)
    if how is not None:
        return how(run_other, given, case.dims)
    return _in_pieces(other.contract, contract, case, given, run_other)


def _in_pieces(theirs: Contract, ours: Contract, case: Case, given: Arguments, run: Run) -> Mapping[str, Any]:
    """Run a kernel of the same parameters on as many rows at a time as it takes."""
    if theirs.signature.params != ours.signature.params:
        raise _Unclear(f"contract {ours.name} does not say how kernels of {theirs.name} make its outputs")
    exceeded = {expression: int(most) for expression, most in _exceeded(theirs, case)}
    if not exceeded:
        return run(given)
    if set(exceeded) != {"M"} or any(not _is_cut(param) for param in ours.signature.outputs):
        limits = ", ".join(f"{expression} <= {most}" for expression, most in exceeded.items())
        raise _Unclear(f"kernels of {theirs.name} take {limits}, and nothing says how to cut other arguments than rows")
    cut = {param.name for param in ours.signature.params if _is_cut(param) and given[param.name] is not None}
    pieces = [
        run({name: value[start : start + exceeded["M"]] if name in cut else value for name, value in given.items()})
        for start in range(0, case.dims["M"], exceeded["M"])
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _exceeded(contract: Contract, case: Case) -> Iterator[tuple[str, int]]:
    for expression, largest in contract.signature.limits:
        most = evaluate_dim(largest, case.dims)
        if evaluate_dim(expression, case.dims) > most:
            yield str(expression), most


def _is_cut(param: object) -> bool:
    return isinstance(param, TensorParam) and bool(param.shape) and param.shape[0] == "M"
