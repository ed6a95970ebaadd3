"""The GEMV family: NVFP4 projections of a model for 1 to 16 rows."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from kernel_muster.bench.contestants import Contestant, Entry, copied, found, launch_of, poisoned, read_kernel, size_of
from kernel_muster.bench.data.nvfp4 import DenseData, make_dense_data
from kernel_muster.bench.data.shapes import distinct, parse_shape, shapes_of
from kernel_muster.bench.measure import BenchFamily
from kernel_muster.bench.peers.peers import dense_peers
from kernel_muster.bench.problem import Problem, Request
from kernel_muster.bench.timing import copies_of
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

#: Largest relative L2 error of a right result: twice that of the best NVFP4 peer (1.7e-3), BF16 output.
LARGEST_ERROR = 3.4e-3
MOST_ROWS = 16


def tier_of(rows: int) -> str:
    """Return the key that serves this number of rows."""
    return "w4a16_gemv" if rows == 1 else f"w4a16_gemv_batch{rows if rows <= 8 else 16}"


def ours(handle: Handle, data: DenseData, rows: int) -> Contestant:
    """Return a kernel of the registry with the signature ``(x, w, out)``, its weight in its own layout."""

    def make(stream: Any) -> Entry:
        prepared = handle.prepare_weight(data.weight)
        size = size_of(prepared)
        weights = [prepared] + [copied(prepared) for _ in range(copies_of(size) - 1)]
        out = poisoned((rows, data.features))
        launches = tuple(launch_of(handle, stream, x=data.x[:rows], w=weight, out=out) for weight in weights)
        return Entry(launches, out, size, 2.0 * rows * data.features * data.depth)

    return Contestant(str(handle.key), "ours", make, (handle,))


def problems(kernels: Lookups, request: Request) -> Iterator[Problem]:
    """Yield every projection at every row count."""
    for name, features, depth in request.shapes or distinct(shapes_of(request.models)):
        data = make_dense_data(features, depth, MOST_ROWS)
        for rows in request.rows:
            handle = found(kernels, "w4a16_gemv", tier_of(rows))
            peers = dense_peers(data, rows) if request.peers else ()
            contestants = (read_kernel(kernels, data.weight_bytes), ours(handle, data, rows), *peers)
            error = partial(data.error, rows=rows)
            yield Problem(name, f"{features} x {depth}", rows, contestants, error, LARGEST_ERROR)


FAMILY = BenchFamily("gemv", problems, range(1, MOST_ROWS + 1), (1, 8, 16), parse_shape)
