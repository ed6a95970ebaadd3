"""What a contract says of itself, and the arguments it makes."""

import dataclasses

import numpy as np
import pytest
from kernel_muster.registry.contracts import Case, Contract, Tolerance
from kernel_muster.registry.signature import Signature, TensorParam

EXACT, LOOSE = Tolerance(0.0, 0.0, "copied"), Tolerance(0.5, 0.0, "one bit")
CONTRACT = Contract(
    "move",
    "out = x, state = 2 state",
    Signature(
        (
            TensorParam("x", "f32", ("M",)),
            TensorParam("state", "f32", ("M",), "inout"),
            TensorParam("count", "i32", (1,), "out"),
            TensorParam("out", "f32", ("M",), "out"),
        )
    ),
    lambda arguments, dims: {},
    (Case("some", {"M": 3}),),
    LOOSE,
    output_tolerances={"state": EXACT},
)


def test_contract_bounds_an_output_by_its_own_tolerance_and_others_by_the_common_one():
    assert CONTRACT.problems() == []
    assert CONTRACT.tolerance_of("state") == EXACT
    assert CONTRACT.tolerance_of("out") == LOOSE


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"output_tolerances": {"x": EXACT}}, "tolerance for 'x', which is no output"),
        ({"cases": ()}, "no test case"),
        ({"reference": None}, "reference is not callable"),
    ],
)
def test_contract_that_is_malformed_says_how(change, problem):
    assert dataclasses.replace(CONTRACT, **change).problems() == [problem]


def test_arguments_poison_what_a_kernel_shall_write_and_nothing_else():
    made = CONTRACT.arguments(CONTRACT.cases[0], np.random.default_rng(0))
    assert np.isfinite(made["x"]).all()
    assert np.isfinite(made["state"]).all()
    assert np.isnan(made["out"]).all()
    assert made["count"].tolist() == [2**31 - 1]


def test_arguments_of_integers_need_a_maker():
    indexed = Signature((TensorParam("ids", "i32", ("M",)), TensorParam("out", "f32", ("M",), "out")))
    contract = dataclasses.replace(CONTRACT, signature=indexed, output_tolerances={})
    with pytest.raises(ValueError, match="ids: a contract with integer inputs must say how to make them"):
        contract.arguments(contract.cases[0], np.random.default_rng(0))
    made = dataclasses.replace(contract, inputs=lambda dims, rng: {"ids": np.arange(dims["M"], dtype=np.int32)})
    assert made.arguments(made.cases[0], np.random.default_rng(0))["ids"].tolist() == [0, 1, 2]
