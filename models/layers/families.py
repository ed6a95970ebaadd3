"""Lookups that several layers make alike. The dispatch site is the layer's line that calls one of these."""

from collections.abc import Mapping

from kernel_muster.models.policy.tile import TileName
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.sites import track_caller
from kernel_muster.registry.values import frozen

_TILE = "w4a16"
_VARIANT = "MUSTER_W4A16_VARIANT"
_NO_SMALL_P3, _NO_DEEP_P3 = "MUSTER_NO_TGEMM_PIPELINE3", "MUSTER_NO_K64_PIPELINE3"
_ARM, _NO_HOPPER = "MUSTER_W4A16_ARM", "MUSTER_NO_W4A16_HOPPER"
#: The only architecture that the Hopper GEMM is for.
HOPPER = parse_arch("sm_90a")

Tiers = Mapping[int, AnyHandle]  # the most rows of a GEMV kernel -> kernel
Tiles = Mapping[TileName, AnyHandle]


@frozen
class Bf16Kernels:
    """Kernels of an unquantised projection: one row, up to 16 rows, any number."""

    single: AnyHandle
    batchm: AnyHandle
    gemm: AnyHandle


@track_caller
def exact_tiers(kernels: Lookups, when: str = "") -> dict[int, AnyHandle]:
    """Look up the GEMV tiers of 1, 2 and 3 rows."""
    return {
        1: kernels.kernel("w4a16_gemv", "w4a16_gemv", when=when),
        2: kernels.kernel("w4a16_gemv", "w4a16_gemv_batch2", when=when),
        3: kernels.kernel("w4a16_gemv", "w4a16_gemv_batch3", when=when),
    }


@track_caller
def chunk_tiers(kernels: Lookups, when: str = "") -> dict[int, AnyHandle]:
    """Look up the GEMV tiers of 4 to 8 and of 16 rows."""
    return {
        4: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch4", when=when),
        5: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch5", when=when),
        6: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch6", when=when),
        7: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch7", when=when),
        8: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch8", when=when),
        16: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch16", when=when),
    }


@track_caller
def batch_tiers(kernels: Lookups, when: str = "") -> dict[int, AnyHandle]:
    """Look up the GEMV tiers of 4 to 8 and of 16 rows, and the wide one."""
    found = chunk_tiers(kernels, when)
    found[256] = kernels.try_kernel("w4a16_gemv", "w4a16_gemv_batch256", when=when)
    return found


@track_caller
def dual_tiers(kernels: Lookups, when: str = "") -> dict[int, AnyHandle]:
    """Look up the GEMV kernels that serve two weights in one launch, at 1, 2 and 3 rows."""
    return {
        1: kernels.kernel("w4a16_gemv", "w4a16_gemv_dual", when=when),
        2: kernels.kernel("w4a16_gemv", "w4a16_gemv_dual_batch2", when=when),
        3: kernels.kernel("w4a16_gemv", "w4a16_gemv_dual_batch3", when=when),
    }


@track_caller
def dual_silu_tiers(kernels: Lookups, when: str = "") -> dict[int, AnyHandle]:
    """Look up the GEMV kernels of gate, up and SiLU in one launch, at 1, 2, 3 and up to 8 rows."""
    return {
        1: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_dual_silu", when=when),
        2: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_dual_silu_batch2", when=when),
        3: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_dual_silu_batch3", when=when),
        8: kernels.try_kernel("w4a16_gemv", "w4a16_gemv_dual_silu_batch8", when=when),
    }


@track_caller
def tile_kernels(kernels: Lookups, when: str = "") -> dict[TileName, AnyHandle]:
    """Look up the W4A16 GEMMs. A kill switch takes its kernel out of the chain: no lookup, no finding.

    The 3-stage twins come before their parents; of these only the deep-K one is required. v2 and v3 are looked up
    when MUSTER_W4A16_VARIANT names them and not otherwise: a probe that cannot be used only makes noise.
    """
    levers = kernels.levers
    no_small, no_deep = levers.flag(_NO_SMALL_P3), levers.flag(_NO_DEEP_P3)
    small = [(_TILE, "w4a16_gemm_t_p3"), (_TILE, "w4a16_gemm_t")][no_small:]
    deep = [(_TILE, "w4a16_gemm_t_k64_p3"), (_TILE, "w4a16_gemm_t_k64")][no_deep:]
    found: dict[TileName, AnyHandle] = {
        "base": kernels.kernel(_TILE, "w4a16_gemm", when=when),
        "m128": kernels.kernel(_TILE, "w4a16_gemm_t_m128", when=when),
        "t": kernels.first_of(*small, when=_both(when, f"{_NO_SMALL_P3} is on" if no_small else "")),
        "k64": kernels.first_of(*deep, required=True, when=_both(when, f"{_NO_DEEP_P3} is on" if no_deep else "")),
    }
    if not levers.flag("MUSTER_NO_K64_N64"):
        condition = _both(when, "MUSTER_NO_K64_N64 is off")
        found["k64_n64"] = kernels.try_kernel(_TILE, "w4a16_gemm_t_k64_n64_p3", when=condition)
    if levers[_VARIANT] == "v2":
        found["m128_v2"] = kernels.try_kernel(
            "w4a16_v2", "w4a16_gemm_t_m128_v2", when=_both(when, f"{_VARIANT}=v2"), requested_by=_VARIANT
        )
    if levers[_VARIANT] == "v3":
        found["m128_v3"] = kernels.try_kernel(
            "w4a16_v3", "w4a16_gemm_t_m128_v3", when=_both(when, f"{_VARIANT}=v3"), requested_by=_VARIANT
        )
    found |= hopper_kernel(kernels, when)
    return found


@track_caller
def hopper_kernel(kernels: Lookups, when: str = "") -> dict[TileName, AnyHandle]:
    """Look up the Hopper GEMM where it may serve; elsewhere the chain is empty: no lookup, no finding."""
    if not wants_hopper(kernels):
        return {}
    return {
        "hopper": kernels.try_kernel(
            "w4a16_hopper", "w4a16_hopper_gemm", when=_both(when, f"the target is {HOPPER}"),
            requested_by=_ARM if kernels.levers[_ARM] == "hopper" else None,
        )
    }  # fmt: skip


@track_caller
def wants_hopper(kernels: Lookups) -> bool:
    """Whether the Hopper GEMM is looked up: on its architecture, unless switched off or another GEMM is forced.

    Forced where it cannot be is REQUEST_NOT_HONORED.
    """
    levers, arch = kernels.levers, kernels.target.arch
    is_killed = levers.flag(_NO_HOPPER)
    if arch == HOPPER and not is_killed:
        return levers[_ARM] != "tile"
    if levers[_ARM] == "hopper":
        why = f"{_NO_HOPPER} switches it off" if is_killed else f"the target is {kernels.target}, expected {HOPPER}"
        kernels.request_failed(_ARM, f"the Hopper GEMM cannot serve: {why}")
    return False


def _both(when: str, also: str) -> str:
    return ", ".join(filter(None, (when, also)))


@track_caller
def bf16_kernels(kernels: Lookups, when: str = "") -> Bf16Kernels:
    """Look up the kernels of unquantised projections."""
    return Bf16Kernels(
        single=kernels.kernel("gemv", "dense_gemv_bf16", when=when),
        batchm=kernels.try_kernel("gemv", "dense_gemv_bf16_batchm", when=when),
        gemm=kernels.kernel("gemm", "dense_gemm_bf16", when=when),
    )
