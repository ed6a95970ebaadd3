from collections.abc import Callable

import pytest
from kernel_muster.models.policy.attention import QkvEdges, bf16_edges, qkv_arm
from kernel_muster.models.policy.bf16 import bf16_arm
from kernel_muster.registry.levers import Levers

Make = Callable[..., Levers]


@pytest.mark.parametrize(("rows", "has_batch", "levers", "arm"), [
    (0, True, {}, "gemv"), (1, True, {}, "gemv"), (2, True, {}, "gemv"), (16, True, {}, "gemv"), (17, True, {}, "gemm"),
    (1, False, {}, "gemv"), (2, False, {}, "gemm"),
    (32, True, {"BF16_GEMM_FROM": 33}, "gemv"), (33, True, {"BF16_GEMM_FROM": 33}, "gemm"),
    (1, True, {"BF16_GEMM_FROM": 1}, "gemm"),
])  # fmt: skip
def test_bf16_arm_follows_rows_and_the_edge(
    make_levers: Make, rows: int, has_batch: bool, levers: dict[str, object], arm: str
) -> None:
    assert bf16_arm(rows, has_batch, make_levers(**levers)) == arm


@pytest.mark.parametrize(("has_batch", "levers", "edges"), [
    (True, {}, QkvEdges(16, 17)), (True, {"BF16_GEMM_FROM": 33}, QkvEdges(32, 33)),
    (True, {"BF16_TIER_ROWS": 8}, QkvEdges(8, 17)), (True, {"BF16_TIER_ROWS": 8, "BF16_GEMM_FROM": 5}, QkvEdges(4, 5)),
    (True, {"BF16_GEMM_FROM": 1}, QkvEdges(0, 1)), (False, {}, QkvEdges(0, 1)),
])  # fmt: skip
def test_bf16_edges_of_qkv_projections(
    make_levers: Make, has_batch: bool, levers: dict[str, object], edges: QkvEdges
) -> None:
    assert bf16_edges(make_levers(**levers), has_batch) == edges


def test_bf16_tiles_of_three_rows_serve_between_both_edges_of_a_device(make_levers: Make) -> None:
    edges = bf16_edges(make_levers(BF16_TIER_ROWS=8, BF16_GEMM_FROM=17), has_batch=True)
    arms = [qkv_arm(rows, "decode", "auto", True, edges) for rows in (3, 4, 8, 9, 16, 17, 128)]
    assert arms == ["fused", "tiers", "tiers", "tiled", "tiled", "own", "own"]
