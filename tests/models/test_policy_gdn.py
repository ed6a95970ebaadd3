import pytest
from kernel_muster.models.policy.gdn import decode_arm, verify_arm


@pytest.mark.parametrize(("sequences", "strided", "norm_strided", "arm"), [
    (0, True, False, "single"), (1, True, True, "norm_strided"), (1, True, False, "single"),
    (2, True, False, "strided"),
    (2, True, True, "norm_strided"), (128, False, True, "norm_strided"), (2, False, False, "single"),
])  # fmt: skip
def test_decode_arm_by_sequences_and_kernels(sequences: int, strided: bool, norm_strided: bool, arm: str) -> None:
    assert decode_arm(sequences, strided, norm_strided) == arm


@pytest.mark.parametrize(("rows", "sequences", "chunks", "has_verify", "arm"), [
    (1, 1, (2, 3), True, "verify_n"), (2, 1, (2, 3), True, "chunk"), (3, 1, (2, 3), True, "chunk"),
    (3, 1, (2,), True, "verify_n"), (4, 1, (2, 3), True, "verify_n"), (2, 2, (2, 3), True, "verify_n"),
    (17, 1, (2, 3), True, "verify_n"), (4, 1, (2, 3), False, "single"), (2, 1, (), False, "single"),
])  # fmt: skip
def test_verify_arm_by_rows_and_kernels(
    rows: int, sequences: int, chunks: tuple[int, ...], has_verify: bool, arm: str
) -> None:
    assert verify_arm(rows, sequences, chunks, has_verify) == arm
