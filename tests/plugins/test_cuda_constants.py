"""Launchers read the numbers that they share with their kernels from the CUDA sources."""

import re
from pathlib import Path

import pytest
from kernel_muster.plugins._cuda.constants import constants

SOURCE = """\
constexpr int ONE = 7, TWO = ONE * 4 + 2;  // a comment, THREE = 1;
constexpr int BYTES = 96 * 1024 /* of a block */;
#if __CUDA_ARCH__ >= 900
constexpr int BLOCKS = 2;
#else
constexpr int BLOCKS = 4;
#endif
constexpr int SAME = 3;
constexpr int SAME = 3;
constexpr int BEST = ONE > 3 ? 1 : 2, CALL = f(3), BROKEN = 3 +;
struct Inside {
    static constexpr int HIDDEN = 1;
};
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "one.cuh"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_constants_are_integers_and_expressions_of_the_file(source: Path) -> None:
    assert constants(source, "TWO", "ONE", "BYTES", "SAME") == (30, 7, 98304, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("THREE", "one.cuh: expected one value of constexpr int THREE, got none"),
        ("HIDDEN", "one.cuh: expected one value of constexpr int HIDDEN, got none"),
        ("BLOCKS", "one.cuh: expected one value of constexpr int BLOCKS, got 2 and 4"),
        ("BEST", "one.cuh: expected an integer expression as BEST, got ONE > 3 ? 1 : 2"),
        ("CALL", "one.cuh: expected an integer expression as CALL, got f(3)"),
        ("BROKEN", "one.cuh: expected an integer expression as BROKEN, got 3 +"),
    ],
)
def test_constant_that_has_no_one_integer_is_refused(source: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        constants(source, name)
