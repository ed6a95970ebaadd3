"""The contract of silu_mul."""

from kernel_muster.plugins._contracts import silu_mul_contract

SILU_MUL = silu_mul_contract("silu_mul")
