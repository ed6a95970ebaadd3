"""The contract of argmax."""

from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import EXACT, Dims, f64
from kernel_muster.registry.contract.contracts import Arguments, Case, Contract
from kernel_muster.registry.contract.signature import Signature, TensorParam


def _exact_argmax(arguments: Arguments, dims: Dims) -> dict[str, Any]:
    return {"out": np.argmax(f64(arguments["logits"]), axis=1)}


ARGMAX = Contract(
    "argmax_bf16",
    "index of the largest logit of each row, of several equal ones the lowest; NaN is refused",
    Signature((TensorParam("logits", "bf16", ("M", "V")), TensorParam("out", "i32", ("M",), "out"))),
    _exact_argmax,
    (
        Case("one_row", {"M": 1, "V": 256}),
        Case("one_logit", {"M": 2, "V": 1}),
        Case("many_ties", {"M": 17, "V": 4097}),  # BF16 has few values: thousands of draws repeat the largest
        Case("ties_in_vectors", {"M": 5, "V": 4096}),
        Case("vocabulary", {"M": 2, "V": 248_320}),
        Case("one_above_a_block", {"M": 3, "V": 1025}),
        Case("no_rows", {"M": 0, "V": 256}),
    ),
    EXACT,
)
