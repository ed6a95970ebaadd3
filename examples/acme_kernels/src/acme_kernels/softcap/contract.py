"""The contract of the family's kernels: signature, float64 reference, cases and tolerance."""

from collections.abc import Mapping
from typing import Any

import kernel_muster as km
import numpy as np


def _exact(arguments: dict[str, Any], dims: Mapping[str, int]) -> dict[str, Any]:
    """Return ``cap * tanh(x / cap)`` in float64, by another formula than the kernel's."""
    cap = np.float64(arguments["cap"])
    scaled = np.asarray(arguments["x"]).astype(np.float64) / cap
    return {"out": cap * (1.0 - 2.0 / (np.exp(2.0 * scaled) + 1.0))}


SOFTCAP = km.Contract(
    name="acme_softcap",
    summary="out = cap * tanh(x / cap), FP32 inside",
    signature=km.Signature(
        (
            km.TensorParam("x", "bf16", ("M", "V")),
            km.ScalarParam("cap", "f32"),
            km.TensorParam("out", "bf16", ("M", "V"), "out"),
        )
    ),
    reference=_exact,
    cases=(
        km.Case("one_row", {"M": 1, "V": 128}, {"cap": 30.0}),
        km.Case("saturated", {"M": 3, "V": 77}, {"cap": 0.125}),
        km.Case("one_above_a_tile", {"M": 17, "V": 1025}, {"cap": 2.0}),
        km.Case("no_rows", {"M": 0, "V": 64}, {"cap": 30.0}),
    ),
    tolerance=km.Tolerance(
        relative=2.0**-8 + 12 * 2.0**-24,
        absolute=2.0**-45,
        derivation="one rounding to BF16 (2^-8); in FP32 a division, a tanh of 4 ulp (2^-23 each) and a product; "
        "absolute: what the float64 reference loses to cancellation near zero, 4 * 2^-53 * cap, for cap up to 64",
    ),
)
