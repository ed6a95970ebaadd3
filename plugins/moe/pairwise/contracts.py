"""Contracts of the pairwise experts: each token by each of its experts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    Dims,
    f64,
)
from kernel_muster.plugins.moe.experts.cases import cases_of, inputs_of
from kernel_muster.plugins.moe.experts.exact import exact_activation, exact_rows
from kernel_muster.plugins.moe.experts.parameters import IDS, W_DOWN, W_GATE, W_UP, WEIGHTS, WHOLE_H, WHOLE_I
from kernel_muster.plugins.moe.experts.tolerances import DEEPEST, activation_tolerance, reduction_tolerance
from kernel_muster.registry.contract.contracts import Arguments, Contract
from kernel_muster.registry.contract.signature import Signature, TensorParam


def exact_pairwise_gate_up(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    """Return ``out [M, T, I]`` of the experts that ``ids`` name."""
    x = np.repeat(f64(arguments["x"]), dims["T"], axis=0)
    return {"out": exact_activation(x, arguments, arguments["ids"].ravel()).reshape(dims["M"], dims["T"], dims["I"])}


def exact_pairwise_down(arguments: Arguments, dims: Dims) -> Mapping[str, Any]:
    """Return ``out [M, H]``, the weighted sum over the experts that ``ids`` name."""
    h = f64(arguments["h"]).reshape(-1, dims["I"])
    y = exact_rows(h, arguments["w_down"], arguments["ids"].ravel()).reshape(dims["M"], dims["T"], dims["H"])
    return {"out": np.einsum("mt,mth->mh", f64(arguments["weights"]), y)}


def _pairwise_gate_up(rows: int) -> Contract:
    params = (
        TensorParam("x", "bf16", ("M", "H")),
        IDS,
        W_GATE,
        W_UP,
        TensorParam("out", "bf16", ("M", "T", "I"), "out"),
    )
    return Contract(
        f"moe_fused_batch{rows}_gate_up",
        f"silu(gate) * up of every token and choice, at most {rows} tokens; gate and up are rounded to BF16 first",
        Signature(params, multiples=WHOLE_H, limits=(("M", rows),)),
        exact_pairwise_gate_up,
        cases_of(tuple(range(rows + 1)), activation_tolerance, "H"),
        activation_tolerance(DEEPEST),
        inputs=inputs_of("x", ("M", "H"), "ids"),
    )


def _pairwise_down(rows: int) -> Contract:
    params = (
        TensorParam("h", "bf16", ("M", "T", "I")),
        IDS,
        WEIGHTS,
        W_DOWN,
        TensorParam("out", "bf16", ("M", "H"), "out"),
    )
    return Contract(
        f"moe_fused_batch{rows}_down",
        f"weighted sum of the chosen experts' down projections, each rounded to BF16, at most {rows} tokens",
        Signature(params, multiples=WHOLE_I, limits=(("M", rows),)),
        exact_pairwise_down,
        cases_of(tuple(range(rows + 1)), reduction_tolerance, "I"),
        reduction_tolerance(DEEPEST),
        inputs=inputs_of("h", ("M", "T", "I"), "ids", "weights"),
    )


PAIRWISE_GATE_UP = (_pairwise_gate_up(2), _pairwise_gate_up(3))
PAIRWISE_DOWN = (_pairwise_down(2), _pairwise_down(3))
