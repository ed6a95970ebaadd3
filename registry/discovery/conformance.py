"""Whether a host kernel's function can be called as its contract says: known at discovery, without a launch."""

import inspect
from collections.abc import Iterator, Sequence

from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec, PythonKernel

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def call_problems(spec: KernelSpec, contract: Contract) -> Iterator[str]:
    """Say why a spec's function does not take its contract's parameters by name; other backends check at a build."""
    backend = spec.backend
    # What a builtin says of itself is often wrong, or nothing: the proofs call it.
    if not isinstance(backend, PythonKernel) or inspect.isbuiltin(backend.function):
        return
    try:
        parameters = list(inspect.signature(backend.function).parameters.values())
    except (TypeError, ValueError):
        return
    yield from _differences(parameters, contract)


def _differences(parameters: Sequence[inspect.Parameter], contract: Contract) -> Iterator[str]:
    names = contract.signature.names
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    taken = {parameter.name for parameter in parameters if parameter.kind in _BY_NAME}
    lacking = [name for name in names if name not in taken]
    if lacking and not takes_any:
        yield f"its function does not take {', '.join(lacking)}, which contract {contract.name} passes by name"
    needed = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    extra = [p.name for p in needed if p.kind not in _BY_NAME or p.name not in names]
    if extra:
        yield f"its function needs {', '.join(extra)}, which contract {contract.name} does not pass by name"
