"""Lookups shared by several layers. The dispatch site is the layer's line that calls one of these."""

from collections.abc import Mapping, Sequence

from kernel_muster.models.policy.gemv import WIDE_TIER
from kernel_muster.models.policy.tile import TileName
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.sites import track_caller
from kernel_muster.registry.values import frozen

Key = tuple[str, str]

Tiers = Mapping[int, AnyHandle]  # the most rows of a GEMV kernel -> kernel
Tiles = Mapping[TileName, AnyHandle]


@frozen
class Bf16Kernels:
    """Kernels of an unquantised projection: one row, up to 16 rows, any number."""

    single: AnyHandle
    batchm: AnyHandle
    gemm: AnyHandle


def is_of(handle: AnyHandle, key: Key) -> bool:
    """Whether a chain resolved to this key."""
    return bool(handle) and handle.key == key


def looked_up(handle: AnyHandle | None, what: str) -> AnyHandle:
    """Return a kernel that was looked up. UsageError if another launch replaces it."""
    if handle is None:
        raise UsageError(f"{what}: no kernel of its own was looked up, another launch serves it")
    return handle


@frozen
class Fused:
    """Kernels that serve together (None if one is absent), and the results for their parts."""

    whole: tuple[AnyHandle, ...] | None
    parts: tuple[AnyHandle | None, ...]


@track_caller
def fused_or_parts(
    kernels: Lookups, fused: Sequence[Key], parts: Sequence[Key], *, reached_by: str, when: str = ""
) -> Fused:
    """Look up kernels that serve together, and the parts that replace them if one is absent.

    Each part is the last member of a chain after each fused kernel. If all fused kernels exist, no part is looked up.
    Otherwise FALLBACK_TAKEN names the absent one.
    """
    if not parts:  # others serve in any case
        alone = tuple(kernels.try_kernel(*one, when=when, reached_by=reached_by) for one in fused)
        return Fused(alone if all(alone) else None, ())
    found = {
        (one, part): kernels.first_of(one, part, required=True, when=when, reached_by=reached_by)
        for part in parts
        for one in fused
    }
    there = {one: found[one, parts[0]] for one in fused if is_of(found[one, parts[0]], one)}
    if len(there) == len(fused):
        return Fused(tuple(there.values()), tuple(None for _ in parts))
    missing = next(one for one in fused if one not in there)
    return Fused(None, tuple(found[missing, part] for part in parts))


_GEMV = "w4a16_gemv"
#: SwiGLUs that no fused launch serves: the kernel of the activation does.
GEMM_SWIGLU = "SwiGLU of more than 8 rows"


@track_caller
def exact_tiers(kernels: Lookups, when: str = "") -> dict[int, AnyHandle]:
    """Look up the GEMV tiers of 1, 2 and 3 rows."""
    return {
        1: kernels.kernel(_GEMV, "w4a16_gemv", when=when, reached_by="gemv_tier: 1 row"),
        2: kernels.kernel(_GEMV, "w4a16_gemv_batch2", when=when, reached_by="gemv_tier: 2 rows"),
        3: kernels.kernel(_GEMV, "w4a16_gemv_batch3", when=when, reached_by="gemv_tier: 3 rows"),
    }


@track_caller
def chunk_tiers(kernels: Lookups, when: str = "") -> dict[int, AnyHandle]:
    """Look up the GEMV tiers of 4 to 8 and of 16 rows."""
    return {
        4: kernels.try_kernel(_GEMV, "w4a16_gemv_batch4", when=when, reached_by="gemv_tier: 4 rows"),
        5: kernels.try_kernel(_GEMV, "w4a16_gemv_batch5", when=when, reached_by="gemv_tier: 5 rows"),
        6: kernels.try_kernel(_GEMV, "w4a16_gemv_batch6", when=when, reached_by="gemv_tier: 6 rows"),
        7: kernels.try_kernel(_GEMV, "w4a16_gemv_batch7", when=when, reached_by="gemv_tier: 7 rows"),
        8: kernels.try_kernel(_GEMV, "w4a16_gemv_batch8", when=when, reached_by="gemv_tier: 8 rows"),
        16: kernels.try_kernel(_GEMV, "w4a16_gemv_batch16", when=when, reached_by="gemv_tier: 9 to 16 rows"),
    }


@track_caller
def batch_tiers(kernels: Lookups, when: str = "", has_wide: bool = True) -> dict[int, AnyHandle]:
    """Look up the GEMV tiers of 4 to 8 and of 16 rows, and the wide one where some rows reach it."""
    found = chunk_tiers(kernels, when)
    if not has_wide:
        return found
    found[WIDE_TIER] = kernels.try_kernel(
        _GEMV, "w4a16_gemv_batch256", when=when, reached_by="chunk_tier: 17 to 256 rows, as is_gemv decides"
    )
    return found


@track_caller
def dual_tiers(kernels: Lookups, when: str = "", *, reached_by: str) -> dict[int, AnyHandle]:
    """Look up the GEMV kernels for two weights in one launch, at 1, 2 and 3 rows."""
    return {
        1: kernels.kernel(_GEMV, "w4a16_gemv_dual", when=when, reached_by=f"{reached_by}: 1 row"),
        2: kernels.kernel(_GEMV, "w4a16_gemv_dual_batch2", when=when, reached_by=f"{reached_by}: 2 rows"),
        3: kernels.kernel(_GEMV, "w4a16_gemv_dual_batch3", when=when, reached_by=f"{reached_by}: 3 rows"),
    }


@track_caller
def swiglu_tiers(kernels: Lookups, when: str = "") -> tuple[dict[int, AnyHandle], dict[int, AnyHandle]]:
    """Look up the GEMV kernels of gate and up at 1, 2, 3 and up to 8 rows with SiLU, and after these those without it.

    Return both, by their largest row counts.
    """
    fused: dict[int, AnyHandle] = {}
    duals: dict[int, AnyHandle] = {}
    for rows, tail in ((1, ""), (2, "_batch2"), (3, "_batch3")):
        with_silu, without = (_GEMV, f"w4a16_gemv_dual_silu{tail}"), (_GEMV, f"w4a16_gemv_dual{tail}")
        reached_by = f"SwiGLU of {'1 row' if rows == 1 else f'{rows} rows'}"
        found = kernels.first_of(with_silu, without, required=True, when=when, reached_by=reached_by)
        (fused if is_of(found, with_silu) else duals)[rows] = found
    fused[8] = kernels.try_kernel(
        _GEMV, "w4a16_gemv_dual_silu_batch8", when=when, reached_by="SwiGLU of 4 to 8 rows"
    )  # fmt: skip
    return fused, duals


@track_caller
def bf16_kernels(kernels: Lookups, when: str = "") -> Bf16Kernels:
    """Look up the kernels of unquantised projections."""
    return Bf16Kernels(
        single=kernels.kernel("gemv", "dense_gemv_bf16", when=when, reached_by="bf16_arm: 1 row"),
        batchm=kernels.try_kernel("gemv", "dense_gemv_bf16_batchm", when=when, reached_by="bf16_arm: several rows"),
        gemm=kernels.kernel("gemm", "dense_gemm_bf16", when=when, reached_by="bf16_arm: more rows"),
    )
