"""Which kernels stand behind the arms of a table, and which arms each of our thresholds divides."""

import re
from collections.abc import Iterable, Iterator

_TILES = ("t", "k64", "k64_n64", "m128")
#: Arms by the names that timings give them, with the keys that may stand behind each.
_KERNELS = {
    "gemv": r"w4a16_gemv::w4a16_gemv(_batch[0-9]+)?",
    "tiles3": r"w4a16_gemv::w4a16_gemv(_batch[23])?",
    "t": r"w4a16::w4a16_gemm_t(_p3)?",
    "k64": r"w4a16::w4a16_gemm_t_k64(_p3)?",
    "k64_n64": r"w4a16::w4a16_gemm_t_k64_n64(_p3)?",
    "m128": r"w4a16::w4a16_gemm_t_m128",
    "hopper": r"w4a16_hopper::w4a16_hopper_gemm",
    "bf16_gemv": r"gemv::dense_gemv_bf16(_batchm)?",
    "bf16_tiles3": r"gemv::dense_gemv_bf16(_batchm)?",
    "bf16_gemm": r"gemm::dense_gemm_bf16",
}
#: A contestant that no table chooses: what it would take without us.
_OTHERS = ("cublas_bf16",)
#: Thresholds in rows, with the arms on both sides.
_OF_ROWS = {
    "MUSTER_QKV_TIER_ROWS": (("gemv",), ("tiles3",)),
    "MUSTER_W4A16_M128_ABOVE": (("t", "k64"), ("m128",)),
    "MUSTER_W4A16_CHUNKED_ROWS": (("gemv",), _TILES),
    "MUSTER_W4A16_HOPPER_FROM": (("gemv",), ("hopper",)),
    "MUSTER_W4A16_HOPPER_FROM_SMALL": (("gemv",), ("hopper",)),
    "MUSTER_BF16_TIER_ROWS": (("bf16_gemv",), ("bf16_tiles3",)),
    "MUSTER_BF16_GEMM_FROM": (("bf16_gemv",), ("bf16_gemm",)),
}
#: The others divide shapes.
_SIDES = _OF_ROWS | {
    "MUSTER_W4A16_K64_MIN_K": (("t",), ("k64", "k64_n64")),
    "MUSTER_W4A16_NARROW_BLOCKS": (("k64_n64",), ("k64", "m128")),
    "MUSTER_W4A16_HOPPER_SMALL_MI": (("gemv",), ("hopper",)),
    "MUSTER_W4A16_GEMV_MI": (("gemv",), ("hopper",)),
    "MUSTER_W4A16_HOPPER_TINY_MI": (_TILES, ("hopper",)),
}


def decides_rows(lever: str) -> bool:
    """Whether a threshold of ours is one of rows M."""
    return lever in _OF_ROWS


def kernels_behind(arm: str, keys: Iterable[str]) -> list[str]:
    """Return those of the keys that stand behind an arm of ours."""
    pattern = _KERNELS.get(arm)
    return [] if pattern is None else [key for key in keys if re.fullmatch(pattern, key)]


def is_arm(name: str) -> bool:
    """Whether a timing may be of an arm of this name."""
    return name in _KERNELS or name in _OTHERS


def untimed(levers: Iterable[str], timed: Iterable[Iterable[str]]) -> Iterator[str]:
    """Say which edges rest on no timing: of arms on both sides none were timed at one point."""
    points = [frozenset(arms) for arms in timed]
    for lever in levers:
        sides = _SIDES.get(lever, ())
        if sides and not any(all(not point.isdisjoint(arms) for arms in sides) for point in points):
            names = " and ".join(" or ".join(arms) for arms in sides)
            yield f"{lever} divides {names}, and no timing is of both"


def missing_behind(levers: Iterable[str], keys: Iterable[str]) -> Iterator[str]:
    """Say which edges name arms that have no kernel among the keys."""
    known = list(keys)
    for lever in levers:
        for arms in _SIDES.get(lever, ()):
            if not any(kernels_behind(arm, known) for arm in arms):
                yield f"{lever} divides {' or '.join(arms)}, and kernels has none behind that"
