"""The device memory that this process holds, as the driver counts it.

``cudaMemGetInfo`` counts every process of the device, so that a test beside others sees their memory come and go. CuPy
counts its own pools alone, and forgets memory of a pool that was collected: the leak that the test looks for. NVML has
a figure for each process.
"""

import ctypes
import os
from pathlib import Path

_LIBRARY = "libnvidia-ml.so.1"
_MOST = 1024
_UNKNOWN = (1 << 64) - 1


class Process(ctypes.Structure):
    """``nvmlProcessInfo_t`` of the driver's interface, version 2 and 3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def own_pids(status: str, pid: int) -> set[int]:
    """Return the numbers of a process in all namespaces that ``/proc/self/status`` shows; the driver has its own."""
    found = {pid}
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            found.update(map(int, line.split()[1:]))
    return found


def own_bytes(processes: list[Process], pids: set[int]) -> int | None:
    """Return the bytes of the one process among these numbers; None where the driver does not tell."""
    found = [one.used_bytes for one in processes if one.pid in pids and one.used_bytes != _UNKNOWN]
    return int(found[0]) if len(found) == 1 else None


def device_bytes(bus_id: str) -> int | None:
    """Return the bytes that this process holds on a device; None where the driver does not tell."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    device, count, rows = ctypes.c_void_p(), ctypes.c_uint(_MOST), (Process * _MOST)()
    calls = (
        lambda: nvml.nvmlInit_v2(),
        lambda: nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(device)),
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), rows),
    )
    if any(call() for call in calls):
        return None
    return own_bytes(list(rows[: count.value]), own_pids(status, os.getpid()))
