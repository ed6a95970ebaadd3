"""The contract of appending to a paged cache."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import EXACT, F64, Array, Dims, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract
from kernel_muster.registry.contract.signature import Signature, TensorParam

_ROWS, _PAGES = ("M", "Hk", "D"), ("P", "B", "Hk", "D")


def _exact_append(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    one_hot = np.equal.outer(np.arange(dims["P"] * dims["B"]), arguments["slots"]).astype(np.float64)
    return {f"{name}_cache": _placed(one_hot, arguments[name], arguments[f"{name}_cache"]) for name in ("k", "v")}


def _placed(one_hot: F64, rows: Array, cache: Array) -> F64:
    flat = f64(cache).reshape(len(one_hot), -1)
    kept = flat * (one_hot.sum(axis=1, keepdims=True) == 0)
    placed: F64 = (kept + one_hot @ f64(rows).reshape(len(rows), flat.shape[1])).reshape(cache.shape)
    return placed


def _slots(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Different places in any order, among them the first and the last; every fifth row is not kept."""
    count = dims["P"] * dims["B"]
    slots = rng.permutation(count)[: dims["M"]].astype(np.int32)
    if dims["M"] > 1 and count > 1:
        slots[:2] = (count - 1, 0)
        slots[2:] = rng.permutation(np.arange(1, count - 1))[: dims["M"] - 2]
    slots[4::5] = -1
    return {"slots": slots}


APPEND = Contract(
    "kv_cache_append",
    "copies k and v to page slot // B, offset slot % B of the cache; slot -1 is not kept, others are refused",
    Signature(
        (
            TensorParam("k", "bf16", _ROWS),
            TensorParam("v", "bf16", _ROWS),
            TensorParam("slots", "i32", ("M",)),
            TensorParam("k_cache", "bf16", _PAGES, "inout"),
            TensorParam("v_cache", "bf16", _PAGES, "inout"),
        )
    ),
    _exact_append,
    (
        Case("one_row", {"M": 1, "Hk": 2, "D": 256, "P": 3, "B": 16}),
        Case("one_token_pages", {"M": 5, "Hk": 1, "D": 8, "P": 9, "B": 1}),
        Case("odd", {"M": 17, "Hk": 3, "D": 33, "P": 5, "B": 7}),
        Case("full_cache", {"M": 32, "Hk": 1, "D": 16, "P": 2, "B": 16}),
        Case("no_rows", {"M": 0, "Hk": 2, "D": 16, "P": 2, "B": 4}),
    ),
    EXACT,
    inputs=_slots,
)
