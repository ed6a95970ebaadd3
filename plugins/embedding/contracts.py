"""The contract of the embedding gather."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import EXACT, Dims, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract
from kernel_muster.registry.contract.signature import Signature, TensorParam


def _exact_gather(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    one_hot = np.equal.outer(arguments["ids"], np.arange(dims["V"])).astype(np.float64)
    return {"out": one_hot @ f64(arguments["table"])}


def _ids(dims: Dims, rng: "np.random.Generator") -> Arguments:
    ids = rng.integers(0, dims["V"], dims["M"], np.int32)
    ids[:2] = (0, dims["V"] - 1)[: ids.size]  # the first and the last row of the table
    return {"ids": ids}


GATHER = Contract(
    "gather",
    "out[m] = table[ids[m]]; an id outside the table is refused",
    Signature(
        (
            TensorParam("table", "bf16", ("V", "H")),
            TensorParam("ids", "i32", ("M",)),
            TensorParam("out", "bf16", ("M", "H"), "out"),
        )
    ),
    _exact_gather,
    (
        Case("one_row", {"M": 1, "V": 7, "H": 64}),
        Case("odd_width", {"M": 17, "V": 33, "H": 129}),
        Case("hidden_size", {"M": 3, "V": 5, "H": 5120}),
        Case("one_entry", {"M": 3, "V": 1, "H": 8}),
        Case("no_rows", {"M": 0, "V": 7, "H": 64}),
    ),
    EXACT,
    inputs=_ids,
)
