"""The GEMM family: NVFP4 projections of a model for prefill, verify and wide decode batches."""

from collections.abc import Iterator
from functools import partial

from kernel_muster.bench.contestants import Contestant, read_kernel
from kernel_muster.bench.data.nvfp4 import make_dense_data
from kernel_muster.bench.data.shapes import Shape, distinct, parse_shape, shapes_of
from kernel_muster.bench.families.gemv import LARGEST_ERROR, ours
from kernel_muster.bench.measure import BenchFamily
from kernel_muster.bench.peers.peers import dense_peers
from kernel_muster.bench.problem import Problem, Request
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

MOST_ROWS = 8192
#: The arms of dispatch. Each device has some of them.
ARMS = (
    ("w4a16_hopper", "w4a16_hopper_gemm"),
    ("w4a16", "w4a16_gemm_t_p3"),
    ("w4a16", "w4a16_gemm_t_k64_p3"),
    ("w4a16", "w4a16_gemm_t_k64_n64_p3"),
    ("w4a16", "w4a16_gemm_t_m128"),
)
# A vocabulary's projection is needed for single tokens: no prefill computes all of its rows.
_LARGEST_FEATURES = 65536


def arms(kernels: Lookups) -> list[Handle]:
    """Return the handles of this target's arms. UsageError if it has none."""
    found = [kernels.try_kernel(module, func) for module, func in ARMS]
    handles = [handle for handle in found if isinstance(handle, Handle)]
    if not handles:
        raise UsageError(f"{kernels.target} has no W4A16 GEMM to measure: none of {', '.join(f for _, f in ARMS)}")
    return handles


def sizes_of(request: Request) -> list[Shape]:
    """Return the measured shapes: those of the request, else the models' projections except their vocabulary's."""
    given = [(name, features, depth) for name, features, depth in request.shapes]
    return given or [one for one in distinct(shapes_of(request.models)) if one[1] <= _LARGEST_FEATURES]


def problems(kernels: Lookups, request: Request) -> Iterator[Problem]:
    """Yield every projection at every row count."""
    handles = arms(kernels)
    for name, features, depth in sizes_of(request):
        data = make_dense_data(features, depth, max(request.rows))
        for rows in request.rows:
            mine: list[Contestant] = [ours(handle, data, rows) for handle in handles]
            peers = dense_peers(data, rows) if request.peers else ()
            contestants = (read_kernel(kernels, data.weight_bytes), *mine, *peers)
            error = partial(data.error, rows=rows)
            yield Problem(name, f"{features} x {depth}", rows, contestants, error, LARGEST_ERROR)


FAMILY = BenchFamily("gemm", problems, range(1, MOST_ROWS + 1), (17, 32, 64, 128, 256, 512, 1024, 4096), parse_shape)
