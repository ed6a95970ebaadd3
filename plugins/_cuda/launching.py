"""Shared by the launchers of CUDA families."""

from collections.abc import Iterable
from functools import cache, partial

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.constants import constants
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, row_stride
from kernel_muster.registry.contract.arrays import HOST, ArrayView
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.hardware.target import read_devices
from kernel_muster.registry.values import frozen

#: BF16 values in the widest load, 16 bytes.
VECTOR = 8
#: Kernels of one source for every architecture from sm_80 on.
device_spec = partial(KernelSpec, archs=("sm_80+",))
cuda_kernel = partial(CudaKernel, include_dirs=(INCLUDE_DIR,))

# For plans on host memory, which are never launched.
_IMAGINARY_MULTIPROCESSORS = 132
(_ROWWISE_THREADS,) = constants(INCLUDE_DIR / "rowwise.cuh", "ROWWISE_THREADS")


@cache
def multiprocessors_of(device: int) -> int:
    """Return the number of multiprocessors of the device of an argument."""
    return _IMAGINARY_MULTIPROCESSORS if device == HOST else read_devices()[device].multiprocessors


def ceil_div(count: int, step: int) -> int:
    """Return the number of steps that cover a count."""
    return -(-count // step)


def width_of(*lengths: int) -> int:
    """Return the values in a vector of a thread: 8 if every length is a multiple of 8, else 1."""
    return VECTOR if all(length % VECTOR == 0 for length in lengths) else 1


def head_rows(name: str, view: ArrayView) -> int:
    """Return the distance of two rows ``[Hk, D]`` of an argument ``[M, Hk, D]`` in elements.

    ContractError if heads have gaps between them: rows may, when they are slices of one projection.
    """
    rows, heads, width = view.shape
    if heads > 1 and width and view.strides[1] != width * view.dtype.itemsize:
        raise ContractError(f"{name} has shape {view.shape} and strides {view.strides}, expected heads without gaps")
    return view.strides[0] // view.dtype.itemsize if rows > 1 else heads * width


def row_blocks(columns: int, width: int) -> int:
    """Return the blocks of a row in rowwise.cuh: a thread for each vector, and one for the remainder."""
    return ceil_div(columns // width + (columns % width > 0), _ROWWISE_THREADS)


@frozen
class RowGrid:
    """The rows of an elementwise kernel over ``[M, H]``: length, distance of rows by argument, and the grid."""

    columns: int
    strides: tuple[int, ...]
    width: int
    blocks_per_row: int
    grid: tuple[int, int, int]


def row_grid(views: Iterable[ArrayView]) -> RowGrid:
    """Return the grid for arguments of one shape ``[M, H]``, with or without gaps between rows.

    Without gaps all rows count as one, so that at most one vector is incomplete for any H.
    """
    views = tuple(views)
    rows, columns = views[0].shape
    strides = tuple(row_stride(view) for view in views)
    if all(view.is_contiguous for view in views):
        rows, columns = 1, rows * columns
    width = VECTOR if rows == 1 else width_of(*strides)
    blocks = row_blocks(columns, width)
    return RowGrid(columns, strides, width, blocks, (rows * blocks, 1, 1))
