"""Handles: what a lookup returns."""

from typing import Any, NoReturn

from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import KernelSpec, Provider
from kernel_muster.registry.errors import ContractError, NullKernelError
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.launch.runners import Launch, LaunchOptions, Runner
from kernel_muster.registry.launch.tape import open_tape
from kernel_muster.registry.plugin_code.watch import one_line


class Handle:
    """A kernel that was found: truthy, and callable with the arguments of its contract."""

    __slots__ = ("_runner", "contract", "key", "provider", "spec")

    def __init__(
        self, key: KernelKey, spec: KernelSpec, contract: Contract, provider: Provider, runner: Runner
    ) -> None:
        self.key, self.spec, self.contract, self.provider, self._runner = key, spec, contract, provider, runner

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Handle {self.key} by {self.provider}>"

    @property
    def weight_layout(self) -> str | None:
        """The layout its weight argument must have; None if it takes no weight."""
        return self.spec.weight_layout

    def prepare_weight(self, weight: Any) -> Any:
        """Return a logical weight in this kernel's layout; the logical weight itself is left as it is.

        ContractError says whose ``prepare`` failed, or gave something else; memory that does not suffice stays
        MemoryError.
        """
        if self.spec.prepare is None or getattr(weight, "layout", None) == self.spec.weight_layout:
            return weight
        try:
            prepared = self.spec.prepare(weight)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # (a plugin's code may raise anything, SystemExit too)
            raise ContractError(f"{self.key}: prepare of {self.provider} failed: {one_line(error)}") from error
        _, quant, shape = _facts(weight)
        if _facts(prepared) != (self.spec.weight_layout, quant, shape):
            raise ContractError(
                f"{self.key}: prepare of {self.provider} returned {type(prepared).__name__} with layout, quant and "
                f"shape {_facts(prepared)}, expected {(self.spec.weight_layout, quant, shape)}"
            )
        return prepared

    def prepare(self, *args: Any, overlap: bool = False, scratch: Any = None, **kwargs: Any) -> Launch:
        """Check the arguments once and return ``launch(stream=None)``, which only enqueues.

        It holds on to the arguments' memory, not to their values: what they hold when it runs is what counts. An
        empty launch does nothing. With ``overlap`` the kernel may begin while the launch before it on the stream still
        runs (programmatic dependent launch, sm_90 and newer): only where that launch writes no weight of this one.
        ``scratch`` is device memory of at least :meth:`scratch_bytes` that launches on one stream share; without it a
        launch that needs some gets its own. ContractError names what does not fit.
        """
        return self._prepared(self._bound(args, kwargs), LaunchOptions(overlap, scratch))

    def scratch_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Return how many bytes of device memory a launch of these arguments needs besides them; most need none."""
        bound = self._bound(args, kwargs)
        return 0 if bound.is_empty else self._runner.scratch_bytes(str(self.key), self.spec, bound)

    def __call__(self, *args: Any, stream: object | None = None, **kwargs: Any) -> None:
        """Check the arguments and launch; outputs are arguments and nothing is returned.

        Scratch of a launch comes from the memory pool of its stream. While a tape is open, it keeps the launch.
        """
        tape = open_tape()
        bound = self._bound(args, kwargs)
        if tape is None:
            self._prepared(bound, LaunchOptions(stream=stream, is_stream_known=True))(stream)
        elif not bound.is_empty:
            needed = self._runner.scratch_bytes(str(self.key), self.spec, bound)
            with tape.keeping():
                launch = self._prepared(bound, LaunchOptions(tape.overlap, tape.scratch(needed)))
            tape.add(launch, is_kernel=True)
            launch(stream)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        bound = self.contract.signature.bind(str(self.key), args, kwargs)
        self._check_layouts(bound.arguments)
        return bound

    def _prepared(self, bound: Bound, options: LaunchOptions) -> Launch:
        if bound.is_empty:
            return _launch_nothing
        return self._runner.prepare(str(self.key), self.spec, bound, options)

    def _check_layouts(self, arguments: dict[str, Any]) -> None:
        wanted = self.spec.weight_layout
        for param in self.contract.signature.weights:
            layout = arguments[param.name].layout
            if wanted is not None and layout != wanted:
                raise ContractError(
                    f"{self.key}: {param.name} has weight layout {layout}, expected {wanted}; use handle.prepare_weight"
                )


def _facts(weight: Any) -> tuple[str | None, ...]:
    """Return layout, quantisation and shape, as text: what a plugin gives may be anything."""
    found = (getattr(weight, name, None) for name in ("layout", "quant", "shape"))
    return tuple(None if fact is None else str(fact) for fact in found)


def _launch_nothing(stream: object | None = None) -> None:
    """Launch nothing: no output has an element."""


class NullHandle:
    """A lookup that missed: falsy, and it raises when called."""

    __slots__ = ("key", "reason", "site", "waiver")

    contract = None
    spec = None
    weight_layout = None

    def __init__(self, key: KernelKey, reason: str, site: str, waiver: str = "") -> None:
        self.key, self.reason, self.site, self.waiver = key, reason, site, waiver

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<NullHandle {self.key}: {self.reason}>"

    def _refuse(self) -> NoReturn:
        waived = f"; waived: {self.waiver}" if self.waiver else ""
        raise NullKernelError(f"{self.key} was called, but its lookup at {self.site} missed: {self.reason}{waived}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NullKernelError with key, reason, waiver and dispatch site."""
        self._refuse()

    def prepare(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NullKernelError."""
        self._refuse()

    def scratch_bytes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NullKernelError."""
        self._refuse()

    def prepare_weight(self, weight: Any) -> NoReturn:
        """Raise NullKernelError."""
        self._refuse()


AnyHandle = Handle | NullHandle
