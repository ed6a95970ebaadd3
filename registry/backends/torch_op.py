"""Operators of torch as kernels: those of a compiled extension, or of a package for Hugging Face ``kernels``.

Nothing is compiled here: the operator is there once its module is imported. Torch is imported where one is launched.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Protocol, TypeGuard

import numpy as np
from kernel_muster.registry.backends.request import BuildFailure
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import Backend, has_member
from kernel_muster.registry.errors import ContractError, MusterError
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line
from kernel_muster.registry.values import frozen

_OP = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
_INSTALL = "install kernel-muster[torch]"
# What torch calls the types that NumPy has no carrier of its own for; it reads their bits as the first.
_BITS = {"bfloat16": ("int16", "bfloat16"), "float8_e4m3fn": ("uint8", "float8_e4m3fn")}

#: ``adapter(op, arguments)`` calls the operator; ``arguments`` are tensors, weights and numbers by name.
Adapter = Callable[[Any, Mapping[str, Any]], object]


class CalledBackend(Backend, Protocol):
    """A backend whose code is there already, and which is called on a device: it is loaded, and never compiled."""

    @property
    def strided(self) -> frozenset[str]:
        """Parameters that may have gaps between rows; all others are contiguous."""

    def load(self) -> str:
        """Return what the code comes from, as reports name it; BuildFailure where it cannot be loaded."""

    def prepare(self, bound: Bound, ordinal: int) -> Callable[[int], object]:
        """Return a call with checked arguments that takes the pointer of a stream and enqueues there."""


def is_called_backend(backend: Backend) -> TypeGuard[CalledBackend]:
    """Whether a backend is called on a device."""
    return has_member(backend, "load") and has_member(backend, "prepare")


@frozen
class TorchOpKernel:
    """An operator of torch, ``namespace::name`` or ``namespace::name.overload``, under a key.

    It takes the contract's parameters in order and writes its outputs into arguments that its schema declares as
    written. Any other operator needs an ``adapter``. ``module`` defines it when it is imported. ``packages`` are the
    distributions whose code it is: their versions and files are its source. It runs on a device, in the stream of the
    launch; :meth:`on_host` is the same for ``cpu``. ``strided`` names parameters whose rows may have gaps.
    """

    op: str
    packages: tuple[str, ...]
    module: str = ""
    adapter: Adapter | None = None
    strided: frozenset[str] = frozenset()
    name: str = "torch_op"

    def problems(self) -> list[str]:
        """Say what is malformed, all at once."""
        found = []
        if not isinstance(self.op, str) or not _OP.fullmatch(self.op):
            found.append(f"op is {self.op!r}, expected namespace::name")
        if not isinstance(self.packages, tuple) or not self.packages:
            found.append(f"packages is {self.packages!r}, expected a tuple of the distributions that ship the operator")
        if self.adapter is not None and not callable(self.adapter):
            found.append(f"adapter is {self.adapter!r}, expected a function of the operator and its arguments")
        return found

    @property
    def source_sha256(self) -> str:
        """The digest of the operator's name, and of version and file list of each distribution."""
        digest = hashlib.sha256(self.op.encode())
        for name in self.packages:
            try:
                found = distribution(name)
            except PackageNotFoundError:
                raise MusterError(f"{self.op}: the distribution {name} is not installed") from None
            digest.update(f"\0{name}=={found.version}\0{found.read_text('RECORD') or ''}".encode())
        return digest.hexdigest()

    def load(self) -> str:
        """Import what defines the operator, and find it; BuildFailure says why there is none."""
        self._operator()
        return f"torch {import_module('torch').__version__}"

    def on_host(self) -> "TorchOpOnHost":
        """Return the same operator for archs ``cpu``: it computes on the memory of NumPy arrays."""
        given = (self.op, self.packages, self.module, self.adapter, self.strided, self.name)
        return TorchOpOnHost(*given)

    def prepare(self, bound: Bound, ordinal: int) -> Callable[[int], object]:
        """Return a call with checked arguments that enqueues in a stream of a device; ContractError as for a call."""
        torch = import_module("torch")
        views = {name: _device_tensor(torch, view, ordinal) for name, view in bound.views.items()}
        arguments = {name: views.get(name, _number(value)) for name, value in bound.arguments.items()}
        self._check(arguments, {param.name for param in bound.outputs})

        def launch(stream: int) -> None:
            same = torch.cuda.current_stream(ordinal).cuda_stream == stream
            context = nullcontext() if same else torch.cuda.stream(torch.cuda.ExternalStream(stream, ordinal))
            with torch.cuda.device(ordinal), context:
                self._call(arguments)

        return launch

    def _check(self, arguments: Mapping[str, Any], outputs: Collection[str] | None) -> None:
        """Raise ContractError where the operator does not take a contract's arguments, or does not write its outputs.

        Without the names of the outputs it must write some argument.
        """
        if self.adapter is not None:
            return
        declared = self._operator()._schema.arguments  # noqa: SLF001
        if len(declared) < len(arguments):
            raise ContractError(f"{self.op}: takes {len(declared)} arguments, the contract has {', '.join(arguments)}")
        for (name, value), its in zip(arguments.items(), declared, strict=False):
            if hasattr(value, "layout") and hasattr(value, "quant"):
                raise ContractError(f"{self.op}: {name} is a weight, which no schema has: give an adapter")
            writes = its.alias_info is not None and its.alias_info.is_write
            if outputs is not None and writes != (name in outputs):
                does = "writes" if writes else "does not write"
                raise ContractError(f"{self.op}: its schema {does} {its.name}, which stands for {name}")
        if not any(its.alias_info is not None and its.alias_info.is_write for its in declared):
            raise ContractError(f"{self.op}: its schema writes no argument: give an adapter that writes the outputs")

    def _call(self, arguments: Mapping[str, Any]) -> None:
        torch, operator = import_module("torch"), self._operator()
        with torch.no_grad():
            if self.adapter is not None:
                self.adapter(operator, arguments)
            else:
                operator(*arguments.values())

    def _operator(self) -> Any:
        try:
            torch = import_module("torch")
        except Exception as error:
            why = f"{self.op}: torch cannot be imported: {one_line(error)}"
            raise BuildFailure("TOOLCHAIN_MISSING", why, remedies=(_INSTALL,)) from error
        namespace, _, name = self.op.partition("::")
        name, _, overload = name.partition(".")
        try:
            if self.module:
                import_module(self.module)
            return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # (a plugin's module may raise anything, SystemExit too)
            where = f", which {self.module} was to define" if self.module else ": name the module that defines it"
            why = f"torch has no operator {self.op}{where}: {one_line(error)}"
            raise BuildFailure("LOAD_FAILED", why, cause_chain(error)) from error


@frozen
class TorchOpOnHost(TorchOpKernel):
    """An operator of torch that runs in this process."""

    def launch(self, arguments: dict[str, Any], dims: dict[str, int], stream: object | None) -> None:
        """Call it on tensors that share the memory of the arrays."""
        tensors = {name: _host_tensor(value) for name, value in arguments.items()}
        self._check(tensors, None)
        self._call(tensors)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _host_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return _number(value)
    torch = import_module("torch")
    if value.dtype.name in _BITS:
        bits, name = _BITS[value.dtype.name]
        return torch.from_numpy(value.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(value)


class _Seen:
    """A view of device memory as others import it, without a copy."""

    def __init__(self, view: ArrayView) -> None:
        bits = np.dtype(_BITS[view.dtype.name][0]) if view.dtype.name in _BITS else view.dtype
        self._owner = view.owner
        self.__cuda_array_interface__ = {
            "data": (view.pointer, False),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": bits.str,
            "version": 3,
        }


def _device_tensor(torch: Any, view: ArrayView, ordinal: int) -> Any:
    """Return a tensor over the memory of a view."""
    if type(view.owner).__module__.partition(".")[0] == "torch":
        return view.owner
    if view.size == 0:
        name = _BITS[view.dtype.name][1] if view.dtype.name in _BITS else view.dtype.name.removesuffix("_")
        return torch.empty(view.shape, dtype=getattr(torch, name), device=f"cuda:{ordinal}")
    tensor = torch.as_tensor(_Seen(view), device=f"cuda:{ordinal}")
    return tensor.view(getattr(torch, _BITS[view.dtype.name][1])) if view.dtype.name in _BITS else tensor
