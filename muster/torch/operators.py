"""Operators of torch: one for each contract, defined once in a process, and their implementation.

An operator writes its outputs, which are arguments, and returns nothing. It has no gradient.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_muster.registry.contract.arrays import HOST, ArrayView, dtype_of_torch, view_of
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.signature import Param, WeightParam
from kernel_muster.registry.errors import ContractError, UsageError
from kernel_muster.torch.launching import launch
from kernel_muster.torch.open_kernels import find_kernel
from kernel_muster.torch.schema import NAMESPACE, SERVED_BY, schema_of
from kernel_muster.torch.weights import form_of, rebuilt

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_DEFINED: dict[str, str] = {}
_LOCK = threading.Lock()
# Compilers keep the strides of arguments that a contract checks.
_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, name)
)


def define(contract: Contract) -> Any:
    """Return the operator of a contract, and define it if this process has none.

    UsageError for a contract without a possible schema, and for a name that another registry of this process gave to an
    operator with other parameters: a defined operator is permanent.
    """
    schema = schema_of(contract)
    with _LOCK:
        known = _DEFINED.get(contract.name)
        if known is None:
            _define(contract, schema)
            _DEFINED[contract.name] = schema
        elif known != schema:
            raise UsageError(
                f"contract {contract.name!r}: this process has an operator of that name already: {known}, expected "
                f"{schema}: open the other registry in a process of its own"
            )
    return getattr(getattr(torch.ops, NAMESPACE), contract.name).default


def _define(contract: Contract, schema: str) -> None:
    owner = f"torch.ops.{NAMESPACE}.{contract.name}"
    params = contract.signature.params
    outputs = tuple(at for at, place in enumerate(_places(params)) if place is not None and _is_output(place))
    read = _reader(owner, params)

    def run(*given: Any, **named: str) -> None:
        kernel = find_kernel(owner, contract.name, named.get(SERVED_BY, ""))
        launch(kernel.handle, read(given, kernel.ordinal is None), kernel.ordinal)
        if torch.is_grad_enabled():
            _mark_written([given[at] for at in outputs])

    def fake(*given: Any, **named: str) -> None:
        kernel = find_kernel(owner, contract.name, named.get(SERVED_BY, ""))
        kernel.handle.check(_traced(owner, params, given), _looked_at(given, kernel.ordinal))

    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(contract.name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{contract.name}", fake, lib=_LIBRARY)


def _places(params: Sequence[Param]) -> list[Param | None]:
    """Return the parameter of each argument of an operator. None stands for the form of the weight before it."""
    return [one for param in params for one in ((param, None) if isinstance(param, WeightParam) else (param,))]


def _is_output(param: Param) -> bool:
    return getattr(param, "role", "in") != "in"


def _reader(owner: str, params: Sequence[Param]) -> Callable[[Sequence[Any], bool], list[Any]]:
    """Return the conversion from the arguments of an operator to those of its contract."""
    weights = [at for at, place in enumerate(_places(params)) if isinstance(place, WeightParam)]
    if not weights:
        return lambda given, on_host: list(given)

    def read(given: Sequence[Any], on_host: bool) -> list[Any]:
        arguments = list(given)
        for at in reversed(weights):
            arguments[at : at + 2] = [rebuilt(owner, given[at], given[at + 1], on_host)]
        return arguments

    return read


def _traced(owner: str, params: Sequence[Param], given: Sequence[Any]) -> list[Any]:
    """Return the arguments of a contract while a compiler traces: a weight is its form alone."""
    places = _places(params)
    return [
        form_of(owner, given[at + 1]) if isinstance(place, WeightParam) else given[at]
        for at, place in enumerate(places)
        if place is not None
    ]


def _looked_at(given: Sequence[Any], ordinal: int | None) -> Callable[[Any], ArrayView]:
    """Return a contract's view of tensors without memory. Their sizes may be symbols, which a check guards.

    Tensors of the device ``meta`` stand for any device, if all are on it.
    """
    expected = {"cpu"} if ordinal is None else {f"cuda:{ordinal}"}
    if all(one.device.type == "meta" for one in given if isinstance(one, torch.Tensor)):
        expected = {"meta"}

    def look(tensor: Any) -> ArrayView:
        if not isinstance(tensor, torch.Tensor):
            return view_of(tensor)
        dtype = dtype_of_torch(tensor.dtype)
        if str(tensor.device) not in expected:
            raise ContractError(f"lies on {tensor.device}")
        strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
        return ArrayView(0, dtype, tuple(tensor.shape), strides, HOST, True, tensor)

    return look


def _mark_written(outputs: Sequence[Any]) -> None:
    """Mark outputs as changed for autograd: its saved versions of them are stale."""
    tensors = [one for one in outputs if one is not None and not one.is_inference()]
    if tensors:
        torch.autograd.graph.increment_version(tensors)
