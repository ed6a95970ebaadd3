"""Launching the Hopper GEMM: which form serves a shape, and how its work is shared."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import ceil_div
from kernel_muster.plugins.w4a16_hopper.layout import BLOCK_N, CHUNK_BYTES, CHUNK_K
from kernel_muster.registry.arrays import view_of
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.backends.workspace import Counters, Scratch, TensorMap
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.signature import Bound
from kernel_muster.registry.target import read_devices
from kernel_muster.registry.values import frozen

_FOLDER = Path(__file__).parent


@frozen
class Form:
    """One entry point (gemm.cu).

    Tokens of a tile, consumer warpgroups, blocks of 64 rows of each, stages of the ring, blocks a multiprocessor.
    """

    tokens: int
    warpgroups: int
    blocks: int
    stages: int
    resident: int

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return self.warpgroups * self.blocks * BLOCK_N

    @property
    def threads(self) -> int:
        """Threads of a block: the producer's warpgroup is one more."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as gemm.cuh lays it out: ring, staging of results, barriers, alignment."""
        stage = 2 * CHUNK_K * self.tokens + self.warpgroups * self.blocks * CHUNK_BYTES
        return self.stages * stage + self.warpgroups * 32 * BLOCK_N * 2 + self.stages * 16 + 1024


FORMS = {
    "gemm_t32": Form(32, 2, 1, 20, 1),
    "gemm_t64": Form(64, 2, 1, 14, 1),
    "gemm_t128": Form(128, 2, 1, 10, 1),
    "gemm_t192": Form(192, 2, 1, 7, 1),
    "gemm_t256": Form(256, 2, 1, 5, 1),
}


@frozen
class Work:
    """Who computes what: each of ``workers`` takes ``whole`` tiles alone, and an equal share of what is left."""

    entry: str
    workers: int
    whole: int


def work_of(rows: int, features: int, depth: int, multiprocessors: int) -> Work:
    """Return form and shares for M, N, K on so many multiprocessors."""
    entry = next((name for name, form in FORMS.items() if rows <= form.tokens), "gemm_t256")
    form = FORMS[entry]
    tiles = ceil_div(features, form.rows) * ceil_div(rows, form.tokens)
    workers = max(1, min(multiprocessors * form.resident, tiles * ceil_div(depth, CHUNK_K)))
    waves = tiles // workers
    return Work(entry, workers, waves if tiles % workers == 0 else max(0, waves - 1))


@cache
def _multiprocessors(ordinal: int) -> int:
    return read_devices()[ordinal].multiprocessors


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    x, weight, dims = bound.views["x"], bound.arguments["w"], bound.dims
    stride = row_stride(x)
    if stride % 8:
        raise ContractError(f"x has rows {stride} elements apart, expected a multiple of 8 (16 bytes): copy the slice")
    sizes = (dims["M"], dims["N"], dims["K"])
    work = work_of(*sizes, _multiprocessors(x.device))
    form = FORMS[work.entry]
    arguments = (
        TensorMap(x, (form.tokens, CHUNK_K)),
        view_of(weight.data),
        bound.views["out"],
        Scratch(4 * work.workers * form.rows * form.tokens),
        Counters(4 * work.workers * form.warpgroups),
        weight.global_scale_decode,
        *sizes,
        work.whole,
    )
    return LaunchPlan(work.entry, (work.workers, 1, 1), arguments, dynamic_shared_bytes=form.shared_bytes)


_PARAMETERS = ("tensormap", "ptr", "ptr", "ptr", "ptr", "f32", "i32", "i32", "i32", "i32")
GEMM = CudaKernel(
    _FOLDER / "gemm.cu",
    tuple(EntryPoint(name, _PARAMETERS, form.shared_bytes, form.threads) for name, form in FORMS.items()),
    _plan,
    include_dirs=(INCLUDE_DIR,),
    strided=frozenset({"x"}),
)
