"""Checks of a contract, and the arguments that it makes."""

import dataclasses

import numpy as np
import pytest
from kernel_muster.registry.contract.contracts import Case, Contract, Tolerance, poison_of
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam

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
        ({"cases": 5}, "cases is 5, expected a tuple of Case"),
        ({"cases": ({"M": 3},)}, "cases is ({'M': 3},), expected a tuple of Case"),
        ({"cases": (Case("some", None),)}, "case 'some': expected a name and a mapping of dimensions"),
        ({"cases": (Case("some", {}),)}, "case some gives no size for M"),
        ({"cases": (Case("odd", {"M": 2.5}),)}, "case odd: M is 2.5, expected an integer from 0 on"),
        ({"cases": (Case("less", {"M": -1}),)}, "case less: M is -1, expected an integer from 0 on"),
        ({"cases": (Case("text", {"M": "3"}),)}, "case text: M is '3', expected an integer from 0 on"),
        ({"cases": (Case("yes", {"M": True}),)}, "case yes: M is True, expected an integer from 0 on"),
        (
            {"cases": (Case("some", {"M": 3, "H": 4}), Case("few", {"M": 1, "H": 4}))},
            "cases some, few give a size for H, which no shape has",
        ),
        ({"cases": (Case("a", {"M": 3}, {"eps": 1.0}),)}, "case a gives the scalar eps, which no parameter is called"),
        ({"cases": (Case("some", {"M": 3}), Case("some", {"M": 1}))}, "two cases are called 'some'"),
        ({"cases": (Case(5, {"M": 3}),)}, "case 5: expected a name and a mapping of dimensions"),
        ({"inputs": 5}, "inputs is 5, expected a function or None"),
        ({"tolerance": Tolerance(np.inf, 0, "any")}, "tolerance: relative is inf, expected a number from 0 on"),
        ({"tolerance": Tolerance(0, 0, " ")}, "tolerance: derivation is ' ', expected where the two numbers come from"),
        ({"tolerance": Tolerance(-1, 0, "none")}, "tolerance: relative is -1, expected a number from 0 on"),
        (
            {"output_tolerances": {"out": Tolerance(0, np.nan, "any")}},
            "tolerance: absolute is nan, expected a number from 0 on",
        ),
        (
            {"cases": (Case("some", {"M": 3}, tolerance=Tolerance(np.inf, 0, "any")),)},
            "tolerance: relative is inf, expected a number from 0 on",
        ),
        ({"reference": None}, "reference is not callable"),
    ],
)
def test_contract_that_is_malformed_says_how(change, problem):
    assert dataclasses.replace(CONTRACT, **change).problems() == [problem]


def test_shape_that_is_text_is_refused_before_its_letters_count_as_dimensions():
    out = TensorParam("out", "f32", ("ROWS"), "out")  # the comma is missing
    changed = dataclasses.replace(CONTRACT, signature=Signature((out,)), output_tolerances={})
    assert changed.problems() == ["out: shape is 'ROWS', expected a tuple: ('ROWS',)"]


def test_scalar_of_a_case_is_a_parameter_with_a_value():
    out = TensorParam("out", "f32", ("M",), "out")
    changed = dataclasses.replace(CONTRACT, signature=Signature((ScalarParam("eps", "f32"), out)), output_tolerances={})
    assert changed.problems() == ["case some gives no value for the scalar eps"]
    for case in (Case("some", {"M": 3}, {"eps": 1e-6}), Case("some", {"M": 3, "eps": 1})):
        assert dataclasses.replace(changed, cases=(case,)).problems() == []


def test_case_of_a_contract_with_inputs_may_hold_what_only_these_read_or_make():
    case = Case("some", {"SEQUENCES": 3})
    made = dataclasses.replace(CONTRACT, cases=(case,), inputs=lambda dims, rng: {"x": np.zeros(dims["SEQUENCES"])})
    assert made.problems() == []
    with pytest.raises(ValueError, match="state: no size is given for M"):
        made.arguments(case, np.random.default_rng(0))


def test_arguments_poison_what_a_kernel_shall_write_and_nothing_else():
    made = CONTRACT.arguments(CONTRACT.cases[0], np.random.default_rng(0))
    assert np.isfinite(made["x"]).all()
    assert np.isfinite(made["state"]).all()
    assert np.isnan(made["out"]).all()
    assert made["count"].tolist() == [2**31 - 1]


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_poison_of_floats_is_a_nan_that_no_arithmetic_gives(name):
    dtype = numpy_dtype(name)
    poison = poison_of(dtype)
    assert np.isnan(poison.astype(np.float32))
    bits = f"u{dtype.itemsize}"
    made = [np.array(sign * np.nan, np.float32).astype(dtype) for sign in (1, -1)]
    ones = np.array(2 ** (8 * dtype.itemsize - 1) - 1, bits)  # the NaN of NVIDIA's FP32 units
    assert int(poison.view(bits)) not in {int(nan.view(bits)) for nan in made} | {int(ones)}


def test_arguments_of_integers_need_a_maker():
    indexed = Signature((TensorParam("ids", "i32", ("M",)), TensorParam("out", "f32", ("M",), "out")))
    contract = dataclasses.replace(CONTRACT, signature=indexed, output_tolerances={})
    with pytest.raises(ValueError, match="ids: a contract with integer inputs must say how to make them"):
        contract.arguments(contract.cases[0], np.random.default_rng(0))
    made = dataclasses.replace(contract, inputs=lambda dims, rng: {"ids": np.arange(dims["M"], dtype=np.int32)})
    assert made.arguments(made.cases[0], np.random.default_rng(0))["ids"].tolist() == [0, 1, 2]


def test_contract_whose_cases_are_all_empty_proves_nothing():
    signature = Signature((TensorParam("x", "f32", ("M", "K")), TensorParam("out", "f32", ("M", "2*K"), "out")))
    empty, flat = Case("empty", {"M": 0, "K": 3}), Case("flat", {"M": 3, "K": 0})
    change = {"signature": signature, "output_tolerances": {}}
    (problem,) = dataclasses.replace(CONTRACT, **change, cases=(empty, flat)).problems()
    assert "every test case is empty" in problem
    assert dataclasses.replace(CONTRACT, **change, cases=(empty, Case("some", {"M": 1, "K": 1}))).problems() == []
