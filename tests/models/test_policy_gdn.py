from collections.abc import Callable

import pytest
from kernel_muster.models.decode.prefill import CAPTURED_ROWS
from kernel_muster.models.policy.gdn import (
    CHUNKED_PREFILL_ROWS,
    decode_arm,
    is_chunked_size,
    is_one_launch,
    prefill_arm,
    verify_arm,
)
from kernel_muster.models.policy.rows import CAPTURED_BATCH_SIZES, padded_rows
from kernel_muster.registry.levers import Levers


@pytest.mark.parametrize(("strided", "norm_strided", "arm"), [
    (True, True, "norm_strided"), (False, True, "norm_strided"), (True, False, "strided"), (False, False, "single"),
])  # fmt: skip
def test_decode_arm_by_kernels(strided: bool, norm_strided: bool, arm: str) -> None:
    assert decode_arm(strided, norm_strided) == arm


@pytest.mark.parametrize(("rows", "sequences", "chunks", "has_verify", "arm"), [
    (1, 1, (2, 3), True, "verify_n"), (2, 1, (2, 3), True, "chunk"), (3, 1, (2, 3), True, "chunk"),
    (3, 1, (2,), True, "verify_n"), (4, 1, (2, 3), True, "verify_n"), (2, 2, (2, 3), True, "verify_n"),
    (17, 1, (2, 3), True, "verify_n"), (4, 1, (2, 3), False, "single"), (2, 1, (), False, "single"),
])  # fmt: skip
def test_verify_arm_by_rows_and_kernels(
    rows: int, sequences: int, chunks: tuple[int, ...], has_verify: bool, arm: str
) -> None:
    assert verify_arm(rows, sequences, chunks, has_verify) == arm


@pytest.mark.parametrize(("sequences", "edges"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (16, 16), (17, 32)])
def test_prefill_arm_is_chunks_above_so_many_rows_a_sequence(sequences: int, edges: int) -> None:
    edge = edges * CHUNKED_PREFILL_ROWS.value
    assert [prefill_arm(rows, sequences, has_chunked=True) for rows in (1, edge)] == ["prefill"] * 2
    assert [prefill_arm(rows, sequences, has_chunked=True) for rows in (edge + 1, 8192)] == ["prefill_chunked"] * 2
    assert prefill_arm(8192, sequences, has_chunked=False) == "prefill"


def test_prefill_arm_of_a_recorded_pass_is_that_of_its_prompts() -> None:
    for rows in range(1, CAPTURED_ROWS[-1]):
        size = next(size for size in CAPTURED_ROWS if size >= rows)
        for sequences in range(1, min(rows, CAPTURED_BATCH_SIZES[-1]) + 1):
            recorded = prefill_arm(size, padded_rows(sequences), has_chunked=True)
            assert recorded == prefill_arm(rows, sequences, has_chunked=True)


@pytest.mark.parametrize(("key_dim", "value_dim", "is_chunked"), [
    (128, 128, True), (128, 32, True), (128, 48, False), (64, 128, False), (256, 128, False),
])  # fmt: skip
def test_chunks_are_for_the_sizes_that_are_compiled(key_dim: int, value_dim: int, is_chunked: bool) -> None:
    assert is_chunked_size(key_dim, value_dim) == is_chunked


@pytest.mark.parametrize(("rows", "shape", "levers", "is_one"), [
    (1, (16384, 5120), {}, True), (4, (16384, 5120), {}, True), (5, (16384, 5120), {}, False),
    (8, (12288, 2048), {}, True), (9, (12288, 2048), {}, False), (9, (64, 64), {}, False),
    (8, (16384, 5120), {"GDN_IN_LARGE_ROWS": 8}, True), (1, (16384, 5120), {"GDN_IN_LARGE_ROWS": 0}, False),
    (8, (16384, 5120), {"GDN_IN_LARGE_MI": 80}, True), (5, (12288, 2048), {"GDN_IN_LARGE_MI": 23}, False),
])  # fmt: skip
def test_inputs_of_few_rows_are_one_launch_and_of_fewer_where_the_projection_is_large(
    make_levers: Callable[..., Levers], rows: int, shape: tuple[int, int], levers: dict[str, object], is_one: bool
) -> None:
    assert is_one_launch(rows, *shape, make_levers(**levers)) is is_one
