"""How wrong a result is, and where, in numbers and in words."""

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.proof.proof_words import errors_of, touched

CASE = km.Case("one", {"M": 2, "N": 3})
CONTRACT = km.Contract(
    "acme_c", "a test", km.Signature((km.TensorParam("out", "f32", ("M", "N"), role="out"),)),
    lambda arguments, dims: {}, (CASE,), km.Tolerance(0.0, 0.5, "a test"),
)  # fmt: skip
WANTED = np.arange(6, dtype=np.float64).reshape(2, 3)


def test_worst_element_is_named_with_what_was_got_and_wanted():
    got = WANTED.astype(np.float32)
    got[1, 2] += 1
    got[0, 1] += 0.25
    errors = errors_of(CONTRACT, CASE, {"out": got}, {"out": WANTED})
    assert errors.worst == 2
    assert errors.relative_l2 == pytest.approx(np.sqrt(1 + 0.0625) / np.linalg.norm(WANTED))
    amount = "error is 2 times the tolerance, relative L2 0.139"
    assert str(errors) == f"{amount}; worst is out[1, 2]: got 6, wanted 5"


def test_what_is_not_a_number_is_counted_and_infinitely_wrong():
    got = WANTED.astype(np.float32)
    got[1, :2] = np.nan
    errors = errors_of(CONTRACT, CASE, {"out": got}, {"out": WANTED})
    assert (errors.worst, errors.relative_l2) == (np.inf, np.inf)
    assert str(errors) == "2 of 6 elements of out are NaN, first out[1, 0], wanted 3"


def test_empty_and_right_results_are_not_wrong():
    empty = {"out": np.zeros((0, 3))}
    assert errors_of(CONTRACT, CASE, empty, empty).worst == 0
    assert errors_of(CONTRACT, CASE, {"out": WANTED}, {"out": WANTED}).relative_l2 == 0


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ([4, 9], ""),
        ([3], "wrote outside out (6 elements): before it, element -1"),
        ([10, 11], "wrote outside out (6 elements): behind it, elements 6 to 7"),
        ([0, 2, 13], "wrote outside out (6 elements): before it, elements -4 to -2; behind it, element 9"),
    ],
)
def test_elements_outside_an_output_are_counted_from_its_start(written, said):
    buffer = np.zeros(14, np.float32)
    buffer.view(np.uint8)[:] = 0xA5
    buffer[written] = 0
    assert touched("out", buffer, 4, 6, 0xA5) == said
