"""Proofs: for each code a kernel broken in exactly that way, and a good one that passes."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import count

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.proof.proofs import host_memory, prove
from kernel_muster.registry.contract.dtypes import numpy_dtype
from numpy.lib.stride_tricks import as_strided
from sums import LONGEST, ONE, backwards, contract, good, raises, run, total

TILE = 8
CONTRACT_IS_WRONG = ("correct the contract: its reference, inputs, cases or tolerance",)


def almost_parallel(x, scratch, out):
    """The direction is right to four digits, every second value is off by 2%."""
    good(x, scratch, out)
    out[::2] *= np.float32(1.02)


def whole_tiles_only(x, scratch, out):
    rows = len(out) if len(out) < TILE else len(out) // TILE * TILE
    out[:rows] = total(x, range(x.shape[1]))[:rows]


def divides_by_zero(x, scratch, out):
    good(x, scratch, out)
    out[-1:] = np.nan


def one_past_the_end(x, scratch, out):
    good(x, scratch, out)
    as_strided(out, (len(out) + 1,))[-1] = 0.0


def one_before_the_start(x, scratch, out):
    good(x, scratch, out)
    as_strided(out, (2,), (-out.itemsize,))[1] = 0.0


def scribbles_on_its_input(x, scratch, out):
    good(x, scratch, out)
    x[0] = 7.0


ROUND = count()


def depends_on_the_run(x, scratch, out):
    (good if next(ROUND) % 2 else backwards)(x, scratch, out)


def leaves(x, scratch, out):
    raise SystemExit(0)


class Speechless(Exception):
    def __str__(self):
        raise ValueError


def says_nothing(x, scratch, out):
    raise Speechless


def wrong_the_second_time(x, scratch, out):
    good(x, scratch, out)
    if next(ROUND) % 2:
        out[...] *= 3


def outside_the_second_time(x, scratch, out):
    (one_past_the_end if next(ROUND) % 2 else good)(x, scratch, out)


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (wrong_the_second_time, "NUMERICS_FAILED", "case one: error is"),
        (outside_the_second_time, "OUT_OF_BOUNDS", "case one: wrote outside out"),
    ],
)
def test_second_run_is_judged_too_where_runs_may_differ(world, monkeypatch, function, code, said):
    monkeypatch.setitem(globals(), "ROUND", count())
    outcome = run(world, function, deterministic=False)
    assert outcome.codes == [code]
    assert said in outcome.finding(code).why


def times_weight(x, w, out):
    out[...] = x @ w.values.astype(np.float32).T


def zeroes_its_weight(x, w, out):
    times_weight(x, w, out)
    w.values[...] = 0


def copied(weight):
    return replace(weight, values=weight.values.copy(), layout="copied")


def moved(weight):
    made = copied(weight)
    weight.values[...] = 0
    return made


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (times_weight, {"weight_layout": "bf16_row_major"}, None),
        (times_weight, {"weight_layout": "copied", "prepare": copied}, None),
        (zeroes_its_weight, {"weight_layout": "bf16_row_major"}, "changed its input w.values"),
        (zeroes_its_weight, {"weight_layout": "copied", "prepare": copied}, "changed its input prepared w.values"),
        (times_weight, {"weight_layout": "copied", "prepare": moved}, "changed its input w.values"),
    ],
)
def test_kernel_leaves_its_weight_alone(world, function, options, said):
    params = (
        km.TensorParam("x", "f32", ("M", "K")),
        km.WeightParam("w", "bf16", ("N", "K")),
        km.TensorParam("out", "f32", ("M", "N"), role="out"),
    )
    made = km.Contract(
        "acme_linear", "out = x w^T", km.Signature(params),
        lambda a, dims: {"out": a["x"].astype(np.float64) @ a["w"].values.astype(np.float64).T},
        (km.Case("one", {"M": 2, "K": 3, "N": 4}),), km.Tolerance(1e-5, 1e-5, "three FP32 additions"),
    )  # fmt: skip
    outcome = run(world, function, contract=made, **options)
    assert outcome.codes == ([] if said is None else ["OUT_OF_BOUNDS"])
    assert said is None or said in outcome.finding("OUT_OF_BOUNDS").why


def skips_the_largest(x, out):
    np.copyto(out, x, where=x != 255)


def never_says_yes(x, out):
    np.copyto(out, x, where=~x)


def one_more(x, out):
    out[...] = x + (x > 2**60)


SEEN = {}


def remembers(x, out):
    out[...] = SEEN.setdefault(out.shape, x.copy())


def copies(dtype, inputs=None, tolerance=None, **more):
    """A contract whose output is its input."""
    exact = np.float64 if dtype == "f32" else None
    params = (km.TensorParam("x", dtype, ("M",)), km.TensorParam("out", dtype, ("M",), "out", **more))
    return km.Contract(
        "acme_copy", "out = x", km.Signature(params),
        lambda arguments, dims: {"out": np.array(arguments["x"], exact)} if arguments["out"] is not None else {},
        (km.Case("few", {"M": 8}), km.Case("more", {"M": 9})),
        tolerance or km.Tolerance(0, 0, "exact"), inputs=inputs,
    )  # fmt: skip


def whole(dtype, *values):
    return lambda dims, rng: {"x": rng.permutation(np.resize(np.array(values, dtype), dims["M"]))}


@pytest.mark.parametrize(
    ("function", "made", "code", "said"),
    [
        (skips_the_largest, copies("u8", whole(np.uint8, 255, 3, 0, 7)), "UNWRITTEN_OUTPUT", "2 of 8 elements of out"),
        (never_says_yes, copies("bool", whole(bool, True, False)), "UNWRITTEN_OUTPUT", "4 of 8 elements of out"),
        (one_more, copies("i64", whole(np.int64, 2**60 + 1, 5)), "NUMERICS_FAILED", "got 1152921504606846978, wanted"),
        (remembers, copies("f32"), "NUMERICS_FAILED", "case few, with other numbers: the result is not exact"),
        (raises, copies("f32", optional=True, inputs=lambda dims, rng: {"out": None}), "UNCHECKED", "checks out: "),
        (lambda x, out: out.fill(0), copies("f32", tolerance=km.Tolerance(1, 1e30, "anything")), "UNCHECKED", "zeros"),
        (lambda x, out: out.fill(0), copies("i32", whole(np.int32, 0)), "UNCHECKED", "checks out: "),
        (good, copies("f32", lambda d, rng: {"x": np.ones(0, "f4"), "out": np.ones(0, "f4")}), "NUMERICS_FAILED",
         "inputs gives M = 0, the case says 8"),
    ],
    ids=["largest", "true", "neighbours", "remembers", "absent", "loose", "zeros", "empty"],
)  # fmt: skip
def test_proof_that_could_not_fail_passes_nothing(world, function, made, code, said):
    SEEN.clear()
    backend = (lambda x, out: function(x, None, out)) if function in (raises, good) else function
    outcome = run(world, backend, contract=made)
    assert outcome.codes == [code]
    assert said in outcome.finding(code).why
    assert outcome.report.stage_reached == "loaded"


def adds_in_float32(arguments, dims):
    return {"out": arguments["x"].sum(axis=1)}


def overwrites(arguments, dims):
    arguments["x"][...] = 0
    return {"out": arguments["x"].astype(np.float64).sum(axis=1)}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (adds_in_float32, "case empty: the reference returns out as float32, expected float64"),
        (overwrites, "case one: the reference changes its input x"),
    ],
)
def test_reference_that_no_kernel_can_be_judged_by_is_named(world, reference, said):
    finding = run(world, contract=replace(contract(), reference=reference)).finding("NUMERICS_FAILED")
    assert (finding.why, finding.remedies) == (said, CONTRACT_IS_WRONG)


def exact(arguments):
    return arguments["x"].astype(np.float64).sum(axis=1)


class Fails(Exception):
    pass


def fails(*given):
    raise Fails("no data")


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda x: x.astype(np.float16), "the reference returns out as float16, expected float64"),
        (lambda x: x.astype(numpy_dtype("bf16")), "the reference returns out as bfloat16, expected float64"),
        (lambda x: x.astype(np.complex128), "the reference returns out as complex128, expected float64"),
        (lambda x: x.astype(np.longdouble), "the reference returns out as float128, expected float64"),
        (lambda x: x.astype(np.int64), "the reference returns out as int64, expected float64"),
        (lambda x: [np.float32(one) for one in x], "the reference returns out as float32, expected float64"),
        (lambda x: [Fraction(one) for one in x], "the reference returns out as object, expected float64"),
        (lambda x: [[one] for one in x], "out has shape (21, 1), expected (21,)"),
        (lambda x: [[1.0], [1.0, 2.0]], "the reference fails: ValueError: setting an array element"),
        (lambda x: [float(one) for one in x], ""),
        (lambda x: x, ""),
    ],
)
def test_reference_gives_float64_whatever_holds_the_numbers(world, made, problem):
    reference = lambda arguments, dims: {"out": made(exact(arguments))}  # noqa: E731
    one = replace(contract(), reference=reference, cases=contract().cases[-1:])
    outcome = run(world, contract=one)
    assert outcome.codes == (["NUMERICS_FAILED"] if problem else [])
    if problem:
        finding = outcome.finding("NUMERICS_FAILED")
        assert finding.why.startswith(f"case odd: {problem}")
        assert finding.remedies == CONTRACT_IS_WRONG


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex64, object])
def test_reference_of_an_integer_output_gives_whole_numbers(world, dtype):
    made = copies("i64", whole(np.int64, 2**60 + 1, 5))
    wrong = replace(made, reference=lambda arguments, dims: {"out": arguments["x"].astype(dtype)})
    finding = run(world, lambda x, out: np.copyto(out, x), contract=wrong).finding("NUMERICS_FAILED")
    name = np.dtype(dtype).name
    assert finding.why == f"case few: the reference returns out as {name}, expected integers or bool, as in int64"
    assert finding.remedies == CONTRACT_IS_WRONG


def test_memory_that_a_reference_uses_again_does_not_hide_what_a_kernel_left_unwritten(world):
    """Its second result, for other poison, would stand where its first did: two equal results say 'left alone'."""
    memory = np.zeros(8, np.uint8)

    def reference(arguments, dims):
        memory[...] = arguments["out"]
        return {"out": memory}

    made = replace(copies("u8", whole(np.uint8, 3)), reference=reference, cases=(km.Case("few", {"M": 8}),))
    assert run(world, lambda x, out: None, contract=made).codes == ["UNCHECKED"]
    given = made.arguments(made.cases[0], np.random.default_rng(0))
    first, _ = made.expected(made.cases[0], given)
    made.expected(made.cases[0], given | {"out": ~given["out"]})
    assert first["out"].tolist() == given["out"].tolist()


def test_reference_that_returns_its_input_is_compared_as_it_was(world):
    """A view of an argument would change with it."""
    made = copies("f64", lambda dims, rng: {"x": rng.standard_normal(dims["M"])})
    made = replace(made, reference=lambda arguments, dims: {"out": arguments["x"]})
    given = made.arguments(made.cases[0], np.random.default_rng(0))
    expected, problems = made.expected(made.cases[0], given)
    assert problems == []
    assert not np.shares_memory(expected["out"], given["x"])
    assert run(world, lambda x, out: np.copyto(out, x), contract=made).codes == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reference": fails}, "the reference fails: Fails: no data"),
        ({"inputs": fails}, "the contract's inputs fail: Fails: no data"),
        (
            {"inputs": lambda dims, rng: {"x": 5, "scratch": None}},
            "the contract's inputs do not fit its signature: ContractError: ",
        ),
        ({"reference": lambda arguments, dims: 5}, "the reference returns int, expected every output by name"),
    ],
)
def test_contract_whose_code_fails_is_named_and_no_kernel(world, change, said):
    finding = run(world, contract=replace(contract(), **change)).finding("NUMERICS_FAILED")
    assert finding.why.startswith(f"case empty: {said}")
    assert finding.remedies == CONTRACT_IS_WRONG
    assert ("no data" in finding.log) == ("no data" in said)


def test_reference_is_given_the_scalar_that_the_kernel_is_given(world):
    params = (km.ScalarParam("slope", "f32"), km.TensorParam("x", "f32", ("M",)),
              km.TensorParam("out", "f32", ("M",), "out"))  # fmt: skip
    made = km.Contract(
        "acme_scale", "out = slope * x", km.Signature(params),
        lambda arguments, dims: {"out": arguments["slope"] * arguments["x"].astype(np.float64)},
        (km.Case("one", {"M": 64}, {"slope": 0.01}),), km.Tolerance(2.0**-24, 0, "one product"),
    )  # fmt: skip

    def scales(slope, x, out):
        out[...] = slope * x

    assert run(world, scales, contract=made).codes == []


def test_good_kernel_is_proven(world):
    outcome = run(world)
    assert (outcome.codes, outcome.error, outcome.report.stage_reached) == ([], None, "proven")
    assert {row.stage for row in outcome.report.kernels} == {"proven"}


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (almost_parallel, "NUMERICS_FAILED", "relative L2 0.02; worst is out[0]: got 1.85908687, wanted 1.82263434"),
        (backwards, None, ""),
        (whole_tiles_only, "UNWRITTEN_OUTPUT", "case odd: 5 of 21 elements of out unwritten, first (16,)"),
        (divides_by_zero, "NUMERICS_FAILED", "case one: 1 of 1 elements of out are NaN, first out[0], wanted 1.8"),
        (one_past_the_end, "OUT_OF_BOUNDS", "case one: wrote outside out (1 element): behind it, element 1"),
        (one_before_the_start, "OUT_OF_BOUNDS", "case one: wrote outside out (1 element): before it, element -1"),
        (scribbles_on_its_input, "OUT_OF_BOUNDS", "case one: changed its input x"),
        (depends_on_the_run, "NOT_DETERMINISTIC", "two runs differ"),
        (raises, "NUMERICS_FAILED", "RuntimeError: no such stream"),
        (leaves, "NUMERICS_FAILED", "SystemExit: 0"),
        (says_nothing, "NUMERICS_FAILED", "Speechless: (its text cannot be shown)"),
    ],
)
def test_broken_kernel_trips_exactly_its_code(world, function, code, said):
    outcome = run(world, function)
    assert outcome.codes == ([code] if code else [])
    if code:
        finding = outcome.finding(code)
        assert said in finding.why
        assert (finding.subject, finding.where, finding.severity) == ("acme::sum", ("(local)",), "refuse")
        assert outcome.report.stage_reached == "loaded"
        assert isinstance(outcome.error, km.BootRefused)


@pytest.mark.parametrize(
    ("function", "remedies"),
    [
        (one_past_the_end, ("guard the edges of partial tiles",)),
        (
            scribbles_on_its_input,
            ("write to the outputs only", "or, where the contract is yours, declare the parameter inout"),
        ),
        (
            raises,
            (
                "repair the kernel: muster explain acme::sum --target cpu --verbose shows the contract and its cases",
                "or correct the contract",
            ),
        ),
    ],
)
def test_remedies_are_those_of_what_the_host_kernel_did(world, function, remedies):
    (finding,) = run(world, function).report.findings
    assert finding.remedies == remedies


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ot": 0}, "case one: the reference gives no output out (it gives ot)"),
        ({}, "case one: the reference gives no output out (it gives nothing)"),
        (None, "case one: the reference returns NoneType, expected every output by name"),
        ({"out": np.zeros(9)}, "case one: out has shape (9,), expected (1,)"),
    ],
)
def test_reference_that_gives_other_outputs_is_named_before_its_kernel(world, given, said):
    params = (km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out"))
    made = replace(world.contract("acme_linear"), signature=km.Signature(params), reference=lambda a, dims: given)
    finding = run(world, lambda x, out: None, contract=made).finding("NUMERICS_FAILED")
    assert (finding.why, finding.remedies) == (said, CONTRACT_IS_WRONG)


@pytest.mark.parametrize("function", [almost_parallel, whole_tiles_only, raises])
def test_broken_kernel_passes_where_no_proof_was_asked_for(world, function):
    assert run(world, function, stage=None).codes == []


def test_almost_parallel_result_really_has_a_high_cosine():
    x = np.random.default_rng(0).random((4096, LONGEST), np.float32)
    out = np.empty(4096, np.float32)
    almost_parallel(x, None, out)
    exact = x.astype(np.float64).sum(axis=1)
    assert out @ exact / np.linalg.norm(out) / np.linalg.norm(exact) > 0.9999


def test_failed_kernel_keeps_the_log_of_what_it_raised(world):
    assert "RuntimeError: no such stream (at" in run(world, raises).finding("NUMERICS_FAILED").log


def test_kernel_declared_nondeterministic_may_differ_from_run_to_run(world):
    assert run(world, depends_on_the_run, deterministic=False).codes == []


def test_broken_kernel_leaves_the_others_proven(world):
    outcome = run(world, raises, [ONE])
    assert {row.key: row.stage for row in outcome.report.kernels} == {"acme::sum": "loaded", "acme::sum_one": "proven"}


def test_replay_of_a_proof_says_that_it_proved_nothing(world):
    outcome = run(world, almost_parallel)
    assert [f.code for f in outcome.replay().findings] == []
    assert [f.code for f in outcome.replay(stage="proven").findings] == ["UNCHECKED"]


def test_report_of_a_failed_proof_is_plain_json(world):
    from kernel_muster.audit.render.json_report import render_json

    report = json.loads(render_json(run(world, almost_parallel).report))
    assert report["findings"][0]["code"] == "NUMERICS_FAILED"


def test_each_case_is_named_before_it_runs(handle_of):
    said = []
    handle = handle_of("silu::silu_mul")
    for result in prove(handle, host_memory(), handle_of, begin=lambda case: said.append(case.name)):
        assert said[-1] == result.case
    assert said == [case.name for case in handle.contract.cases]
