"""Weights as arguments of operators: the tensors of a prepared weight, and a text with the rest of it.

A schema knows tensors, numbers and text. A weight is an object of any plugin's class. Its arrays become tensors, so
torch sees all reads of an operator. Everything else becomes its *form*: one text for one combination of class and
values. The form leads back to the class only in a process that has seen such a weight.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.values import frozen
from kernel_muster.torch.arrays import host_array, is_array, prepared_array, tensor_of


@frozen
class _Form:
    """The content of a form: a class, its values other than arrays, and the names of its arrays."""

    kind: type
    values: dict[str, Any]
    names: tuple[str, ...]
    layout: str
    quant: str
    shape: tuple[int, ...]


_FORMS: dict[str, _Form] = {}
_LOCK = threading.Lock()


@frozen
class Weight:
    """A prepared weight as an operator's argument. ``form`` holds class, layout, shape and numeric scales."""

    tensors: tuple[torch.Tensor, ...]
    form: str

    @property
    def layout(self) -> str:
        """The layout for kernels of this weight."""
        return form_of("weight", self.form).layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape ``(..., N, K)``."""
        return form_of("weight", self.form).shape


def weight_of(prepared: Any) -> Weight:
    """Return a prepared weight, an object with ``layout``, ``quant`` and ``shape``, as an operator's argument.

    The arrays are shared. UsageError for a class with other values than a form can hold.
    """
    kind = type(prepared)
    whole = f"{kind.__module__}.{kind.__qualname__}"
    if not all(hasattr(prepared, name) for name in ("layout", "quant", "shape")) or not hasattr(prepared, "__dict__"):
        raise UsageError(f"weight is {whole}, expected a weight in a kernel's layout: use Kernel.weight")
    arrays: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in vars(prepared).items():
        if is_array(value) and value.shape != ():
            arrays[name] = tensor_of(value)
        else:
            values[name] = np.asarray(float(value), np.float32) if is_array(value) else value
    shown = ", ".join(f"{name}={_text(whole, name, value)}" for name, value in values.items())
    text = f"{whole}({shown}) of {', '.join(f'{name} {list(one.shape)}' for name, one in arrays.items())}"
    form = _Form(kind, values, tuple(arrays), prepared.layout, prepared.quant, tuple(map(int, prepared.shape)))
    with _LOCK:
        _FORMS.setdefault(text, form)
    return Weight(tuple(arrays.values()), text)


def _text(whole: str, name: str, value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{float(value).hex()}"
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, int | str):
        return repr(value)
    if isinstance(value, tuple) and all(isinstance(one, int | str) for one in value):
        return repr(tuple(value))
    raise UsageError(f"{whole} has {name} of type {type(value).__name__}, expected arrays, numbers, text and tuples")


def form_of(owner: str, text: str) -> _Form:
    """Return the content of a form's text. UsageError if this process has made no such weight."""
    form = _FORMS.get(text)
    if form is None:
        raise UsageError(f"{owner}: no weight of form {text!r} was made in this process: make it with Kernel.weight")
    return form


def rebuilt(owner: str, tensors: Sequence[torch.Tensor], text: str, on_host: bool) -> Any:
    """Return the weight as its kernel knows it, of NumPy views on the host and of the tensors themselves elsewhere."""
    form = form_of(owner, text)
    if len(tensors) != len(form.names):
        raise UsageError(f"{owner}: a weight has {len(tensors)} tensors, expected {', '.join(form.names)}")
    made: Any = object.__new__(form.kind)
    held = made.__dict__
    held.update(form.values)
    for name, tensor in zip(form.names, tensors, strict=True):
        held[name] = host_array(tensor) if on_host else tensor
    return made


def logical_of(weight: Any) -> Any:
    """Return a weight with arrays in place of tensors, for ``prepare`` of a kernel. A weight of arrays is unchanged."""
    held = vars(weight)
    if not any(isinstance(value, torch.Tensor) for value in held.values()):
        return weight
    made: Any = object.__new__(type(weight))
    for name, value in held.items():
        made.__dict__[name] = _array(value) if isinstance(value, torch.Tensor) else value
    return made


def _array(tensor: torch.Tensor) -> Any:
    return np.asarray(tensor.item(), np.float32) if tensor.dim() == 0 else prepared_array(tensor)
