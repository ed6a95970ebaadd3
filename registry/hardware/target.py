"""Targets: a device with its properties, only an architecture, or ``cpu``."""

import ctypes
import importlib
import re

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU, Arch, canonical_arch, parse_arch
from kernel_muster.registry.hardware.stuck import why_stuck
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.values import frozen


@frozen
class Device:
    """A GPU as its driver describes it."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    driver: str


@frozen
class Target:
    """What kernels are selected for. ``arch`` is None for ``cpu``; ``device`` is None for an architecture alone."""

    name: str
    arch: Arch | None = None
    device: Device | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether the host itself computes."""
        return self.arch is None

    def __str__(self) -> str:
        return self.name if self.arch is None or str(self.arch) == self.name else f"{self.name} ({self.arch})"


CPU_TARGET = Target(CPU)


def resolve_target(name: str | None) -> tuple[Target | None, Finding | None]:
    """Return the target that ``name`` means, or the finding that says why there is none.

    Without a name it is the GPU whose driver is there. ``cpu`` is never a guess: a machine that lost its GPU must
    not serve on NumPy. A name that means nothing is a UsageError.
    """
    if name is not None and not isinstance(name, str):
        raise UsageError(f"target is {name!r}, expected text such as cuda, sm_90a or cpu")
    if name == CPU:
        return CPU_TARGET, None
    if name is None or re.fullmatch(r"cuda(:[0-9]{1,3})?", name):
        return _device_target(int(name.partition(":")[2] or 0) if name else 0)
    if name.startswith("sm_"):
        try:
            arch = parse_arch(name)
        except ValueError as error:
            raise UsageError(f"target: {error}") from None
        return Target(name, arch), None
    raise UsageError(f"target: {name!r} is no target; expected cuda, cuda:<n>, sm_<number> (sm_90a) or cpu")


def _device_target(ordinal: int) -> tuple[Target | None, Finding | None]:
    try:
        devices = read_devices()
    except NoDriver as error:
        return None, _no_device(message("no_device.driver", why=str(error)))
    except OSError as error:
        return None, _no_device(message("no_device.failed", why=str(error)))
    if ordinal >= len(devices):
        return None, _no_device(message("no_device.ordinal", count=len(devices), ordinal=ordinal))
    if why := why_stuck(ordinal):
        return None, _no_device(why)
    try:
        importlib.import_module("cupy")
    except Exception as error:  # noqa: BLE001  (a broken CUDA installation raises whatever it likes)
        return None, Finding(
            "TOOLCHAIN_MISSING",
            "cupy",
            message("toolchain_missing.cupy", error=f"{type(error).__name__}: {error}"),
            (devices[ordinal].name,),
            (message("remedy.cupy_extra"),),
        )
    device = devices[ordinal]
    return Target(f"cuda:{ordinal}", canonical_arch(device.capability), device), None


def _no_device(why: str) -> Finding:
    return Finding(
        "NO_DEVICE",
        "cuda",
        why,
        remedies=(
            message("remedy.visible_gpu"),
            message("remedy.name_arch", target="sm_90a"),
            message("remedy.name_host", target="cpu"),
        ),
    )


# Attribute numbers of CUdevice_attribute in the CUDA driver API.
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76


class NoDriver(OSError):
    """The library of NVIDIA's driver does not load."""


def read_devices() -> list[Device]:
    """Ask the CUDA driver for its devices; OSError if there is no driver or it does not start.

    Goes to libcuda directly: it must work, and fail in a millisecond, where no CUDA package is installed.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDriver(str(error)) from None

    def call(name: str, *arguments: object) -> None:
        status = getattr(cuda, name)(*arguments)
        if status != 0:
            raise OSError(f"{name} failed with CUDA error {status}")

    call("cuInit", 0)
    version, count = ctypes.c_int(), ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    call("cuDeviceGetCount", ctypes.byref(count))

    def device(ordinal: int) -> Device:
        handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(handle), ordinal)
        call("cuDeviceGetName", name, 256, handle)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)

        def attribute(number: int) -> int:
            value = ctypes.c_int()
            call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
            return value.value

        capability = (attribute(_MAJOR), attribute(_MINOR))
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return Device(
            ordinal,
            name.value.decode(errors="replace"),
            capability,
            attribute(_MULTIPROCESSORS),
            memory.value,
            driver,
        )

    return [device(ordinal) for ordinal in range(count.value)]
