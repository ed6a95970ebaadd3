"""Handles: what a lookup returns."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

from kernel_muster.registry.contract.arrays import ArrayView, view_of
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.digests import Digests
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import KernelSpec, Provider, Registered
from kernel_muster.registry.errors import ContractError, NullKernelError
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.launch.runners import Launch, LaunchMemory, LaunchOptions, Runner
from kernel_muster.registry.launch.tape import open_tape
from kernel_muster.registry.plugin_code.watch import one_line
from kernel_muster.registry.values import copied


class Gate:
    """Whether the handles of one boot may launch. It closes for good if the boot does not pass."""

    def __init__(self) -> None:
        self._why = ""
        self._launches: WeakSet[Launch] = WeakSet()
        self._lock = threading.Lock()

    def check(self, key: KernelKey) -> None:
        """Raise NullKernelError if the gate is closed."""
        if self._why:
            raise NullKernelError(f"{key} was called, but {self._why}")

    def keep(self, launch: Launch) -> Launch:
        """Remember a prepared launch, which may run without its handle, and return it."""
        if hasattr(launch, "revoke"):
            with self._lock:
                self._launches.add(launch)
        return launch

    def close(self, why: str) -> None:
        """Let no handle launch from now on, nor any launch that is prepared already."""
        self._why = why
        with self._lock:
            for launch in self._launches:
                launch.revoke(f"a prepared launch was called, but {why}")  # type: ignore[attr-defined]


class Handle:
    """A kernel that was found: truthy, and callable with the arguments of its contract."""

    __slots__ = ("_contract", "_gate", "_key", "_provider", "_runner", "_shown", "_spec")

    def __init__(
        self,
        key: KernelKey,
        spec: KernelSpec,
        contract: Contract,
        provider: Provider,
        runner: Runner,
        gate: Gate | None = None,
    ) -> None:
        self._key, self._spec, self._contract, self._provider = key, spec, contract, provider
        self._runner, self._gate = runner, gate or Gate()
        self._shown: tuple[KernelSpec, Contract, Provider] | None = None

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Handle {self._key} by {self._provider}>"

    @property
    def key(self) -> KernelKey:
        """The key that was asked for."""
        return self._key

    @property
    def spec(self) -> KernelSpec:
        """A copy of the spec that serves."""
        return self._copies()[0]

    @property
    def contract(self) -> Contract:
        """A copy of its contract."""
        return self._copies()[1]

    @property
    def provider(self) -> Provider:
        """The distribution and plugin that registered it."""
        return self._copies()[2]

    def is_same_kernel(self, other: "Handle") -> bool:
        """Whether another handle, perhaps of another name, is of the same spec."""
        return other.is_of(self._spec)

    def is_of(self, spec: KernelSpec) -> bool:
        """Whether it was made for exactly this spec, and no copy of it."""
        return self._spec is spec

    def _copies(self) -> tuple[KernelSpec, Contract, Provider]:
        if self._shown is None:
            self._shown = copied((self._spec, self._contract, self._provider))
        return self._shown

    @property
    def weight_layout(self) -> str | None:
        """The layout its weight argument must have; None if it takes no weight."""
        return self._spec.weight_layout

    @property
    def source_sha256(self) -> str:
        """The digest of the source that it was compiled from; of one that is not compiled, of its source as it is now.

        It is empty where the source cannot be read.
        """
        known = self._runner.state(self._spec).source_sha256
        return known or Digests().of(Registered(self._spec, self._provider)).source

    def prepare_weight(self, weight: Any) -> Any:
        """Return a logical weight in this kernel's layout; the logical weight itself is left as it is.

        ContractError says whose ``prepare`` failed, or gave something else; memory that does not suffice stays
        MemoryError.
        """
        layout = self._spec.weight_layout
        if self._spec.prepare is None or getattr(weight, "layout", None) == layout:
            return weight
        whose = f"{self._key}: prepare of {self._provider}"
        try:
            prepared = self._spec.prepare(weight)
            found = _facts(prepared)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # (a plugin's code may raise anything, SystemExit too)
            raise ContractError(f"{whose} failed: {one_line(error)}") from error
        expected = (layout, *_facts(weight)[1:])
        if found != expected:
            what = f"{type(prepared).__name__} with layout, quant and shape {found}"
            raise ContractError(f"{whose} returned {what}, expected {expected}")
        return prepared

    def prepare(self, *args: Any, overlap: bool = False, scratch: Any = None, **kwargs: Any) -> Launch:
        """Check the arguments once and return ``launch(stream=None)``, which only enqueues.

        It holds on to the arguments' memory, not to their values: what they hold when it runs is what counts. An
        empty launch does nothing. With ``overlap`` the kernel may begin while the launch before it on the stream still
        runs (programmatic dependent launch, sm_90 and newer): only where that launch writes no weight of this one.
        ``scratch`` is device memory of at least :meth:`scratch_bytes` that launches on one stream share; without it a
        launch that needs some gets its own. ContractError names what does not fit.
        """
        return self._gate.keep(self._prepared(self._bound(args, kwargs), LaunchOptions(overlap, scratch)))

    def scratch_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Return how many bytes of device memory a launch of these arguments needs besides them; most need none."""
        bound = self._bound(args, kwargs)
        return 0 if bound.is_empty else self._runner.scratch_bytes(str(self._key), self._spec, bound)

    def __call__(self, *args: Any, stream: object | None = None, **kwargs: Any) -> None:
        """Check the arguments and launch; outputs are arguments and nothing is returned.

        Scratch of a launch comes from the memory pool of its stream. While a tape is open, it keeps the launch.
        """
        tape = open_tape()
        bound = self._bound(args, kwargs)
        if tape is None:
            self._prepared(bound, LaunchOptions(stream=stream, is_stream_known=True))(stream)
        elif not bound.is_empty:
            needed = self._runner.scratch_bytes(str(self._key), self._spec, bound)
            with tape.keeping():
                launch = self._gate.keep(self._prepared(bound, LaunchOptions(tape.overlap, tape.scratch(needed))))
            tape.add(launch, is_kernel=True)
            launch(stream)

    def borrow(self, arguments: Sequence[Any], stream: object | None, memory: LaunchMemory) -> Launch:
        """Check the arguments and return a launch for one stream, with scratch and counters from ``memory``.

        It keeps no argument alive: whoever calls it has arguments at the same addresses.
        """
        options = LaunchOptions(stream=stream, is_stream_known=True, memory=memory, is_borrowed=True)
        return self._gate.keep(self._prepared(self._bound(tuple(arguments), {}), options))

    def check(self, arguments: Sequence[Any], view: Callable[[Any], ArrayView] = view_of) -> None:
        """Check arguments against the contract as a call does, and launch nothing; ``view`` looks at arrays."""
        self._bound(tuple(arguments), {}, view)

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], view: Callable[[Any], ArrayView] = view_of
    ) -> Bound:
        self._gate.check(self._key)
        bound = self._contract.signature.bind(str(self._key), args, kwargs, view)
        self._check_layouts(bound.arguments)
        return bound

    def _prepared(self, bound: Bound, options: LaunchOptions) -> Launch:
        if bound.is_empty:
            return _launch_nothing
        return self._runner.prepare(str(self._key), self._spec, bound, options)

    def _check_layouts(self, arguments: dict[str, Any]) -> None:
        wanted = self._spec.weight_layout
        for param in self._contract.signature.weights:
            layout = arguments[param.name].layout
            if wanted is not None and layout != wanted:
                raise ContractError(
                    f"{self._key}: {param.name} has weight layout {layout}, expected {wanted}; "
                    "use handle.prepare_weight"
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
        error = NullKernelError(f"{self.key} was called, but its lookup at {self.site} missed: {self.reason}{waived}")
        error.is_reported = not self.waiver  # the miss is a finding
        raise error

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NullKernelError with key, reason, waiver and dispatch site."""
        self._refuse()

    def check(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NullKernelError."""
        self._refuse()

    def borrow(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NullKernelError."""
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
