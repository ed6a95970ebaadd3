"""The two gates of the gated delta rule on the host, for every kernel that makes them."""

import numpy as np
from kernel_muster.plugins._reference import Array, f32, sigmoid


def gdn_gates(a: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """Return ``decay = exp(-exp(a_log) softplus(a + dt_bias))`` and ``beta = sigmoid(b)``, ``[Hv]``, of one row.

    ``a, b [Hv]`` are BF16, ``a_log, dt_bias [Hv]`` FP32. Evaluated in float64; softplus is ``log(1 + exp(x))`` and
    never overflows. Source: Yang et al., Gated Delta Networks (2024), section 3, with the gate of Mamba-2.
    """
    step = np.logaddexp(0.0, a.astype(np.float64) + dt_bias)
    return np.exp(-np.exp(a_log.astype(np.float64)) * step), sigmoid(f32(b))
