"""Arguments outside a contract are refused, with a message of subject, place, expected and actual value."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.contracts import WeightParam
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, dim_symbols, evaluate_dim
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.errors import ContractError

BF16 = ml_dtypes.bfloat16

GEMM = Signature(
    (
        TensorParam("x", "bf16", ("M", "K")),
        WeightParam("w", "nvfp4", ("N", "K")),
        TensorParam("out", "bf16", ("M", "N"), "out"),
    ),
    multiples=(("K", 16),),
    limits=(("M", 8),),
)


def weight(n=4, k=32):
    return nvfp4.quantize(np.ones((n, k), np.float32))


def gemm(**changes):
    """Return arguments that fit, with some replaced."""
    return {"x": np.ones((2, 32), BF16), "w": weight(), "out": np.ones((2, 4), BF16), **changes}


def refusal(signature, *args, **kwargs):
    with pytest.raises(ContractError) as caught:
        signature.bind("m::f", args, kwargs)
    return str(caught.value)


# Dimensions


@pytest.mark.parametrize(
    ("dim", "value"),
    [(7, 7), ("N", 12), ("K/16", 4), ("2*N + K", 88), ("2*h*d + 2*N", 54), ("K/16 - 1", 3), ("M*T", 0)],
)
def test_dim_is_evaluated(dim, value):
    assert evaluate_dim(dim, {"N": 12, "K": 64, "h": 3, "d": 5, "M": 0, "T": 4}) == value


def test_dim_that_does_not_divide_exactly_is_a_value_error():
    with pytest.raises(ValueError, match="33 is not a multiple of 16"):
        evaluate_dim("K/16", {"K": 33})
    with pytest.raises(ValueError, match="33 is not a multiple of 0"):
        evaluate_dim("K/z", {"K": 33, "z": 0})


@pytest.mark.parametrize("dim", ["f(N)", "N**2", "N if M else K", "N.real", "[N][0]", "N//2", "1.5*N", "'N'"])
def test_dim_of_anything_but_integer_arithmetic_is_a_value_error(dim):
    with pytest.raises(ValueError, match=r"a dimension is made of|is no integer|not a multiple"):
        evaluate_dim(dim, {"N": 4, "M": 1, "K": 2})


def test_dim_symbols_are_the_names_in_it():
    assert dim_symbols("2*N + K/16") == {"N", "K"}
    assert dim_symbols(3) == set()


# Valid arguments


def test_bind_of_fitting_arguments_gives_them_by_name_with_their_dims():
    given_ = gemm()
    bound = GEMM.bind("m::f", (given_["x"], given_["w"]), {"out": given_["out"]})
    assert bound.arguments["x"] is given_["x"]
    assert list(bound.arguments) == ["x", "w", "out"]
    assert bound.dims == {"M": 2, "N": 4, "K": 32}
    assert not bound.is_empty


def test_bind_of_no_rows_is_empty():
    assert GEMM.bind("m::f", (), gemm(x=np.ones((0, 32), BF16), out=np.ones((0, 4), BF16))).is_empty


def test_bind_with_one_of_two_outputs_empty_is_not_empty():
    two = Signature((TensorParam("a", "f32", ("N",), "out"), TensorParam("b", "f32", ("M",), "out")))
    assert not two.bind("m::f", (np.ones(0, np.float32), np.ones(1, np.float32)), {}).is_empty


def test_bind_of_a_transposed_weight_uses_its_logical_shape():
    assert GEMM.bind("m::f", (), gemm(w=nvfp4.transpose(weight()))).dims["N"] == 4


def test_bind_of_rows_in_a_larger_buffer_is_allowed():
    wide = np.ones((2, 64), BF16)
    assert GEMM.bind("m::f", (), gemm(x=wide[:, :32])).dims["K"] == 32


# Invalid arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((2, 48), BF16)}, "m::f: w has shape (4, 32), expected (N, K) = (4, 48)"),
        ({"out": np.ones((2, 5), BF16)}, "m::f: out has shape (2, 5), expected (M, N) = (2, 4)"),
        ({"out": np.ones((3, 4), BF16)}, "m::f: out has shape (3, 4), expected (M, N) = (2, 4)"),
        ({"out": np.ones(8, BF16)}, "m::f: out has shape (8,), expected (M, N)"),
        ({"x": np.ones((2, 32), np.float32)}, "m::f: x has dtype float32, expected bf16"),
        ({"out": np.ones((2, 4), np.float16)}, "m::f: out has dtype float16, expected bf16"),
        ({"x": [[1.0] * 32] * 2}, "m::f: x is list, expected an array of bf16"),
        ({"x": None}, "m::f: x is NoneType, expected an array of bf16"),
        ({"w": np.ones((4, 32), BF16)}, "m::f: w is ndarray, expected a prepared nvfp4 weight"),
        ({"w": Bf16Weight(np.ones((4, 32), BF16))}, "m::f: w is quantised as bf16, expected nvfp4"),
        ({"x": np.ones((2, 64), BF16)[:, ::2]}, "m::f: x has strides (128, 4), expected a contiguous last axis"),
        ({"x": np.ones((32, 2), BF16).T}, "m::f: x has strides (2, 4), expected a contiguous last axis"),
    ],
)
def test_bind_of_an_argument_that_does_not_fit_says_what_was_expected(change, message):
    assert refusal(GEMM, **gemm(**change)) == message


def test_bind_of_a_read_only_output_is_refused():
    out = np.ones((2, 4), BF16)
    out.flags.writeable = False
    assert refusal(GEMM, **gemm(out=out)) == "m::f: out is read-only, expected an array to write"


def test_bind_of_a_read_only_input_is_allowed():
    x = np.ones((2, 32), BF16)
    x.flags.writeable = False
    assert GEMM.bind("m::f", (), gemm(x=x))


def test_bind_of_k_that_is_no_multiple_is_refused():
    dense = Signature(
        (TensorParam("x", "bf16", ("M", "K")), TensorParam("out", "bf16", ("M", "K"), "out")), (("K", 16),)
    )
    x = np.ones((1, 24), BF16)
    assert refusal(dense, x, x.copy()) == "m::f: K is 24, expected a multiple of 16"


def test_bind_above_a_limit_is_refused():
    rows = {"x": np.ones((9, 32), BF16), "out": np.ones((9, 4), BF16)}
    assert refusal(GEMM, **gemm(**rows)) == "m::f: M is 9, expected at most 8"


def test_bind_checks_limits_and_multiples_against_other_dims():
    heads = Signature(
        (TensorParam("out", "f32", ("Q", "E"), "out"), ScalarParam("d", "i32"), ScalarParam("top_k", "i32")),
        multiples=(("Q", "d"),),
        limits=(("top_k", "E"),),
    )
    out = np.ones((6, 4), np.float32)
    assert heads.bind("m::f", (out, 3, 4), {}).dims == {"Q": 6, "E": 4, "d": 3, "top_k": 4}
    assert refusal(heads, out, 4, 1) == "m::f: Q is 6, expected a multiple of d = 4"
    assert refusal(heads, out, 0, 1) == "m::f: Q is 6, expected a multiple of d = 0"
    assert refusal(heads, out, 3, 5) == "m::f: top_k is 5, expected at most E = 4"


def test_bind_of_an_expression_says_how_it_was_evaluated():
    packed = Signature((TensorParam("x", "bf16", ("N", "K")), TensorParam("out", "u8", ("N", "K/2"), "out")))
    assert packed.bind("m::f", (np.ones((2, 8), BF16), np.ones((2, 4), np.uint8)), {})
    wrong = refusal(packed, np.ones((2, 8), BF16), np.ones((2, 5), np.uint8))
    assert wrong == "m::f: out has shape (2, 5), expected (N, K/2) = (2, 4)"
    odd = refusal(packed, np.ones((2, 7), BF16), np.ones((2, 3), np.uint8))
    assert odd == "m::f: out: expected (N, K/2), but 7 is not a multiple of 2"


# Names and numbers


def test_bind_of_the_wrong_names_or_number_of_arguments_is_refused():
    fits = gemm()
    assert refusal(GEMM, *fits.values(), 1) == "m::f: takes 3 arguments (x, w, out), got 4"
    assert refusal(GEMM, fits["x"], **fits) == "m::f: x given by position and by name"
    assert refusal(GEMM, **fits, bias=1) == "m::f: no parameter bias; takes x, w, out"
    assert refusal(GEMM, x=fits["x"]) == "m::f: missing w, out; takes x, w, out"


def scaled(dtype):
    return Signature((ScalarParam("s", dtype), TensorParam("out", "f32", ("N",), "out")))


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("i32", 3, 3),
        ("i32", 3.0, 3),
        ("i32", np.int64(-7), -7),
        ("i32", BF16(5), 5),
        ("f32", BF16(0.5), 0.5),
        ("f32", 1, 1.0),
        ("f32", 0.1, np.float32(0.1)),
        ("u8", 255, 255),
    ],
)
def test_bind_converts_a_scalar_to_the_declared_type(dtype, value, expected):
    scalar = scaled(dtype).bind("m::f", (value, np.ones(1, np.float32)), {}).arguments["s"]
    assert scalar == expected
    assert isinstance(scalar, np.generic)


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("i32", 2**31, "s is 2147483648, out of range for i32"),
        ("u8", 256, "s is 256, out of range for u8"),
        ("u8", -1, "s is -1, out of range for u8"),
        ("i32", 2.5, "s is 2.5, expected a number of type i32"),
        ("i32", "3", "s is '3', expected a number of type i32"),
        ("i32", None, "s is None, expected a number of type i32"),
        ("i32", float("nan"), "s is nan, expected a number of type i32"),
        ("i32", float("inf"), "s is inf, expected a number of type i32"),
        ("f32", [1.0], "s is [1.0], expected a number of type f32"),
        ("f32", 1j, "s is 1j, expected a number of type f32"),
        ("f32", 1e300, "s is 1e+300, out of range for f32"),
        ("f32", 10**400, "out of range for f32"),
    ],
)
def test_bind_of_a_scalar_that_the_type_cannot_hold_is_refused(dtype, value, message):
    assert message in refusal(scaled(dtype), value, np.ones(1, np.float32))


def test_bind_of_a_scalar_that_arrays_contradict_is_refused():
    signature = Signature((TensorParam("x", "f32", ("heads",)), ScalarParam("heads", "i32"),
                           TensorParam("out", "f32", ("heads",), "out")))  # fmt: skip
    x = np.ones(2, np.float32)
    assert signature.bind("m::f", (x, 2, x.copy()), {}).dims["heads"] == 2
    assert refusal(signature, x, 3, x.copy()) == "m::f: heads is 3, and the arrays have 2"


def test_bind_of_a_scalar_below_its_minimum_is_refused():
    signature = Signature((ScalarParam("d", "i32", minimum=1), TensorParam("out", "f32", ("N",), "out")))
    out = np.ones(1, np.float32)
    assert signature.bind("m::f", (1, out), {}).dims["d"] == 1
    assert refusal(signature, 0, out) == "m::f: d is 0, expected at least 1"
    real = Signature((ScalarParam("eps", "f32", minimum=0.0), TensorParam("out", "f32", ("N",), "out")))
    assert refusal(real, float("nan"), out) == "m::f: eps is nan, expected at least 0.0"


@pytest.mark.parametrize("value", [np.str_("3"), np.datetime64("2026-01-01"), np.timedelta64(3), np.void(b"1")])
@pytest.mark.parametrize("dtype", ["i32", "f32"])
def test_bind_of_a_numpy_scalar_that_is_no_number_is_refused(dtype, value):
    assert f"expected a number of type {dtype}" in refusal(scaled(dtype), value, np.ones(1, np.float32))


def test_bind_without_an_optional_tensor_passes_none():
    signature = Signature((TensorParam("out", "f32", ("N",), "out"), TensorParam("bias", "f32", ("N",), optional=True)))
    out = np.ones(2, np.float32)
    assert signature.bind("m::f", (out,), {}).arguments["bias"] is None
    assert signature.bind("m::f", (out, None), {}).arguments["bias"] is None
    assert refusal(signature, out, np.ones(3, np.float32)) == "m::f: bias has shape (3,), expected (N,) = (2,)"


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_bind_of_either_of_two_dtypes_is_allowed(dtype):
    signature = Signature((TensorParam("x", "bf16|f32", ("N",)), TensorParam("out", "f32", ("N",), "out")))
    assert signature.bind("m::f", (np.ones(2, dtype), np.ones(2, np.float32)), {})
    assert "x has dtype int32, expected bf16|f32" in refusal(signature, np.ones(2, np.int32), np.ones(2, np.float32))


# Malformed signatures


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ((TensorParam("x", "f32", ("N",)),), "no parameter is an output"),
        ((TensorParam("x", "f23", ("N",), "out"),), "x: unknown dtype 'f23'; known: bf16, bool, e4m3, f16, "),
        ((TensorParam("x", "bfloat16", ("N",), "out"),), "u32, u8; did you mean bf16?"),
        ((TensorParam("x", "f32", ("N", "K/2"), "out"),), "x: dimension 'K/2' uses K, which nothing binds"),
        ((TensorParam("x", "f32", ("N", "2*"), "out"),), "x: malformed dimension '2*'"),
        ((TensorParam("x", "f32", ("N", "open(N)"), "out"),), "x: malformed dimension 'open(N)'"),
        ((ScalarParam("x", "i32"), TensorParam("x", "f32", ("N",), "out")), "two parameters are called 'x'"),
    ],
)
def test_problems_of_a_malformed_signature_name_the_parameter(params, message):
    assert any(message in problem for problem in Signature(params).problems())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"multiples": (("Q", 16),)}, "multiples: dimension 'Q' uses Q, which nothing binds"),
        ({"limits": (("M", "R"),)}, "limits: dimension 'R' uses R"),
        ({"multiples": (("M %", 16),)}, "multiples: malformed dimension"),
    ],
)
def test_problems_of_rules_name_what_nothing_binds(rules, message):
    out = TensorParam("out", "f32", ("M",), "out")
    assert any(message in problem for problem in Signature((out,), **rules).problems())


def test_problems_of_a_sound_signature_are_none():
    assert GEMM.problems() == []


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
JUNK = st.one_of(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    st.lists(st.integers(), max_size=2),
    st.builds(np.zeros, SHAPES, st.sampled_from([BF16, "f4", "i4", "O", "U1"])),
    st.sampled_from([weight(), object(), np.str_("3"), np.complex64(1), np.datetime64("2026-01-01"), np.void(b"1")]),
)
NAMED_JUNK = st.dictionaries(st.sampled_from(["x", "w", "out", "s", "y"]), JUNK, max_size=4)


@settings(max_examples=150, deadline=None)
@given(args=st.lists(JUNK, max_size=4), kwargs=NAMED_JUNK)
def test_bind_of_anything_at_all_fits_or_is_a_contract_error(args, kwargs):
    signature = Signature((*GEMM.params, ScalarParam("s", "i32")), GEMM.multiples, GEMM.limits)
    with contextlib.suppress(ContractError):
        signature.bind("m::f", args, kwargs)


@settings(max_examples=50, deadline=None)
@given(value=JUNK)
def test_bind_of_any_scalar_at_all_fits_or_is_a_contract_error(value):
    for dtype in ("i32", "u8", "f32"):
        with contextlib.suppress(ContractError):
            scaled(dtype).bind("m::f", (value, np.ones(1, np.float32)), {})
