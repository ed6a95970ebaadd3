"""How wrong a proof's result is, and where: in numbers that a verdict needs, and in words for its finding."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.audit.render.plain import plural
from kernel_muster.registry.contract.contracts import Case, Contract
from kernel_muster.registry.values import frozen

_NO_TOLERANCE = 1e100  # an error over nothing


@frozen
class Errors:
    """The largest error over the tolerance of its output, the largest relative L2 error, and the worst element."""

    worst: float = 0.0
    relative_l2: float = 0.0
    said: str = ""

    def __str__(self) -> str:
        return self.said or f"error is {self.worst:.3g} times the tolerance, relative L2 {self.relative_l2:.3g}"


def errors_of(contract: Contract, case: Case, results: Mapping[str, Any], expected: Mapping[str, Any]) -> Errors:
    """Compare all outputs with what the reference gives; what is not a number is infinitely wrong."""
    worst = relative = 0.0
    said = ""
    for name, result in results.items():
        value, reference = result.astype(np.float64), np.asarray(expected[name], np.float64)
        tolerance = contract.tolerance_of(name, case)
        error = np.abs(value - reference)
        if _are_whole(result, expected[name]):  # float64 does not tell neighbours apart from 2^53 on
            error = np.where(result == expected[name], 0.0, np.maximum(error, 1.0))
        allowed = tolerance.absolute + tolerance.relative * np.abs(reference)
        with np.errstate(over="ignore"):  # an exact result that is not
            ratio = np.where(error == 0, 0.0, error / np.where(allowed > 0, allowed, np.finfo(np.float64).tiny))
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        norm, distance = float(np.linalg.norm(reference)), float(np.linalg.norm(value - reference))
        own = distance / norm if norm > 0 else distance
        relative = max(relative, np.inf if np.isnan(own) else own)
        if (largest := float(ratio.max(initial=0.0))) > worst:
            if _are_whole(result, expected[name]):
                value, reference = result, np.asarray(expected[name])
            worst, said = largest, _element(name, value, reference, int(ratio.argmax()), largest, own)
    return Errors(worst, relative, said)


def _are_whole(result: Any, reference: Any) -> bool:
    return result.dtype.kind in "iu" and np.asarray(reference).dtype.kind in "iu"


def _element(name: str, value: Any, reference: Any, worst: int, ratio: float, relative: float) -> str:
    is_nan = (value != value) & (reference == reference)
    at = int(is_nan.argmax()) if is_nan.any() else worst
    index = ", ".join(map(str, np.unravel_index(at, value.shape)))
    element = f"{name}[{index}]" if index else name
    if is_nan.any():
        return f"{int(is_nan.sum())} of {value.size} elements of {name} are NaN, first {element}, wanted " + (
            f"{reference.flat[at]:.9g}"
        )
    got, wanted = value.flat[at], reference.flat[at]
    size = "the result is not exact" if ratio > _NO_TOLERANCE else f"error is {ratio:.3g} times the tolerance"
    amount = f"{size}, relative L2 {relative:.3g}"
    got, wanted = (f"{one:.9g}" if one.dtype.kind == "f" else str(one) for one in (got, wanted))
    return f"{amount}; worst is {element}: got {got}, wanted {wanted}"


def touched(name: str, buffer: Any, guard: int, size: int, filler: int) -> str:
    """Say which elements of the guard bands around an output no longer hold their filler; nothing if all do."""
    parts = []
    for where, start, band in (("before", -guard, buffer[:guard]), ("behind", size, buffer[guard + size :])):
        changed = np.flatnonzero((band.view(np.uint8).reshape(len(band), -1) != filler).any(axis=1)) + start
        if len(changed):
            span = f"element {changed[0]}" if len(changed) == 1 else f"elements {changed[0]} to {changed[-1]}"
            parts.append(f"{where} it, {span}")
    return f"wrote outside {name} ({plural(size, 'element')}): {'; '.join(parts)}" if parts else ""
