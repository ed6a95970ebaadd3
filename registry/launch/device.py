"""Devices: build, load and launch compiled kernels of one boot.

Loading and launching go through ``cuda.bindings``; CuPy holds the context, memory and streams.
"""

import contextlib
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cache import LOCK_SECONDS
from kernel_muster.registry.backends.cuda_kernel import DeviceBackend, LaunchPlan, idle_problem, is_device_backend
from kernel_muster.registry.backends.pool import BuildPool, Outcome
from kernel_muster.registry.backends.request import BuildFailure, BuildRequest, Built, EntryPoint
from kernel_muster.registry.backends.torch_op import CalledBackend, is_called_backend
from kernel_muster.registry.contract.arrays import ArrayView
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.errors import ContractError, MusterError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.hardware.target import Device
from kernel_muster.registry.launch.prepared import (
    CalledLaunch,
    InOrder,
    LaunchFailed,
    PreparedLaunch,
    bindings,
    checked,
)
from kernel_muster.registry.launch.runners import BuildState, Launch, LaunchOptions, Progress
from kernel_muster.registry.launch.workspace import Places, Scratch, TensorMap, place_workspace, regions_of
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line, watched

# A vector load of 16 bytes is the widest that kernels use.
ALIGNMENT = 16
_REQUEST_SECONDS = 10.0


def _waiting(lock: str) -> str:
    return f"waiting for another process, which holds {lock}; for {LOCK_SECONDS:g} s at most"


def _requested(spec: KernelSpec, backend: DeviceBackend, arch: Arch) -> object:
    """Return what a backend asks for. A plugin's own backend runs its code here, which is watched."""
    if type(backend).__module__.startswith("kernel_muster.registry."):
        return backend.request(arch)
    outcome = watched(partial(backend.request, arch), _REQUEST_SECONDS, f"the backend of {spec.key}")
    if outcome.error is not None:
        why = f"backend {spec.backend_name} asks for no build: {one_line(outcome.error)}"
        raise BuildFailure("COMPILE_FAILED", why, cause_chain(outcome.error))
    if outcome.is_hanging:
        why = f"backend {spec.backend_name} asks for no build: request() ran longer than {_REQUEST_SECONDS:g} s"
        raise BuildFailure("COMPILE_FAILED", why, outcome.stack)
    return outcome.value


class BuildRunner:
    """Builds for an architecture without a device: kernels reach stage compiled, and none can be called."""

    def __init__(self, arch: Arch, builder: Builder) -> None:
        self._arch = arch
        self._builder = builder
        self._pool = BuildPool(builder)
        self._builds: dict[
            int, tuple[KernelSpec, Future[Outcome]]
        ] = {}  # by identity: a plugin's spec may have no hash
        self._lock = threading.Lock()

    def start(self, spec: KernelSpec) -> None:
        """Begin the build of a spec in the pool; what keeps it from beginning, ``state`` says."""
        if is_called_backend(spec.backend):  # its code is there already
            return
        with contextlib.suppress(BuildFailure):
            self._submit(spec)

    def _submit(self, spec: KernelSpec) -> Future[Outcome]:
        """Begin a build, or find it; BuildFailure where the backend, which may be a plugin's, asks for none.

        A spec is built once in a boot, whatever its backend would ask for the next time: the report has the digest of
        the code that is launched.
        """
        if (begun := self._builds.get(id(spec))) is not None:
            return begun[1]
        backend = spec.backend
        if not is_device_backend(backend):
            why = f"backend {spec.backend_name} runs on the host: it has no code for {self._arch}"
            raise BuildFailure("NO_DEVICE_CODE", why, remedies=("give the spec a backend for devices", "or archs cpu"))
        try:
            request = _requested(spec, backend, self._arch)
            if not isinstance(request, BuildRequest):
                raise TypeError(f"request() returned {type(request).__name__}, expected a BuildRequest")
            with self._lock:
                _, future = self._builds.setdefault(id(spec), (spec, self._pool.submit(request)))
                return future
        except (BuildFailure, KeyboardInterrupt):
            raise
        except BaseException as error:  # (a plugin's code may raise anything, SystemExit too)
            why = f"backend {spec.backend_name} asks for no build: {one_line(error)}"
            raise BuildFailure("COMPILE_FAILED", why, cause_chain(error)) from error

    def join(self, progress: Progress | None = None) -> None:
        """Wait for all builds that were started, and end the pool's threads; later builds run where they are asked."""
        if progress is not None and self._pool.requested:  # the first may take long
            progress(0, self._pool.requested, f"builds for {self._arch}, {self._pool.requested} in all")
        if progress is None:
            self._pool.join()
        else:
            self._pool.join(
                lambda p: progress(p.done, p.total, f"build of {p.outcome.request.name}"),
                lambda done, total, lock: progress(done, total, _waiting(lock)),
            )
        self._pool.close()

    def built(self, spec: KernelSpec) -> Outcome:
        """Wait for one spec's build; BuildFailure where there is nothing to wait for."""
        return self._submit(spec).result()

    def state(self, spec: KernelSpec) -> BuildState:
        """Wait for one spec's build and say how it ended."""
        if is_called_backend(spec.backend):
            return BuildState("registered")
        try:
            outcome = self.built(spec)
        except BuildFailure as failure:
            return BuildState("registered", failure.finding(spec.key))
        if outcome.built is None:
            assert outcome.failure is not None  # noqa: S101  (exactly one of the two is there)
            return BuildState("registered", outcome.failure.finding(spec.key))
        built = outcome.built
        return BuildState("compiled", None, built.entries, built.digest, built.compiler, built.source_sha256)

    def findings(self) -> tuple[Finding, ...]:
        """Return what is to be said of all builds together."""
        return self._builder.findings()

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
        if is_called_backend(spec.backend):
            return _called_state(spec, spec.backend)
        state = super().state(spec)
        if state.stage != "compiled":
            return state
        try:
            self._module(spec)
        except Exception as error:  # noqa: BLE001  (the driver, its bindings and CuPy raise whatever they like)
            remedies = (message("remedy.update_driver"), message("remedy.older_toolkit"))
            why = str(error) if isinstance(error, LaunchFailed) else one_line(error)
            failure = Finding("LOAD_FAILED", spec.key, why, (self._device.name,), remedies)
            return replace(state, failure=failure)
        return replace(state, stage="loaded")

    def scratch_bytes(self, owner: str, spec: KernelSpec, bound: Bound) -> int:
        """Return what the launches of these arguments need besides them."""
        if is_called_backend(spec.backend):
            return 0
        _, plans = self._plans(owner, spec, bound)
        return regions_of(plans, Scratch).size_bytes

    def prepare(self, owner: str, spec: KernelSpec, bound: Bound, options: LaunchOptions) -> Launch:
        """Check what a device asks of arguments, and return a launch that only enqueues."""
        backend = spec.backend
        if is_called_backend(backend):
            for name, view in bound.views.items():
                self._check(owner, name, view, name in backend.strided)
            return CalledLaunch(backend.prepare(bound, self._device.ordinal))
        module, plans = self._plans(owner, spec, bound)
        places = place_workspace(owner, plans, options, self._device.ordinal)
        launches = [self._prepared(owner, module, plan, options.overlap and plan is plans[0], places) for plan in plans]
        launch = launches[0] if len(launches) == 1 else InOrder(launches)
        if options.is_borrowed:
            launch.let_go()
        return launch

    def _plans(self, owner: str, spec: KernelSpec, bound: Bound) -> "tuple[_Module, tuple[LaunchPlan, ...]]":
        backend = spec.backend
        if not is_device_backend(backend):
            raise MusterError(f"{owner}: backend {spec.backend_name} does not run on a device")
        module = self._module(spec)
        for name, view in bound.views.items():
            self._check(owner, name, view, name in backend.strided)
        plans = backend.plan(bound, module.built.entries)
        if not plans and (problem := idle_problem(bound)):
            raise MusterError(f"{owner}: {problem}")
        return module, plans

    def _prepared(
        self, owner: str, module: "_Module", plan: LaunchPlan, overlap: bool, places: Places
    ) -> "PreparedLaunch":
        for position, value in enumerate(plan.arguments):
            view = value.view if isinstance(value, TensorMap) else value
            if isinstance(view, ArrayView):
                self._check(owner, f"argument {position} of {plan.entry}", view, True)
        overlap = overlap and plan.may_overlap and self._arch.capability >= (9, 0)
        return PreparedLaunch(owner, module, plan, places, overlap=overlap)

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


def _called_state(spec: KernelSpec, backend: CalledBackend) -> BuildState:
    try:
        return BuildState("loaded", compiler=backend.load())
    except BuildFailure as failure:
        return BuildState("registered", failure.finding(spec.key))


# Machine code that nothing refers to any more, by device. It is unloaded when other code is loaded and not when Python
# finds that out, which may be in the middle of a stream's capture.
_UNUSED: list[tuple[int, Any]] = []


def _unload_unused() -> None:
    """Unload what earlier boots have left; waits for their launches first."""
    import cupy

    with contextlib.suppress(IndexError):  # another thread may take the last one
        while _UNUSED:
            ordinal, handle = _UNUSED.pop()
            with cupy.cuda.Device(ordinal) as device:
                device.synchronize()
                checked(bindings().cuModuleUnload(handle), "cuModuleUnload")


class _Module:
    """Loaded machine code and its functions, with their attributes set once. Prepared launches keep it."""

    def __init__(self, device: Device, built: Built, entries: tuple[EntryPoint, ...]) -> None:
        import cupy

        driver = bindings()
        self.built = built
        self.device = device
        self.entries: Mapping[str, EntryPoint] = {entry.name: entry for entry in entries}
        with cupy.cuda.Device(device.ordinal):
            cupy.cuda.runtime.free(0)  # makes the context that CuPy's memory belongs to
            _unload_unused()
            self.handle = checked(driver.cuModuleLoadData(built.cubin), "cuModuleLoadData")
            weakref.finalize(self, _UNUSED.append, (device.ordinal, self.handle)).atexit = False
            self.functions: Mapping[str, Any] = {entry.name: self._function(driver, entry) for entry in entries}

    def _function(self, driver: Any, entry: EntryPoint) -> Any:
        function = checked(driver.cuModuleGetFunction(self.handle, entry.name.encode()), entry.name)
        # Without this a launch has 48 KiB at most, its static arrays counted in.
        if entry.dynamic_shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, entry.dynamic_shared_bytes), entry.name)
        return function
