"""What a launch needs besides its arguments: scratch, counters, tensor maps.

A planner puts these between a launch's arguments; the runner turns them into device memory and driver objects when the
launch is prepared, so that the launch itself only enqueues.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kernel_muster.registry.contract.arrays import ArrayView, stream_pointer, view_of
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.runners import LaunchOptions
from kernel_muster.registry.values import frozen

if TYPE_CHECKING:
    from kernel_muster.registry.backends.cuda_kernel import LaunchPlan

_Part = TypeVar("_Part", "Scratch", "Counters")
#: Regions begin at multiples of this many bytes.
REGION = 256
Swizzle = Literal["none", "32B", "64B", "128B"]


@frozen
class Scratch:
    """Device memory that holds nothing before a launch and nothing after it, passed as pointer.

    Parts of one name are one region, for launches of one plan that hand something on. Launches that follow each other
    on one stream may share all of it; so a kernel that begins early touches it after ``griddepcontrol.wait`` only.
    """

    size_bytes: int
    name: str = "scratch"

    def __post_init__(self) -> None:
        _check_size(self)


@frozen
class Counters:
    """A few counters or flags, passed as pointer: zero before the first launch, and each launch leaves them zero.

    They belong to one prepared launch, which must therefore not run twice at a time. Parts of one name are one region.
    """

    size_bytes: int
    name: str = "counters"

    def __post_init__(self) -> None:
        _check_size(self)


def _check_size(part: Scratch | Counters) -> None:
    size = part.size_bytes
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ContractError(f"{type(part).__name__} {part.name}: size_bytes is {size!r}, expected an int from 0 up")


@frozen
class TensorMap:
    """A ``CUtensorMap`` of a matrix ``[rows, columns]`` for tiled bulk copies (sm_90 and newer).

    ``box`` is ``(rows, columns)`` of one copy, in elements; what lies outside the matrix is read as zeros. The rows'
    distance must be a multiple of 16 bytes, the box's columns at most the swizzle's span.
    """

    view: ArrayView
    box: tuple[int, int]
    swizzle: Swizzle = "128B"


class Regions:
    """Named regions of one buffer, each large enough for its largest use."""

    def __init__(self, parts: Iterable[Scratch | Counters]) -> None:
        largest: dict[str, int] = {}
        for part in parts:
            largest[part.name] = max(part.size_bytes, largest.get(part.name, 0))
        self.offsets: dict[str, int] = {}
        self.size_bytes = 0
        for name, size in largest.items():
            self.offsets[name] = self.size_bytes
            self.size_bytes += -(-size // REGION) * REGION


def check_scratch(owner: str, given: Any, needed: int, device: int) -> None:
    """Refuse a caller's scratch that does not serve: ContractError says what is wrong."""
    try:
        view = view_of(given)
    except ContractError as error:
        raise ContractError(f"{owner}: scratch {error}, expected an array on cuda:{device}") from None
    size = view.size * view.dtype.itemsize
    problem = ""
    if view.device != device:
        problem = f"lies in {'host memory' if view.device < 0 else f'cuda:{view.device}'}, expected cuda:{device}"
    elif size < needed:
        problem = f"has {size} bytes, expected at least {needed}"
    elif not view.is_contiguous:
        problem = f"has shape {view.shape} and strides {view.strides}, expected no gaps"
    elif view.pointer % REGION:
        problem = f"begins at {view.pointer:#x}, expected a multiple of {REGION} bytes"
    elif not view.is_writable:
        problem = "is read-only"
    if problem:
        raise ContractError(f"{owner}: scratch {problem}")


@frozen
class Places:
    """Where the scratch and counters of one prepared launch lie; 0 where none was asked for. ``owners`` keep it."""

    pointers: Mapping[Scratch | Counters, int]
    owners: tuple[Any, ...]


def place_workspace(owner: str, plans: Sequence["LaunchPlan"], options: LaunchOptions, device: int) -> Places:
    """Give every part of the plans its place: in the caller's scratch, else in memory of the launch's own."""
    scratch, counters = regions_of(plans, Scratch), regions_of(plans, Counters)
    if options.scratch is not None:
        check_scratch(owner, options.scratch, scratch.size_bytes, device)
    if not scratch.size_bytes and not counters.size_bytes:
        return Places(dict.fromkeys([*_parts(plans, Scratch), *_parts(plans, Counters)], 0), ())
    if options.memory is not None:
        memory = options.memory
        own = options.scratch if options.scratch is not None else memory.empty(scratch.size_bytes)
        zeros = memory.zeros(counters.size_bytes)
    else:
        own, zeros = _of_the_pool(options, scratch, counters, device)
    pointers = {
        **_pointers(_parts(plans, Scratch), view_of(own).pointer, scratch),
        **_pointers(_parts(plans, Counters), view_of(zeros).pointer, counters),
    }
    return Places(pointers, (own, zeros))


def _of_the_pool(options: LaunchOptions, scratch: Regions, counters: Regions, device: int) -> tuple[Any, Any]:
    """Return scratch and counters of CuPy's pool."""
    import cupy

    # On the launch's own stream its memory can go back to the pool before the launch has run.
    with cupy.cuda.Device(device), _stream_context(options):
        own = options.scratch if options.scratch is not None else cupy.empty(scratch.size_bytes, cupy.uint8)
        zeros = cupy.zeros(counters.size_bytes, cupy.uint8)
        if counters.size_bytes and not options.is_stream_known:
            cupy.cuda.get_current_stream().synchronize()
    return own, zeros


def _pointers(parts: Iterable[_Part], begin: int, regions: Regions) -> dict[Scratch | Counters, int]:
    """Return where parts lie; one of no bytes lies nowhere, since the next region may begin at its place."""
    return {part: begin + regions.offsets[part.name] if part.size_bytes else 0 for part in parts}


def _parts(plans: Sequence["LaunchPlan"], kind: type[_Part]) -> list[_Part]:
    return [value for plan in plans for value in plan.arguments if isinstance(value, kind)]


def regions_of(plans: Sequence["LaunchPlan"], kind: type[_Part]) -> Regions:
    """Return the regions of all parts of one kind."""
    return Regions(_parts(plans, kind))


def _stream_context(options: LaunchOptions) -> AbstractContextManager[Any]:
    if options.stream is None:
        return nullcontext()
    import cupy

    stream: Any = options.stream
    if not isinstance(stream, cupy.cuda.Stream):
        stream = cupy.cuda.ExternalStream(stream_pointer(stream))
    context: AbstractContextManager[Any] = stream
    return context


_SWIZZLES = {"none": "NONE", "32B": "32B", "64B": "64B", "128B": "128B"}
_ELEMENTS = {"bfloat16": "BFLOAT16", "uint8": "UINT8", "float16": "FLOAT16", "float32": "FLOAT32"}


def encode_tensor_map(owner: str, asked: TensorMap) -> Any:
    """Return the driver's tensor map, an object with ``getPtr()``; ContractError where the view does not suit it."""
    view = asked.view
    if len(view.shape) != 2 or view.dtype.name not in _ELEMENTS:
        raise ContractError(f"{owner}: no tensor map of shape {view.shape}, dtype {view.dtype}")
    rows, columns = view.shape
    if columns > 1 and view.strides[1] != view.dtype.itemsize:
        why = f"columns are {view.strides[1]} bytes apart, expected {view.dtype.itemsize}: no gaps in a row"
        raise ContractError(f"{owner}: no tensor map of shape {view.shape}, dtype {view.dtype}: {why}")
    distance = view.strides[0] if rows > 1 else columns * view.dtype.itemsize
    distance = -(-distance // 16) * 16 if rows == 1 else distance
    from cuda.bindings import driver

    status, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_ELEMENTS[view.dtype.name]}"),
        2,
        view.pointer,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(distance)],
        [driver.cuuint32_t(asked.box[1]), driver.cuuint32_t(asked.box[0])],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[asked.swizzle]}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        why = f"{status.name} for shape {view.shape}, rows {distance} bytes apart, box {asked.box}, {asked.swizzle}"
        raise ContractError(f"{owner}: no tensor map: {why}")
    return encoded
