"""The small kernels of a decode step: norms, rope, cache, convolution, delta rule, attention, sampling, BF16 products.

Each is measured beside two floors: ``move`` reads and writes as many bytes as the kernel must, and ``empty`` is an
empty launch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from kernel_muster.bench import floor
from kernel_muster.bench.contestants import Absent, Contestant, Entry, launch_of
from kernel_muster.bench.data.attention import PAGED_FORMS, paged, prefill
from kernel_muster.bench.data.gated_delta import gdn_prefill
from kernel_muster.bench.data.inputs import Arguments, Data, Sizes, Workload, sizes_of
from kernel_muster.bench.data.workloads import dense, step
from kernel_muster.bench.measure import BenchFamily
from kernel_muster.bench.peers.common_peers import Maker, makers_of, peer_of
from kernel_muster.bench.problem import Problem, Request, Shape
from kernel_muster.bench.timing import copies_of
from kernel_muster.registry.backends.cuda_kernel import is_device_backend
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookups import Lookups

#: Numbers of sequences in a step.
COUNTS = (1, 16, 32)
MOST_COUNT = 128
#: Contexts of decode attention.
CONTEXTS = (4096, 32768)
#: Modules of the measured kernels.
MODULES = frozenset(
    {
        "argmax", "causal_conv1d", "embedding", "gated_delta_rule", "gemm", "gemv", "kv_cache", "norm", "paged_decode",
        "prefill_paged", "residual_add", "rope", "sampling", "silu", "ssm_preprocess",
    }
)  # fmt: skip
#: Largest relative L2 error of a right result. One rounding to BF16 gives 1.7e-3 on this data. The delta rule with its
#: norm rounds in between and gives 2.5e-3 (the host's kernels, 1 and 16 sequences).
LARGEST_ERROR = 4e-3
# The references are NumPy in float64: larger arguments would take seconds each, and are not judged.
_JUDGED_BYTES = 16 * 2**20
# Small kernels read data that the previous launch left in L2. More copies would only measure the host.
MOST_COPIES = 40


def step_launches(
    data: Data, m: Sizes, counts: Sequence[int]
) -> Iterator[tuple[int, Callable[[], Iterator[Workload]]]]:
    """Return groups of a model's workloads with their rows, each made on demand."""
    for count in counts:
        yield count, partial(step, data, m, count)
    for context in CONTEXTS:
        for count in counts:
            for form in PAGED_FORMS:
                yield count, partial(_one, paged, data, m, count, context, form)
    yield 2048, partial(_one, gdn_prefill, data, m, 2048)
    yield 2048, partial(_one, partial(gdn_prefill, is_chunked=True), data, m, 2048)
    for rows, before in ((512, 0), (2048, 0), (512, 3584)):
        yield rows, partial(_one, prefill, data, m, rows, before)
        yield rows, partial(_one, partial(prefill, is_tiled=True), data, m, rows, before)
    for rows in (64, 512, 2048):
        for features in (2 * m.value_heads, m.heads * m.head_dim):
            yield rows, partial(_one, dense, data, m, rows, features, "gemm::dense_gemm_bf16")


def _one(make: Callable[..., Workload], *arguments: Any) -> Iterator[Workload]:
    yield make(*arguments)


def begin_builds(kernels: Lookups) -> None:
    """Look up every kernel of the measured modules, so all builds begin at once."""
    for found in kernels.catalog.kernels:
        key = found.spec.kernel_key
        if key.module in MODULES and is_device_backend(found.spec.backend):
            kernels.try_kernel(key.module, key.func)


def problems(kernels: Lookups, request: Request, data: Data | None = None) -> Iterator[Problem]:
    """Yield every launch of a step, then attention over long contexts and the kernels of prompts."""
    sizes = [sizes_of(manifest) for manifest in request.models]
    begin_builds(kernels)
    data = data or Data()
    for m in sizes:
        for rows, group in step_launches(data, m, request.rows):
            for work in group():
                yield problem_of(kernels, work, rows)


def problem_of(kernels: Lookups, work: Workload, rows: int) -> Problem:
    """Return one workload with its floors and its peers."""
    count = min(MOST_COPIES, copies_of(work.copy_bytes))
    sets: list[Arguments] = []

    def copies() -> list[Arguments]:  # the same for our kernels and the peers
        if not sets:
            sets.extend(work.make() for _ in range(count))
        return sets

    handle = kernels.try_kernel(*work.key.split("::"))
    handles = (handle,) if isinstance(handle, Handle) else ()
    contestants = [
        mover(kernels, "move", work.reads, work.writes, work.copy_bytes, count),
        mover(kernels, "empty", 0, 0, floor.VECTOR_BYTES, 2),
        Contestant(work.key, "ours", partial(_ours, handle, work, copies), handles),
    ]
    for maker in makers_of(work.key):
        make = partial(_peer, work, maker, copies)
        contestants.append(Contestant(maker.name, "peer", make, largest_error=maker.largest_error))
    return Problem(f"{work.model} {work.key}", work.label, rows, tuple(contestants), None, LARGEST_ERROR, "move")


def mover(kernels: Lookups, name: str, reads: int, writes: int, size_bytes: int, count: int) -> Contestant:
    """Return a floor: this many bytes read and written, over as many cold copies as the others have."""
    handle = kernels.try_kernel(floor.NAME, "move_bytes")

    def make(stream: Any) -> Entry | Absent:
        if not handle:
            return Absent("it runs on devices only")
        import cupy

        size = -(-max(size_bytes, floor.VECTOR_BYTES) // floor.VECTOR_BYTES) * floor.VECTOR_BYTES
        out = cupy.zeros(1, cupy.uint32)
        blocks = [cupy.ones(size, cupy.uint8) for _ in range(count)]
        moves = (launch_of(handle, stream, data=block, out=out, reads=reads, writes=writes) for block in blocks)
        return Entry(tuple(moves), None, reads + writes)

    return Contestant(name, "floor", make)


def _ours(handle: Any, work: Workload, copies: Callable[[], list[Arguments]], stream: Any) -> Entry | Absent:
    if not handle:
        return Absent(f"{work.key} is absent: {handle.reason}")
    ready = tuple(launch_of(handle, stream, **arguments) for arguments in copies())
    arguments = work.make()
    check = partial(error_of, handle, arguments, stream) if _bytes_of(arguments) <= _JUDGED_BYTES else None
    return Entry(ready, None, work.reads + work.writes, check=check)


def _peer(work: Workload, maker: Maker, copies: Callable[[], list[Arguments]], stream: Any) -> Entry | Absent:
    peer = peer_of(maker, copies, stream)
    if isinstance(peer, Absent):
        return peer
    return Entry(tuple(peer.launches), None, work.reads + work.writes, is_torch=True, check=peer.check)


def error_of(handle: Handle, arguments: Arguments, stream: Any = None) -> float:
    """Launch a kernel once, and return the error of its results against its contract's reference.

    The largest relative L2 error of an output against float64. For integers the share of differences.
    """
    given = {name: _on_host(value) for name, value in arguments.items()}
    bound = handle.contract.signature.bind(str(handle.key), (), given)
    expected = handle.contract.reference(given, bound.dims)
    launch_of(handle, stream, **arguments)()
    if stream is not None:
        stream.synchronize()
    return max(
        _distance(_on_host(arguments[out.name]), expected[out.name]) for out in handle.contract.signature.outputs
    )


def _distance(result: Any, expected: Any) -> float:
    reference = np.asarray(expected)
    if result.dtype.kind in "iu":
        return float(np.mean(result != reference))
    value, exact = result.astype(np.float64), reference.astype(np.float64)
    norm = float(np.linalg.norm(exact))
    found = float(np.linalg.norm(value - exact))
    return found / norm if norm > 0 else found


def _on_host(value: Any) -> Any:
    """Return a host copy of an array or a weight, and any other value unchanged."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_dataclass(value) and not isinstance(value, type):
        arrays = {name: _on_host(one) for name, one in vars(value).items() if hasattr(one, "nbytes")}
        return replace(value, **arrays)
    if not hasattr(value, "nbytes"):
        return value
    import cupy

    return cupy.asnumpy(value)


def _bytes_of(arguments: Arguments) -> int:
    values = [one for value in arguments.values() for one in (value, *getattr(value, "__dict__", {}).values())]
    return sum(int(getattr(value, "nbytes", 0)) for value in values)


def _no_shape(text: str) -> Shape:
    raise UsageError(f"--shape {text}: small takes its sizes from models; --only PART chooses among its kernels")


FAMILY = BenchFamily("small", problems, range(1, MOST_COUNT + 1), COUNTS, _no_shape)
