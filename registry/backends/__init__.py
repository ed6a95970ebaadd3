"""How a spec's code becomes machine code: CUDA C++ source to a cubin, with no GPU and no driver.

Importing this package imports no CUDA package; those are reached inside ``nvrtc`` when something is compiled.
"""

from kernel_muster.registry.backends.request import (
    PARAMETER_TYPES,
    BuildFailure,
    BuildRequest,
    Built,
    EntryPoint,
    EntryResources,
)

__all__ = ["PARAMETER_TYPES", "BuildFailure", "BuildRequest", "Built", "EntryPoint", "EntryResources"]
