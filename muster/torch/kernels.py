"""Kernels of an opened registry as torch sees them."""

from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.selection.handles import AnyHandle, NullHandle
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.sites import track_caller
from kernel_muster.torch.open_kernels import OpenKernel, hand_out, next_number, take_back, token_of
from kernel_muster.torch.operators import define
from kernel_muster.torch.weights import Weight, logical_of, weight_of


class Kernels:
    """The lookups of a boot or of an opened registry, with an operator of torch for each contract.

    ``torch.ops.muster.<contract>`` launches kernels looked up here, until :meth:`close` or the end of a ``with`` block.
    Lookups are those of the registry: recorded with the caller's line, and refused at the seal. ``left_out`` holds the
    contracts without an operator, each with the reason.
    """

    def __init__(self, lookups: Lookups) -> None:
        if not isinstance(lookups, Lookups):
            raise UsageError(
                f"Kernels takes lookups, got {type(lookups).__name__}: pass km.open_registry(target) or boot.kernels"
            )
        self._lookups, self._number, self._is_open = lookups, next_number(), True
        self.operators: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        for name, contract in lookups.catalog.contracts.items():
            try:
                self.operators[name] = define(contract)
            except UsageError as error:
                self.left_out[name] = str(error)

    @property
    def target(self) -> Target:
        """The target of selection."""
        return self._lookups.target

    @property
    def lookups(self) -> Lookups:
        """The lookups beneath: levers, layouts, layers' labels."""
        return self._lookups

    @property
    def ordinal(self) -> int | None:
        """The number of the launching device. None on the host."""
        return None if self.target.device is None else self.target.device.ordinal

    @property
    def device(self) -> torch.device:
        """The device of kernels' data. UsageError for a target that is an architecture alone."""
        if self.target.is_cpu:
            return torch.device("cpu")
        if self.target.device is None:
            raise UsageError(f"target {self.target} has no device: open the registry for cuda or cpu")
        return torch.device("cuda", self.target.device.ordinal)

    @track_caller
    def kernel(self, module: str, func: str, **question: str) -> "Kernel":
        """Look up a kernel that the model cannot run without. ``when`` and the other options are those of Lookups."""
        return self.of(self._lookups.kernel(module, func, **question))

    @track_caller
    def try_kernel(self, module: str, func: str, **question: str) -> "Kernel":
        """Look up an optional kernel. It is falsy if absent."""
        return self.of(self._lookups.try_kernel(module, func, **question))

    def of(self, handle: AnyHandle) -> "Kernel":
        """Return a kernel for an existing lookup. UsageError if its contract has no operator."""
        if not self._is_open:
            raise UsageError(f"{handle.key}: these Kernels are closed")
        if isinstance(handle, NullHandle):
            return Kernel(handle, "", None)
        contract: Contract = handle.contract
        if contract.name in self.left_out:
            raise UsageError(f"{handle.key}: {self.left_out[contract.name]}")
        token = token_of(str(handle.key), self._number)
        hand_out(token, OpenKernel(handle, contract.name, self.ordinal))
        return Kernel(handle, token, self.operators[contract.name], self.ordinal is not None)

    def close(self) -> None:
        """Stop all launches of this registry. Captured graphs stay unchanged."""
        self._is_open = False
        take_back(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Kernel:
    """One kernel: called with tensors, it enqueues in torch's current stream. It is falsy if its lookup missed.

    Arguments are those of the contract. A weight comes from :meth:`weight`. In a function traced by ``torch.compile``
    it is the operator that it calls: ``op(..., served_by=token)``.
    """

    def __init__(self, handle: AnyHandle, token: str, op: Any, on_device: bool = False) -> None:
        self.handle, self.token, self.op, self.on_device = handle, token, op, on_device
        self._is_found = bool(handle)

    def __bool__(self) -> bool:
        return self._is_found

    def __repr__(self) -> str:
        return f"<Kernel {self.token or self.handle!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} belongs to a registry of this process: look it up where it is loaded")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch. ContractError names the wrong argument, NullKernelError the reason of a missing kernel."""
        if not self._is_found:
            self.handle(*args, **kwargs)
        given: list[Any] = []
        for value in args:
            if isinstance(value, Weight):
                given += (value.tensors, value.form)
            else:
                given.append(value)
        named: dict[str, Any] = {}
        for name, value in kwargs.items():
            if isinstance(value, Weight):
                named[name], named[f"{name}_form"] = value.tensors, value.form
            else:
                named[name] = value
        self.op(*given, **named, served_by=self.token)

    def weight(self, weight: Any) -> Weight:
        """Return a logical weight in this kernel's layout, in the memory of its arrays: NumPy's, CuPy's or tensors.

        It shares the arrays of a weight that already has the layout. ContractError for a weight that cannot be
        converted, UsageError for one that an operator cannot take.
        """
        return weight_of(self.handle.prepare_weight(logical_of(weight)))
