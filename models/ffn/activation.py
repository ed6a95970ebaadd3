"""The activation of a SwiGLU, by its name in a config."""

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.sites import track_caller

#: ``act(gate) * up`` in one kernel: its name in a config, and its key.
ACTIVATIONS = {"silu": ("silu", "silu_mul")}


@track_caller
def activation_kernel(kernels: Lookups, name: str, *, reached_by: str = "every pass") -> AnyHandle:
    """Look up ``act(gate) * up``. UsageError for an activation without a kernel."""
    if name not in ACTIVATIONS:
        raise UsageError(f"activation {name!r}: expected {', '.join(ACTIVATIONS)}")
    return kernels.kernel(*ACTIVATIONS[name], reached_by=reached_by)
