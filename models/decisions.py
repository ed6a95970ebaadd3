"""The decisions of a built plan, and the levers that change none of them.

A lever that somebody set and that decides nothing for a model on a target is a finding: its value would be reported as
in force while another decision stands before it.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any

from kernel_muster.models.decode.prefill import CAPTURED_ROWS
from kernel_muster.models.ffn.dense_ffn import DenseFfn
from kernel_muster.models.ffn.moe_ffn import MoeFfn
from kernel_muster.models.layers.attention_projections import AttentionProjections
from kernel_muster.models.layers.gdn import Gdn
from kernel_muster.models.layers.linear import Bf16Linear, Nvfp4Linear
from kernel_muster.models.levers import DISPATCH_LEVERS
from kernel_muster.models.policy.gemv import gemv_chunks
from kernel_muster.models.policy.phase import PHASES
from kernel_muster.models.policy.rows import CAPTURED_BATCH_SIZES
from kernel_muster.models.policy.tile import GemmShape, choose_tile
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.launch.runners import NoRunner
from kernel_muster.registry.levers import Levers, Value
from kernel_muster.registry.selection.handles import AnyHandle, Handle
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

#: Row counts of decode and of prompts. A lever's own edge lies between two of these, or beyond: both ends are tried.
ROWS = tuple(sorted({*range(1, 34), *CAPTURED_BATCH_SIZES, *CAPTURED_ROWS, 65, 129, 257}))
_PACKAGE = "kernel_muster.models."
Build = Callable[[Lookups], object]


def check_levers(name: str, kernels: Lookups, build: Build) -> None:
    """Report each lever that was set for this boot and decides nothing for the model: REQUEST_NOT_HONORED.

    ``build`` makes a plan of the model from lookups, without weights. A boot without such a lever builds none.
    """
    asked = [one for one in kernels.levers.settings if one.lever.name in DISPATCH_LEVERS and one.is_asked]
    asked = [one for one in asked if one.value != one.lever.built_in and not kernels.has_failed(one.lever.name)]
    if not asked:
        return
    decided = _decided(kernels, kernels.levers, build)
    for setting in asked:
        lever, levers = setting.lever, kernels.levers
        # Any value of an edge is honoured where some value of it would decide otherwise.
        others = [lever.built_in, lever.minimum, lever.maximum] if lever.kind == "int" else [lever.built_in]
        if all(_decided(kernels, levers.replaced(lever.name, other), build) == decided for other in others):
            why = f"{lever.name}={_shown(setting.value)} decides nothing: {_reason(name, kernels, lever.keys)}"
            kernels.request_failed(lever.name, why)


def _reason(name: str, kernels: Lookups, keys: tuple[str, ...]) -> str:
    among = f" that it chooses among ({', '.join(keys)})" if keys else ""
    return f"no pass of {name} on {kernels.target} would launch other kernels{among} without it"


def _shown(value: Value | None) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _decided(kernels: Lookups, levers: Levers, build: Build) -> frozenset[Hashable]:
    """Return the decisions of a plan under some levers; its lookups are not those of the boot."""
    session = LookupSession(kernels.catalog, kernels.target, levers, runner=NoRunner())
    return frozenset(decisions(build(Lookups(session))))


def decisions(model: object) -> Iterator[Hashable]:
    """Yield what each part of a model launches: for linears by shape, phase and rows, for others by arm."""
    seen: dict[Hashable, None] = {}
    for part in _parts(model):
        for one in _of(part):
            if one not in seen:
                seen[one] = None
                yield one


def _of(part: Any) -> Iterator[Hashable]:
    if isinstance(part, Nvfp4Linear):
        yield from _nvfp4(part)
    elif isinstance(part, Bf16Linear):
        shape = tuple(part.weight.spec.shape)
        yield ("bf16", shape, tuple(part.prefers_gemv(rows, "decode") for rows in ROWS))
    elif isinstance(part, AttentionProjections):
        yield ("qkv", *(part.arm(rows, phase) for phase in PHASES for rows in ROWS))
    elif isinstance(part, Gdn):
        yield ("gdn inputs", *(part.is_one_launch(rows) for rows in ROWS))
    elif isinstance(part, DenseFfn | MoeFfn):
        yield ("ffn", type(part).__name__, *(part.arm(rows, phase) for phase in PHASES for rows in ROWS))
    if not isinstance(part, Nvfp4Linear | Bf16Linear):
        yield (type(part).__name__, *(str(handle.key) for handle in _handles(vars(part).values()) if handle))


def _nvfp4(linear: Nvfp4Linear) -> Iterator[Hashable]:
    shape = tuple(linear.weight.spec.shape)
    label = (shape, tuple(linear.tiers), tuple(linear.tiles))
    for phase in PHASES:
        yield (label, phase, tuple(_launched(linear, rows, phase) for rows in ROWS))


def _launched(linear: Nvfp4Linear, rows: int, phase: Any) -> Hashable:
    """Return the choice and both alternatives: an arm of attention or of an FFN may take either one by itself."""
    n, k = linear.weight.spec.shape
    chunks, tile = gemv_chunks(rows, linear.tiers), ""
    with suppress(UsageError):  # a linear of some phases alone has no GEMM for the rows of the others
        tile = str(linear.tiles[choose_tile(GemmShape(rows, n, k), phase, linear.tiles, linear.levers)].key)
    return linear.prefers_gemv(rows, phase), chunks, tile


def _handles(values: Any) -> Iterator[AnyHandle]:
    for value in values:
        if isinstance(value, Handle):
            yield value
        elif isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, Handle))


def _parts(root: object) -> Iterator[object]:
    """Yield the objects that a model is made of, each once."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, tuple | list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
        elif type(part).__module__.startswith(_PACKAGE) and id(part) not in seen and hasattr(part, "__dict__"):
            seen.add(id(part))
            yield part
            waiting += vars(part).values()
