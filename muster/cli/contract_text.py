"""Contracts for ``muster explain``: all promises of a key's kernels."""

from typing import TYPE_CHECKING, Any

from kernel_muster.registry.contract.signature import ScalarParam, WeightParam

if TYPE_CHECKING:
    from kernel_muster.audit.render.sections import Section
    from kernel_muster.registry.contract.contracts import Case, Contract, Tolerance
    from kernel_muster.registry.contract.signature import Param


def contract_data(contract: "Contract") -> dict[str, Any]:
    """Return a contract as plain data for JSON."""
    signature = contract.signature
    return {
        "name": contract.name,
        "summary": contract.summary,
        "parameters": [_param_data(param) for param in signature.params],
        "multiples": [[str(part) for part in pair] for pair in signature.multiples],
        "limits": [[str(part) for part in pair] for pair in signature.limits],
        "tolerance": _tolerance_data(contract.tolerance),
        "output_tolerances": {name: _tolerance_data(t) for name, t in contract.output_tolerances.items()},
        "cases": [
            {
                "name": case.name,
                "dims": dict(case.dims),
                "scalars": dict(case.scalars),
                "tolerance": _tolerance_data(case.tolerance) if case.tolerance else None,
            }
            for case in contract.cases
        ],
    }


def _param_data(param: "Param") -> dict[str, Any]:
    dtype, shape, role, notes = _described(param)
    return {"name": param.name, "dtype": dtype, "shape": shape, "role": role, "notes": notes}


def _tolerance_data(tolerance: "Tolerance") -> dict[str, Any]:
    return {
        "relative": tolerance.relative,
        "absolute": tolerance.absolute,
        "derivation": tolerance.derivation,
    }


def contract_section(contract: "Contract", *, verbose: bool) -> "Section":
    """Return a contract as a section: summary, parameters in call order, bounds and cases."""
    from kernel_muster.audit.render.sections import Section, Table

    signature = contract.signature
    lines = [contract.summary]
    lines += [f"{value} is a multiple of {step}" for value, step in signature.multiples]
    lines += [f"{value} is at most {most}" for value, most in signature.limits]
    lines.append(f"tolerance: {_tolerance_text(contract.tolerance)}")
    lines += [f"tolerance of {name}: {_tolerance_text(t)}" for name, t in contract.output_tolerances.items()]
    if verbose:
        lines += [f"case {_case_text(case)}" for case in contract.cases]
    else:
        names = ", ".join(case.name for case in contract.cases)
        lines.append(f"cases: {names} (their dimensions: --verbose)")
    rows = tuple((param.name, *_described(param)) for param in signature.params)
    # Omit a column without any value.
    width = 5 if any(row[4] for row in rows) else 4
    header = ("PARAMETER", "DTYPE", "SHAPE", "ROLE", "NOTES")[:width]
    return Section(f"Contract {contract.name}", lines=tuple(lines), table=Table(header, tuple(r[:width] for r in rows)))


def _described(param: "Param") -> tuple[str, str, str, str]:
    """Return dtype, shape, role and notes."""
    if isinstance(param, ScalarParam):
        return param.dtype, "scalar", "in", "" if param.minimum is None else f"at least {param.minimum:g}"
    shape = f"({', '.join(map(str, param.shape))}{',' if len(param.shape) == 1 else ''})"
    if isinstance(param, WeightParam):
        return param.quant, shape, "in", "weight, in the layout the spec names"
    return param.dtype, shape, param.role, "may be None" if param.optional else ""


def _tolerance_text(tolerance: "Tolerance") -> str:
    if not tolerance.relative and not tolerance.absolute:
        return f"exact ({tolerance.derivation})"
    return f"|y - ref| <= {tolerance.absolute:g} + {tolerance.relative:g} * |ref| ({tolerance.derivation})"


def _case_text(case: "Case") -> str:
    values = ", ".join(f"{name}={value}" for name, value in (*case.dims.items(), *case.scalars.items()))
    own = f"; tolerance: {_tolerance_text(case.tolerance)}" if case.tolerance else ""
    return f"{case.name}: {values}{own}"
