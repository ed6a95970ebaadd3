"""Lookups of the W4A16 GEMMs reached by the shapes of a layer's weights, in chains that follow policy.

The dispatch site is the layer's line that calls one of these.
"""

from collections.abc import Collection, Iterable, Mapping

from kernel_muster.models.layers.families import Key, is_of
from kernel_muster.models.policy.phase import PHASES, Phase
from kernel_muster.models.policy.projection import reaches_wide
from kernel_muster.models.policy.tile import TILE_NAMES, TileName, reachable_tiles
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.sites import track_caller

_TILE = "w4a16"
_VARIANT = "MUSTER_W4A16_VARIANT"
_NO_SMALL_P3, _NO_DEEP_P3 = "MUSTER_NO_TGEMM_PIPELINE3", "MUSTER_NO_K64_PIPELINE3"
_NO_NARROW = "MUSTER_NO_K64_N64"
_ARM, _NO_HOPPER = "MUSTER_W4A16_ARM", "MUSTER_NO_W4A16_HOPPER"
#: The only architecture of the Hopper GEMM.
HOPPER = parse_arch("sm_90a")
_ON_HOPPER = f"the target is {HOPPER}"
_HOPPER_GEMM: Key = ("w4a16_hopper", "w4a16_hopper_gemm")
_VARIANTS: Mapping[TileName, Key] = {
    "m128_v2": ("w4a16_v2", "w4a16_gemm_t_m128_v2"),
    "m128_v3": ("w4a16_v3", "w4a16_gemm_t_m128_v3"),
}
#: The slot of each kernel in a chain of GEMMs.
_SLOTS: Mapping[str, TileName] = {
    "w4a16_hopper_gemm": "hopper",
    "w4a16_gemm": "base",
    "w4a16_gemm_t": "t",
    "w4a16_gemm_t_p3": "t",
    "w4a16_gemm_t_k64": "k64",
    "w4a16_gemm_t_k64_p3": "k64",
    "w4a16_gemm_t_k64_n64_p3": "k64_n64",
    "w4a16_gemm_t_m128": "m128",
}
_HOPPER_ROWS = "projection_arm: rows from the Hopper GEMM's edge on"
_TILE_ROWS: Mapping[TileName, str] = {
    "t": "choose_tile: rows of the 64-row tile",
    "k64": "choose_tile: deep K, rows of the 64-row tile",
    "k64_n64": "choose_tile: deep K, few blocks",
    "m128": "choose_tile: more rows than the 64-row tile takes",
}


@track_caller
def tile_kernels(
    kernels: Lookups, shapes: Iterable[tuple[int, int]], when: str = "", *, fp4: str = "",
    phases: Collection[Phase] = PHASES,
) -> dict[TileName, AnyHandle]:  # fmt: skip
    """Look up the GEMMs that weights ``(N, K)`` of these shapes reach at some number of rows, and no others.

    A kill switch takes its kernel out of the chain: no lookup, no finding. The 3-stage twins come before their parents,
    the narrow one before the wide. v2 and v3 are looked up only if MUSTER_W4A16_VARIANT names them. If the Hopper GEMM
    serves, the tiles come after it. ``fp4`` is the function of a tile that quantises activations too.
    """
    found: dict[TileName, AnyHandle] = {}
    if fp4 and "prefill" in phases:
        found["fp4"] = kernels.try_kernel("w4a4", fp4, when=when, reached_by="choose_tile: prefill")
    levers, sizes = kernels.levers, tuple(shapes)
    has_hopper = wants_hopper(kernels)
    if has_hopper and levers[_ARM] == "hopper":
        forced = kernels.try_kernel(*_HOPPER_GEMM, when=when, requested_by=_ARM, reached_by=_ARM)
        return found | _slots(forced)
    killed = {"k64_n64"} if levers.flag(_NO_NARROW) else set()
    tiles = [name for name in TILE_NAMES if name not in ("hopper", "base", "fp4", *killed)]
    behind = {name for n, k in sizes for name in reachable_tiles(n, k, tiles, levers, phases)}
    first = {name for n, k in sizes for name in reachable_tiles(n, k, (*tiles, "hopper"), levers, phases)}
    for name in tiles:
        if name not in behind:
            continue
        if name in _VARIANTS:
            asked = _both(when, f"{_VARIANT}={name[-2:]}")
            by = {"requested_by": _VARIANT, "reached_by": f"m128_variant: {name}"}
            found[name] = kernels.try_kernel(*_VARIANTS[name], when=asked, **by)
            continue
        members, condition = _members(name, levers)
        if has_hopper and name not in first:
            by_rows, condition = _HOPPER_ROWS, _both(_ON_HOPPER, condition)
            members = [_HOPPER_GEMM, *members]
        else:
            by_rows = _TILE_ROWS[name]
        found |= _slots(kernels.first_of(*members, required=True, when=_both(when, condition), reached_by=by_rows))
    return found


def _members(name: TileName, levers: Levers) -> tuple[list[Key], str]:
    """Return the keys of a slot, in the order of policy, and the kill switches in force."""
    small, deep = levers.flag(_NO_SMALL_P3), levers.flag(_NO_DEEP_P3)
    t = [(_TILE, "w4a16_gemm_t_p3"), (_TILE, "w4a16_gemm_t")][small:]
    k64 = [(_TILE, "w4a16_gemm_t_k64_p3"), (_TILE, "w4a16_gemm_t_k64")][deep:]
    m128, base = (_TILE, "w4a16_gemm_t_m128"), (_TILE, "w4a16_gemm")
    if name in ("k64", "k64_n64"):
        narrow = [(_TILE, "w4a16_gemm_t_k64_n64_p3")] if name == "k64_n64" else []
        off = f"{_NO_NARROW} is off" if narrow else ""
        return [*narrow, *k64], _both(off, f"{_NO_DEEP_P3} is on" if deep else "")
    return [m128, *t, base] if name == "m128" else [*t, m128, base], f"{_NO_SMALL_P3} is on" if small else ""


def _slots(handle: AnyHandle) -> dict[TileName, AnyHandle]:
    """Return the slot of a resolved chain. Empty if no kernel serves."""
    return {_SLOTS[handle.key.func]: handle} if handle else {}


@track_caller
def hopper_kernel(kernels: Lookups, when: str, behind: Key) -> dict[TileName, AnyHandle]:
    """Look up the Hopper GEMM where it may serve, and ``behind`` it the kernel for its rows elsewhere."""
    if not wants_hopper(kernels):
        return {}
    if kernels.levers[_ARM] == "hopper":
        return _slots(kernels.try_kernel(*_HOPPER_GEMM, when=when, requested_by=_ARM, reached_by=_ARM))
    when = _both(when, _ON_HOPPER)
    found = kernels.first_of(_HOPPER_GEMM, behind, when=when, reached_by=_HOPPER_ROWS)
    return _slots(found) if is_of(found, _HOPPER_GEMM) else {}


@track_caller
def wants_hopper(kernels: Lookups) -> bool:
    """Whether the Hopper GEMM is looked up: on its architecture, unless switched off or another GEMM is forced.

    Forced where it cannot be is REQUEST_NOT_HONORED.
    """
    levers = kernels.levers
    if levers[_ARM] == "hopper" and not may_take_hopper(kernels):
        is_killed = levers.flag(_NO_HOPPER)
        why = f"{_NO_HOPPER} switches it off" if is_killed else f"the target is {kernels.target}, expected {HOPPER}"
        kernels.request_failed(_ARM, f"the Hopper GEMM cannot serve: {why}")
    return may_take_hopper(kernels)


def may_take_hopper(kernels: Lookups) -> bool:
    """Whether the target has the Hopper GEMM, and no lever takes it away."""
    levers = kernels.levers
    return kernels.target.arch == HOPPER and not levers.flag(_NO_HOPPER) and levers[_ARM] != "tile"


def may_take_wide(kernels: Lookups, shapes: Iterable[tuple[int, int]], phases: Collection[Phase] = PHASES) -> bool:
    """Whether weights ``(N, K)`` of these shapes send more than 16 rows through the wide GEMV tier."""
    has_hopper = may_take_hopper(kernels)
    return any(reaches_wide(n, k, phases, has_hopper, kernels.levers) for n, k in shapes)


def _both(when: str, also: str) -> str:
    return ", ".join(filter(None, (when, also)))
