"""Grouped decode, which reads each routed expert once, and the twin of the grouped kernels for a K."""

from kernel_muster.models.policy.evidence import GB10, H200, Evidence, Threshold
from kernel_muster.registry.levers import Levers

# Grouped decode reads each routed expert once and costs a sort and a permute.
#   n=4: 31 against 56 tok/s (Holo; -45% there, +25% at C=32)   C=32: 172.7 -> 216.2; attention side +7.9%, C=64 +9.7%
# 5..15 rows are unmeasured there and left on the losing side on purpose. Accuracy gate: gsm8k n=200, paired, strict
# 0.960 against 0.900, no regressions.
#
# H200, CUDA 13.0, cold L2, 256 experts, top 8, 2048 / 512, another routing every launch, us by rows, pairwise in tiles
# of two or three / grouped with its sort. The whole curve: plugins/moe/records/h200.md.
#   1: 9.5 / 14.2   2: 12.8 / 17.6   3: 18.0 / 22.4   4: 25.7 / 24.7   5: 30.7 / 30.3   6: 36.1 / 33.1   8: 48.8 / 39.7
#   12: 71.2 / 48.3   16: 98.4 / 57.7   32: 190 / 88.1
# Again: muster bench moe --no-peers --rows 1,2,3,4,5,6,8,12,16,32
# A step of 8 layers of the 35B, earlier kernels, us, pairs / grouped, 2: 539 / 577   4: 793 / 668   8: 1258 / 810
#   12: 1749 / 950
_GROUPED_SOURCE = "3cd7167883104680e00e163477bdd9b135b0798967cf0609a2efb533d9666281"
_PAIRS_SOURCE = "2e3e598161bb6cab151c22ab233bb78c17bbd7a7991d82f1d69fab009cf1dde5"
_MEASURED = {
    "moe_w4a16::moe_w4a16_grouped_gate_up": _GROUPED_SOURCE,
    "moe_w4a16::moe_w4a16_grouped_down": _GROUPED_SOURCE,
    "moe::moe_unpermute_reduce_indexed": "aed1abf5e756a02f7e7d7596e5701e784c99c312abb69b771bdda36cd1ae5863",
    "moe_fused_batch2::moe_fused_batch2_gate_up": _PAIRS_SOURCE,
    "moe_fused_batch3::moe_fused_batch3_gate_up": _PAIRS_SOURCE,
}
GROUPED_ROWS = Threshold(
    "least rows of grouped expert decode",
    16,
    Evidence(
        GB10,
        "n=4 loses (31 against 56 tok/s), n>=16 wins (C=32 172.7 -> 216.2 tok/s; C=64 +9.7% on the attention side)",
        "5..15 rows",
    ),
    measured={
        H200: (
            4,
            Evidence(
                H200,
                "us of 256 experts, pairwise / grouped: n=3 18.0 / 22.4, n=4 25.7 / 24.7, n=5 30.7 / 30.3, "
                "n=8 48.8 / 39.7, n=16 98.4 / 57.7; a step of 8 layers: n=2 539 / 577, n=4 793 / 668, n=8 1258 / 810",
                "other sizes of experts; real routings, whose tokens share more experts",
                _MEASURED,
            ),
        )
    },
)
GROUPED_K_STEP = 64
# Limits of the kernels of a step's experts (moe_fused_shared): a lane of a warp has one choice and the keys of eight
# experts. They beat grouped decode at every supported row count: H200, CUDA 13.0, cold L2, 256 experts, top 8,
# 2048 / 512, us with the router, fused with a shared expert / grouped without one, 4: 27.6 / 32.4.
FUSED_ROWS, FUSED_EXPERTS, FUSED_CHOICES = 4, 256, 32


def moe_grouped_decode(
    rows: int, levers: Levers, arch: str, has_nvfp4_experts: bool = True, fused_rows: int = 0
) -> bool:
    """Decide grouped decode: enabled and (rows reach the edge, or forced). The kill switch beats the force.

    ``fused_rows`` is the number of rows served here by the two launches of a step's experts: up to it there is no edge.
    The layers of both mixers, decode and verify share this decision.
    """
    if not has_nvfp4_experts or levers.flag("MUSTER_NO_MOE_GROUPED_DECODE"):
        return False
    return rows >= max(GROUPED_ROWS.at(arch), fused_rows + 1) or levers.flag("MUSTER_MOE_GROUPED_DECODE")


def takes_fused_shared(experts: int, top_k: int, router: str, has_shared: bool, is_whole: bool) -> bool:
    """Whether router's choice, chosen experts and shared expert of a few rows may be two launches.

    Not where a layer owns a part of the experts: its choices are renumbered between router and experts.
    """
    is_served = experts <= FUSED_EXPERTS and top_k <= FUSED_CHOICES
    return is_served and router == "softmax" and has_shared and is_whole


def takes_k64(k: int, is_available: bool) -> bool:
    """Whether the grouped twin with a K step of 64 serves this K: if it divides K. Its speed is unmeasured."""
    return is_available and k % GROUPED_K_STEP == 0
