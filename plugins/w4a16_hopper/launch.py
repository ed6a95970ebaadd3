"""Launching the Hopper GEMM: arguments, scratch and counters of a launch."""

from collections.abc import Mapping
from pathlib import Path

from kernel_muster.plugins._cuda import INCLUDE_DIR
from kernel_muster.plugins._cuda.launching import multiprocessors_of
from kernel_muster.plugins.w4a16_hopper.layout import CHUNK_K
from kernel_muster.plugins.w4a16_hopper.work import CONFIGS, ranges_of, work_of
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan, row_stride
from kernel_muster.registry.backends.request import EntryPoint, EntryResources
from kernel_muster.registry.contract.arrays import view_of
from kernel_muster.registry.contract.signature import Bound
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import Counters, Scratch, TensorMap

_FOLDER = Path(__file__).parent


def _plan(bound: Bound, entries: Mapping[str, EntryResources]) -> LaunchPlan:
    x, weight, dims = bound.views["x"], bound.arguments["w"], bound.dims
    stride = row_stride(x)
    if stride % 8:
        raise ContractError(f"x has rows {stride} elements apart, expected a multiple of 8 (16 bytes): copy the slice")
    sizes = (dims["M"], dims["N"], dims["K"])
    work = work_of(*sizes, multiprocessors_of(x.device))
    config, ranges = CONFIGS[work.entry], ranges_of(work, *sizes)
    cluster = (work.cluster, 1, 1) if work.cluster > 1 else None
    tokens = config.even_tokens(sizes[0])
    arguments = (
        TensorMap(x, (tokens, CHUNK_K)),
        view_of(weight.data),
        bound.views["out"],
        Scratch(4 * work.workers * config.rows * config.tokens),
        Counters(4 * work.workers * config.warpgroups),
        weight.global_scale_decode,
        *sizes,
        tokens,
        work.whole,
        ranges.workers,
        ranges.stages,
        ranges.remainder,
    )
    grid, shared = (work.workers, 1, 1), config.shared_bytes
    return LaunchPlan(work.entry, grid, arguments, dynamic_shared_bytes=shared, cluster=cluster)


_PARAMETERS = ("tensormap", "ptr", "ptr", "ptr", "ptr", "f32", *("i32",) * 8)
GEMM = CudaKernel(
    _FOLDER / "gemm.cu",
    tuple(EntryPoint(name, _PARAMETERS, config.shared_bytes, config.threads) for name, config in CONFIGS.items()),
    _plan,
    include_dirs=(INCLUDE_DIR,),
    strided=frozenset({"x"}),
)
