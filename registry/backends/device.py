"""Devices: build, load and launch compiled kernels of one boot.

Loading and launching go through ``cuda.bindings``; CuPy holds the context, memory and streams.
"""

import contextlib
import ctypes
import threading
from concurrent.futures import Future
from typing import Any

from kernel_muster.registry.arch import Arch
from kernel_muster.registry.arrays import ArrayView, stream_pointer
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cuda_kernel import LaunchPlan, is_device_backend
from kernel_muster.registry.backends.pool import BuildPool, Outcome
from kernel_muster.registry.backends.request import PARAMETER_TYPES, BuildFailure, BuildRequest, Built, EntryPoint
from kernel_muster.registry.backends.workspace import (
    Counters,
    Places,
    Scratch,
    TensorMap,
    encode_tensor_map,
    place_workspace,
    regions_of,
)
from kernel_muster.registry.errors import ContractError, MusterError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.running import BuildState, Launch, LaunchOptions, Progress
from kernel_muster.registry.signature import Bound
from kernel_muster.registry.specs import KernelSpec
from kernel_muster.registry.target import Device
from kernel_muster.registry.watch import cause_chain, one_line

# A vector load of 16 bytes is the widest that kernels use.
ALIGNMENT = 16
_PLAIN_SHARED_BYTES = 48 * 1024
_CTYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64,
    "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "f32": ctypes.c_float, "f64": ctypes.c_double, "bool": ctypes.c_bool,
}  # fmt: skip


class LaunchFailed(MusterError):
    """The driver refused a launch."""


class BuildRunner:
    """Builds for an architecture without a device: kernels reach stage compiled, and none can be called."""

    def __init__(self, arch: Arch, builder: Builder) -> None:
        self._arch = arch
        self._pool = BuildPool(builder)
        self._lock = threading.Lock()

    def start(self, spec: KernelSpec) -> None:
        """Begin the build of a spec in the pool; what keeps it from beginning, ``state`` says."""
        with contextlib.suppress(BuildFailure):
            self._submit(spec)

    def _submit(self, spec: KernelSpec) -> Future[Outcome]:
        """Begin a build, or find it; BuildFailure where the backend, which may be a plugin's, asks for none."""
        backend = spec.backend
        if not is_device_backend(backend):
            why = f"backend {backend.name} runs on the host: it has no code for {self._arch}"
            raise BuildFailure("NO_DEVICE_CODE", why, remedies=("give the spec a backend for devices", "or archs cpu"))
        try:
            request = backend.request(self._arch)
            if not isinstance(request, BuildRequest):
                raise TypeError(f"request() returned {type(request).__name__}, expected a BuildRequest")
            with self._lock:
                return self._pool.submit(request)
        except BuildFailure:
            raise
        except Exception as error:
            why = f"backend {backend.name} asks for no build: {one_line(error)}"
            raise BuildFailure("COMPILE_FAILED", why, cause_chain(error)) from error

    def join(self, progress: Progress | None = None) -> None:
        """Wait for all builds that were started, and end the pool's threads; later builds run where they are asked."""
        self._pool.join(lambda p: progress(p.done, p.total, p.outcome.request.name) if progress else None)
        self._pool.close()

    def built(self, spec: KernelSpec) -> Outcome:
        """Wait for one spec's build; BuildFailure where there is nothing to wait for."""
        return self._submit(spec).result()

    def state(self, spec: KernelSpec) -> BuildState:
        """Wait for one spec's build and say how it ended."""
        try:
            outcome = self.built(spec)
        except BuildFailure as failure:
            return BuildState("registered", failure.finding(spec.key))
        if outcome.built is None:
            assert outcome.failure is not None  # noqa: S101  (exactly one of the two is there)
            return BuildState("registered", outcome.failure.finding(spec.key))
        built = outcome.built
        return BuildState("compiled", None, built.entries, built.digest, built.compiler)

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return 0: nothing is launched."""
        return 0

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Refuse: there is no device."""
        raise MusterError(f"{owner}: this boot has an architecture as its target, and no device to launch on")


class DeviceRunner(BuildRunner):
    """Builds, loads and launches on one device."""

    def __init__(self, device: Device, arch: Arch, builder: Builder) -> None:
        super().__init__(arch, builder)
        self._device = device
        self._modules: dict[tuple[str, tuple[EntryPoint, ...]], _Module] = {}
        self._load_lock = threading.Lock()

    def state(self, spec: KernelSpec) -> BuildState:
        """Wait for one spec's build, load it, and say how far it came."""
        state = super().state(spec)
        if state.stage != "compiled":
            return state
        try:
            self._module(spec)
        except Exception as error:  # noqa: BLE001  (the driver, its bindings and CuPy raise whatever they like)
            remedies = ("update the driver", "or compile with a toolkit that is not newer than the driver")
            why = str(error) if isinstance(error, LaunchFailed) else one_line(error)
            failure = Finding("LOAD_FAILED", spec.key, why, (self._device.name,), remedies)
            return BuildState("compiled", failure, state.resources, state.digest, state.compiler)
        return BuildState("loaded", None, state.resources, state.digest, state.compiler)

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return what the launches of these arguments need besides them."""
        _, plans = self._plans(owner, spec, bound)
        return regions_of(plans, Scratch).size_bytes

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Check what a device asks of arguments, and return a launch that only enqueues."""
        module, plans = self._plans(owner, spec, bound)
        places = place_workspace(owner, plans, options, self._device.ordinal)
        launches = [self._prepared(owner, module, plan, options.overlap and plan is plans[0], places) for plan in plans]
        return launches[0] if len(launches) == 1 else _InOrder(launches)

    def _plans(self, owner: str, spec: KernelSpec, bound: Bound) -> "tuple[_Module, tuple[LaunchPlan, ...]]":
        backend = spec.backend
        if not is_device_backend(backend):
            raise MusterError(f"{owner}: backend {backend.name} does not run on a device")
        module = self._module(spec)
        for name, view in bound.views.items():
            self._check(owner, name, view, name in backend.strided)
        return module, backend.plan(bound, module.built.entries)

    def _prepared(
        self, owner: str, module: "_Module", plan: LaunchPlan, overlap: bool, places: Places
    ) -> "_PreparedLaunch":
        for position, value in enumerate(plan.arguments):
            view = value.view if isinstance(value, TensorMap) else value
            if isinstance(view, ArrayView):
                self._check(owner, f"argument {position} of {plan.entry}", view, True)
        overlap = overlap and plan.may_overlap and self._arch.capability >= (9, 0)
        return _PreparedLaunch(owner, module, plan, overlap, places)

    def _check(self, owner: str, name: str, view: ArrayView, may_be_strided: bool) -> None:
        if view.device != self._device.ordinal:
            place = "host memory" if view.device < 0 else f"cuda:{view.device}"
            raise ContractError(f"{owner}: {name} lies in {place}, expected cuda:{self._device.ordinal}")
        if view.size and view.pointer % ALIGNMENT:
            raise ContractError(
                f"{owner}: {name} begins at {view.pointer:#x}, expected a multiple of {ALIGNMENT} bytes: copy the slice"
            )
        if not may_be_strided and not view.is_contiguous:
            raise ContractError(f"{owner}: {name} has shape {view.shape} and strides {view.strides}, expected no gaps")

    def _module(self, spec: KernelSpec) -> "_Module":
        outcome = self.built(spec)
        if outcome.built is None:
            raise MusterError(f"{spec.key}: its build failed: {outcome.failure}")
        built = outcome.built
        # Equal code may be asked for with other entry points: those must be loaded too.
        place = (built.digest, outcome.request.entries)
        with self._load_lock:
            if place not in self._modules:
                self._modules[place] = _Module(self._device, built, outcome.request.entries)
            return self._modules[place]


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status) != 0:
        raise LaunchFailed(f"{what}: {status.name}")
    return values[0] if values else None


class _Module:
    """Loaded machine code and its functions, with their attributes set once."""

    def __init__(self, device: Device, built: Built, entries: tuple[EntryPoint, ...]) -> None:
        import cupy

        driver = _driver()
        self.built = built
        self.device = device
        self.entries = {entry.name: entry for entry in entries}
        with cupy.cuda.Device(device.ordinal):
            cupy.cuda.runtime.free(0)  # makes the context that CuPy's memory belongs to
            self.handle = _checked(driver.cuModuleLoadData(built.cubin), "cuModuleLoadData")
            self.functions = {entry.name: self._function(driver, entry) for entry in entries}

    def _function(self, driver: Any, entry: EntryPoint) -> Any:
        function = _checked(driver.cuModuleGetFunction(self.handle, entry.name.encode()), entry.name)
        if entry.dynamic_shared_bytes > _PLAIN_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, attribute, entry.dynamic_shared_bytes), entry.name)
        return function


class _PreparedLaunch:
    """One launch with everything but its stream in place. Calling it only enqueues."""

    __slots__ = ("_config", "_function", "_keep", "_launch", "_params", "_stream", "owner")

    def __init__(self, owner: str, module: _Module, plan: LaunchPlan, overlap: bool, places: Places) -> None:
        driver = _driver()
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
        self._keep = (module, values, pointers, plan.arguments, attributes, places)

    def __call__(self, stream: object | None = None) -> None:
        if stream is None or stream is not self._stream:
            self._config.hStream = _driver().CUstream(stream_pointer(stream))
            self._stream = stream
        (status,) = self._launch(self._config, self._function, self._params, 0)
        if status:
            raise LaunchFailed(f"{self.owner}: {status.name}")


class _InOrder:
    """Several launches that follow each other on one stream."""

    __slots__ = ("_launches",)

    def __init__(self, launches: list[_PreparedLaunch]) -> None:
        self._launches = launches

    def __call__(self, stream: object | None = None) -> None:
        for launch in self._launches:
            launch(stream)


def _value(owner: str, entry: EntryPoint, kind: str, value: Any) -> Any:
    """Coerce one argument to its declared C type."""
    if kind == "ptr":
        return ctypes.c_uint64(value.pointer if isinstance(value, ArrayView) else int(value))
    if isinstance(value, TensorMap) and kind == "tensormap":
        return encode_tensor_map(owner, value)
    if kind not in _CTYPES:
        raise MusterError(f"{owner}: {entry.name} has a parameter of type {kind} ({PARAMETER_TYPES[kind].size} bytes)")
    return _CTYPES[kind](value)


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
