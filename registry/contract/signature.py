"""Typed signatures over logical tensors: the parameters of a contract, and the check of real arguments.

Shapes are symbolic. A plain name (``"N"``) is bound by the first argument that has it; an expression (``"K/16"``,
``"2*I"``) is evaluated after that and must divide exactly.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Literal, get_args

import numpy as np
from kernel_muster.registry.contract.arrays import ArrayView, view_of
from kernel_muster.registry.contract.dtypes import DTYPE_NAMES, numpy_dtype, unknown_dtype
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.values import frozen

Role = Literal["in", "out", "inout"]
Dim = str | int

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_ALLOWED = (ast.Name, ast.Constant, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Load)


def evaluate_dim(dim: Dim, dims: Mapping[str, int]) -> int:
    """Return the value of a dimension; KeyError names an unbound symbol, ValueError an inexact division."""
    if isinstance(dim, int):
        return dim
    # Most are plain names, and every argument of every call asks.
    return dims[dim] if dim in dims else _evaluate(_parse(dim), dims)


@cache
def _parse(dim: str) -> ast.expr:
    tree = ast.parse(dim, mode="eval").body
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError("a dimension is made of names, integers and + - * /")
    return tree


def _evaluate(node: ast.AST, dims: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return dims[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, dims), _evaluate(node.right, dims)
        if isinstance(node.op, ast.Div):
            if right == 0 or left % right:
                raise ValueError(f"{left} is not a multiple of {right}")
            return left // right
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{ast.unparse(node)} is no integer")


def dim_symbols(dim: Dim) -> set[str]:
    """Return the names that a dimension uses; SyntaxError or ValueError if it is malformed."""
    if isinstance(dim, int):
        return set()
    return {node.id for node in ast.walk(_parse(dim)) if isinstance(node, ast.Name)}


@frozen
class TensorParam:
    """An array argument: ``dtype`` is a name of ``registry.dtypes`` (or several: ``bf16|f32``), last axis contiguous.

    A kernel writes ``out`` and ``inout`` arguments; nothing is returned. ``None`` is allowed where ``optional``.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    role: Role = "in"
    optional: bool = False


@frozen
class WeightParam:
    """A logical weight ``(N, K)`` in one of the layouts that kernels prepare for themselves.

    The argument is an object with ``layout`` (a name) and ``shape``; experts put ``E`` in front: ``(E, N, K)``.
    """

    name: str
    quant: Literal["nvfp4", "bf16"]
    shape: tuple[Dim, ...]


@frozen
class ScalarParam:
    """A Python number, converted to the declared type; an integer also binds the dimension of its name.

    ``minimum`` is the smallest value allowed; NaN is below every minimum.
    """

    name: str
    dtype: str
    minimum: float | None = None


Param = TensorParam | WeightParam | ScalarParam


@frozen
class Bound:
    """Arguments that fit a signature, and the dimensions they bound."""

    arguments: dict[str, Any]
    dims: dict[str, int]
    views: dict[str, ArrayView]
    is_empty: bool  # no output has an element: nothing to launch
    outputs: tuple[TensorParam, ...] = ()


@frozen
class Signature:
    """The parameters of a contract, in call order, with its further constraints.

    ``multiples`` are ``(expression, divisor)``: ``("K", 16)`` says that K is a multiple of 16. ``limits`` are
    ``(expression, largest)``: ``("M", 8)`` says that there are at most 8 rows.
    """

    params: tuple[Param, ...]
    multiples: tuple[tuple[Dim, Dim], ...] = ()
    limits: tuple[tuple[Dim, Dim], ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in call order."""
        return tuple(param.name for param in self.params)

    @cached_property
    def outputs(self) -> tuple[TensorParam, ...]:
        """The parameters that a kernel writes."""
        return tuple(p for p in self.params if isinstance(p, TensorParam) and p.role != "in")

    @cached_property
    def weights(self) -> tuple[WeightParam, ...]:
        """The parameters that are weights."""
        return tuple(p for p in self.params if isinstance(p, WeightParam))

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The names that shapes, multiples and limits use."""
        shapes = [param.shape for param in self.params if not isinstance(param, ScalarParam)]
        dims = (dim for part in (*shapes, *self.multiples, *self.limits) for dim in part)
        return frozenset(name for dim in dims for name in dim_symbols(dim))

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        shapes = [(p.name, p.shape) for p in self.params if not isinstance(p, ScalarParam)]
        if texts := [(name, shape) for name, shape in shapes if isinstance(shape, str)]:
            # each of its letters would count as a dimension
            return [f"{name}: shape is {shape!r}, expected a tuple: ({shape!r},)" for name, shape in texts]
        found = [f"two parameters are called {n!r}" for n in sorted(set(self.names)) if self.names.count(n) > 1]
        bound = {param.name for param in self.params if isinstance(param, ScalarParam)}
        for param in self.params:
            shape = () if isinstance(param, ScalarParam) else param.shape
            bound.update(dim for dim in shape if isinstance(dim, str) and dim.isidentifier())
        for param in self.params:
            if isinstance(param, TensorParam) and param.role not in get_args(Role):
                found.append(f"{param.name}: role is {param.role!r}, expected {', '.join(get_args(Role))}")
            for dtype in () if isinstance(param, WeightParam) else param.dtype.split("|"):
                if dtype not in DTYPE_NAMES:
                    found.append(f"{param.name}: {unknown_dtype(dtype)}")
            for dim in () if isinstance(param, ScalarParam) else param.shape:
                found.extend(_dim_problems(param.name, dim, bound))
        for label, rules in (("multiples", self.multiples), ("limits", self.limits)):
            for dim in (dim for rule in rules for dim in rule):
                found.extend(_dim_problems(label, dim, bound))
        if not self.outputs:
            found.append("no parameter is an output")
        return found

    def bind(
        self,
        owner: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        view: Callable[[Any], ArrayView] = view_of,
    ) -> Bound:
        """Match arguments to parameters and check every one; ContractError names what does not fit.

        ``view`` is how arrays are looked at: a tracing compiler's have no memory.
        """
        arguments = self._by_name(owner, args, kwargs)
        dims: dict[str, int] = {}
        views: dict[str, ArrayView] = {}
        for param in self.params:
            value = arguments[param.name]
            if isinstance(param, ScalarParam):
                arguments[param.name] = scalar = _scalar(owner, param, value)
                if np.issubdtype(scalar.dtype, np.integer):
                    size = dims.setdefault(param.name, int(scalar))
                    if size != int(scalar):
                        raise ContractError(f"{owner}: {param.name} is {int(scalar)}, and the arrays have {size}")
            elif value is None and isinstance(param, TensorParam) and param.optional:
                continue
            elif isinstance(param, TensorParam):
                views[param.name] = _check_tensor(owner, param, value, dims, view)
            else:
                _check_weight(owner, param, value, dims)
        for param in self.params:
            if not isinstance(param, ScalarParam) and arguments[param.name] is not None:
                _check_shape(owner, param, tuple(arguments[param.name].shape), dims)
        for expression, divisor in self.multiples:
            value, step = evaluate_dim(expression, dims), evaluate_dim(divisor, dims)
            if step <= 0 or value % step:
                raise ContractError(f"{owner}: {expression} is {value}, expected a multiple of {_eq(divisor, step)}")
        for expression, largest in self.limits:
            value, most = evaluate_dim(expression, dims), evaluate_dim(largest, dims)
            if value > most:
                raise ContractError(f"{owner}: {expression} is {value}, expected at most {_eq(largest, most)}")
        is_empty = all(views[param.name].size == 0 for param in self.outputs if param.name in views)
        return Bound(arguments, dims, views, is_empty, self.outputs)

    def _by_name(self, owner: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.names):
            raise ContractError(
                f"{owner}: takes {len(self.names)} arguments ({', '.join(self.names)}), got {len(args)}"
            )
        arguments = dict(zip(self.names, args, strict=False))
        if doubled := sorted(arguments.keys() & kwargs.keys()):
            raise ContractError(f"{owner}: {', '.join(doubled)} given by position and by name")
        if unknown := sorted(kwargs.keys() - set(self.names)):
            raise ContractError(f"{owner}: no parameter {', '.join(unknown)}; takes {', '.join(self.names)}")
        arguments.update(kwargs)
        for param in self.params:
            if isinstance(param, TensorParam) and param.optional:
                arguments.setdefault(param.name, None)
        if missing := [name for name in self.names if name not in arguments]:
            raise ContractError(f"{owner}: missing {', '.join(missing)}; takes {', '.join(self.names)}")
        return arguments


def _dim_problems(name: str, dim: Dim, bound: set[str]) -> list[str]:
    try:
        unbound = dim_symbols(dim) - bound
    except (SyntaxError, ValueError) as error:
        return [f"{name}: malformed dimension {dim!r}: {error}"]
    return [f"{name}: dimension {dim!r} uses {', '.join(sorted(unbound))}, which nothing binds"] if unbound else []


def _scalar(owner: str, param: ScalarParam, value: Any) -> Any:
    """Convert to the declared type; a value that it cannot hold is refused, never wrapped."""
    dtype = numpy_dtype(param.dtype)
    if not _is_number(value, whole=dtype.kind in "iu"):
        raise ContractError(f"{owner}: {param.name} is {value!r}, expected a number of type {param.dtype}")
    if param.minimum is not None and not value >= param.minimum:
        raise ContractError(f"{owner}: {param.name} is {value!r}, expected at least {param.minimum}")
    try:
        with np.errstate(over="raise"):
            return dtype.type(int(value) if dtype.kind in "iu" else value)
    except (OverflowError, FloatingPointError):
        raise ContractError(f"{owner}: {param.name} is {value!r}, out of range for {param.dtype}") from None


def _is_number(value: Any, whole: bool) -> bool:
    if not isinstance(value, int | float | np.generic) or isinstance(value, np.flexible | np.complexfloating):
        return False
    if isinstance(value, np.datetime64 | np.timedelta64):
        return False
    try:
        return not whole or bool(value == int(value))
    except (ValueError, OverflowError):  # NaN, infinity
        return False


def _check_tensor(
    owner: str, param: TensorParam, value: Any, dims: dict[str, int], look: Callable[[Any], ArrayView]
) -> ArrayView:
    try:
        view = look(value)
    except ContractError as error:
        raise ContractError(f"{owner}: {param.name} {error}, expected an array of {param.dtype}") from None
    if view.dtype not in [numpy_dtype(dtype) for dtype in param.dtype.split("|")]:
        raise ContractError(f"{owner}: {param.name} has dtype {view.dtype}, expected {param.dtype}")
    if view.size and view.shape and view.shape[-1] > 1 and view.strides[-1] != view.dtype.itemsize:
        raise ContractError(f"{owner}: {param.name} has strides {view.strides}, expected a contiguous last axis")
    if param.role != "in" and not view.is_writable:
        raise ContractError(f"{owner}: {param.name} is read-only, expected an array to write")
    _bind_names(owner, param, view.shape, dims)
    return view


def _check_weight(owner: str, param: WeightParam, value: Any, dims: dict[str, int]) -> None:
    if not all(hasattr(value, name) for name in ("layout", "quant", "shape")):
        raise ContractError(
            f"{owner}: {param.name} is {type(value).__name__}, expected a prepared {param.quant} weight"
        )
    if value.quant != param.quant:
        raise ContractError(f"{owner}: {param.name} is quantised as {value.quant}, expected {param.quant}")
    _bind_names(owner, param, tuple(value.shape), dims)


def _bind_names(owner: str, param: TensorParam | WeightParam, shape: tuple[int, ...], dims: dict[str, int]) -> None:
    if len(shape) != len(param.shape):
        raise ContractError(f"{owner}: {param.name} has shape {shape}, expected {_text(param.shape)}")
    for dim, size in zip(param.shape, shape, strict=True):
        if isinstance(dim, str) and dim.isidentifier():
            dims.setdefault(dim, size)


def _check_shape(owner: str, param: TensorParam | WeightParam, shape: tuple[int, ...], dims: dict[str, int]) -> None:
    try:
        expected = tuple(evaluate_dim(dim, dims) for dim in param.shape)
    except KeyError as error:
        raise ContractError(f"{owner}: {param.name}: no argument bound dimension {error}") from None
    except ValueError as error:
        raise ContractError(f"{owner}: {param.name}: expected {_text(param.shape)}, but {error}") from None
    if shape != expected:
        raise ContractError(f"{owner}: {param.name} has shape {shape}, expected {_text(param.shape)} = {expected}")


def _eq(dim: Dim, value: int) -> str:
    return f"{dim} = {value}" if isinstance(dim, str) else str(value)


def _text(shape: Sequence[Dim]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
