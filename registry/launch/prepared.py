"""Prepared launches: one call of the driver with everything but its stream in place."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, Protocol

from kernel_muster.registry.backends.cuda_kernel import LaunchPlan
from kernel_muster.registry.backends.request import INTEGERS, PARAMETER_TYPES, Built, EntryPoint
from kernel_muster.registry.contract.arrays import ArrayView, stream_pointer
from kernel_muster.registry.errors import ContractError, MusterError
from kernel_muster.registry.launch.runners import refuse_launch
from kernel_muster.registry.launch.workspace import Counters, Places, Scratch, TensorMap, encode_tensor_map

_CTYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64,
    "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "f32": ctypes.c_float, "f64": ctypes.c_double, "bool": ctypes.c_bool,
}  # fmt: skip


class LaunchFailed(MusterError):
    """The driver refused a launch."""


def bindings() -> Any:
    """Return the driver's bindings, which are imported late."""
    from cuda.bindings import driver

    return driver


def checked(result: tuple[Any, ...], what: str) -> Any:
    """Return what a call of the driver gave; LaunchFailed names its error."""
    status, *values = result
    if int(status) != 0:
        raise LaunchFailed(f"{what}: {status.name}")
    return values[0] if values else None


class LoadedModule(Protocol):
    """Machine code on a device: its build, its entry points, and the driver's functions by name."""

    @property
    def built(self) -> Built:
        """What was loaded."""

    @property
    def entries(self) -> Mapping[str, EntryPoint]:
        """The declared entry points."""

    @property
    def functions(self) -> Mapping[str, Any]:
        """The driver's functions."""


class PreparedLaunch:
    """One launch with everything but its stream in place. Calling it only enqueues."""

    __slots__ = ("__weakref__", "_config", "_function", "_keep", "_launch", "_params", "_stream", "owner")

    def __init__(self, owner: str, module: LoadedModule, plan: LaunchPlan, places: Places, *, overlap: bool) -> None:
        driver = bindings()
        entry = module.entries[plan.entry]
        self.owner = owner
        self._function = module.functions[entry.name]
        self._launch = driver.cuLaunchKernelEx
        arguments = [places.pointers[value] if isinstance(value, Scratch | Counters) else value
                     for value in plan.arguments]  # fmt: skip
        values = [_value(owner, entry, kind, value) for kind, value in zip(entry.parameters, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(_address(value) for value in values))
        self._params = ctypes.addressof(pointers)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
        block = plan.block or (module.built.entries[entry.name].max_threads or 0, 1, 1)
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = plan.dynamic_shared_bytes
        attributes = _attributes(driver, plan, overlap)
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._config = config
        self._stream: object = self  # no stream yet
        self._keep: tuple[Any, ...] = (module, values, pointers, plan.arguments, attributes, places)

    def let_go(self) -> None:
        """Keep the arguments' memory no longer: whoever calls this keeps it."""
        module, values, pointers, _, attributes, places = self._keep
        self._keep = (module, values, pointers, (), attributes, places)

    @property
    def owns_memory(self) -> bool:
        """Whether scratch or counters are among what it keeps: they must live as long as it may run."""
        return bool(self._keep[-1].owners)

    def __call__(self, stream: object | None = None) -> None:
        """Enqueue; LaunchFailed names what the driver says."""
        if stream is None or stream is not self._stream:
            self._config.hStream = bindings().CUstream(stream_pointer(stream))
            self._stream = stream
        (status,) = self._launch(self._config, self._function, self._params, 0)
        if status:
            raise LaunchFailed(f"{self.owner}: {status.name}")

    def revoke(self, why: str) -> None:
        """Raise NullKernelError from now on."""
        self._launch = refuse_launch(why)


class CalledLaunch:
    """A call of code that enqueues by itself, with everything but its stream in place."""

    __slots__ = ("__weakref__", "_call")

    def __init__(self, call: Callable[[int], object]) -> None:
        self._call = call

    def __call__(self, stream: object | None = None) -> None:
        """Enqueue."""
        self._call(stream_pointer(stream))

    def revoke(self, why: str) -> None:
        """Raise NullKernelError from now on."""
        self._call = refuse_launch(why)


class InOrder:
    """Several launches that follow each other on one stream."""

    __slots__ = ("__weakref__", "_launches")

    def __init__(self, launches: Sequence[PreparedLaunch]) -> None:
        self._launches = launches

    def let_go(self) -> None:
        """Keep the arguments' memory no longer."""
        for launch in self._launches:
            launch.let_go()

    @property
    def owns_memory(self) -> bool:
        """Whether one of them does."""
        return any(launch.owns_memory for launch in self._launches)

    def __call__(self, stream: object | None = None) -> None:
        """Enqueue all."""
        for launch in self._launches:
            launch(stream)

    def revoke(self, why: str) -> None:
        """Raise NullKernelError from now on."""
        for launch in self._launches:
            launch.revoke(why)


def _value(owner: str, entry: EntryPoint, kind: str, value: Any) -> Any:
    """Coerce one argument to its declared C type; ContractError for an integer that it does not hold: ctypes wraps."""
    if kind == "ptr":
        return ctypes.c_uint64(value.pointer if isinstance(value, ArrayView) else _whole(owner, entry, kind, value))
    if kind in INTEGERS:
        return _CTYPES[kind](_whole(owner, entry, kind, value))
    if isinstance(value, TensorMap) and kind == "tensormap":
        return encode_tensor_map(owner, value)
    if kind not in _CTYPES:
        raise MusterError(f"{owner}: {entry.name} has a parameter of type {kind} ({PARAMETER_TYPES[kind].size} bytes)")
    return _CTYPES[kind](value)


def _whole(owner: str, entry: EntryPoint, kind: str, value: Any) -> int:
    """Return an integer that a parameter holds."""
    fits = INTEGERS["u64" if kind == "ptr" else kind]
    try:
        number = int(value) if kind == "ptr" else index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or number not in fits:
        what = f"an integer from {fits.start} to {fits.stop - 1}"
        raise ContractError(f"{owner}: {entry.name} is given {value!r} for a parameter of type {kind}, expected {what}")
    return number


def _address(value: Any) -> int:
    """Return where a coerced argument lies: a C value of ours, or an object of the driver's bindings."""
    return int(value.getPtr()) if hasattr(value, "getPtr") else ctypes.addressof(value)


def _attributes(driver: Any, plan: LaunchPlan, overlap: bool) -> list[Any]:
    attributes = []
    if plan.cluster is not None:
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = plan.cluster
        attributes.append(cluster)
    if overlap:
        programmatic = driver.CUlaunchAttribute()
        programmatic.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        programmatic.value.programmaticStreamSerializationAllowed = 1
        attributes.append(programmatic)
    return attributes
