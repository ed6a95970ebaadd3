"""Proofs of bit identity between two kernels."""

from dataclasses import replace
from itertools import cycle

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.proof.claims import same_bits
from kernel_muster.audit.proof.proofs import host_memory, prove
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.discovery.discover import discover
from sums import ONE, SUM, backwards, contract, good, raises, run, total


def test_claim_that_holds_row_by_row_is_proven(world):
    assert run(world, good, [ONE], bit_identical_to=("acme::sum_one",)).report.stage_reached == "proven"


def test_claim_with_another_order_is_broken(world):
    outcome = run(world, backwards, [ONE], bit_identical_to=("acme::sum_one",))
    assert outcome.codes == ["BIT_IDENTITY_BROKEN"]
    assert "the bits of out are not those of acme::sum_one" in outcome.finding("BIT_IDENTITY_BROKEN").why


def mean_rows(x, out):
    out[...] = total(x, range(x.shape[1])) / np.float32(x.shape[1])


def means(scale=1.0):
    """A contract of other parameters: the sum by way of the mean, if it says so."""

    def by_rows(run, arguments, dims):
        x, out = arguments["x"], arguments["out"]
        rows = [run({"x": x[row : row + 1], "out": out[row : row + 1]}) for row in range(dims["M"])]
        whole = np.concatenate([out[:0], *(row["out"] for row in rows)])
        return {"out": whole * np.float32(4 * scale)}

    return by_rows


MEAN = (
    "acme::mean",
    km.Contract(
        "acme_mean",
        "out = mean of each row",
        km.Signature(
            (km.TensorParam("x", "f32", ("M", "K")), km.TensorParam("out", "f32", ("M",), role="out")),
            limits=(("M", 1),),
        ),
        lambda arguments, dims: {"out": arguments["x"].astype(np.float64).mean(axis=1)},
        (km.Case("four", {"M": 1, "K": 4}),),
        SUM,
    ),
    mean_rows,
)


def of_four(**more):
    made = contract(**more)
    return replace(made, cases=tuple(km.Case(c.name, {**c.dims, "K": 4}) for c in made.cases))


def test_claim_on_other_parameters_is_checked_as_the_contract_says(world):
    claim = {"bit_identical_to": ("acme::mean",)}
    holds = run(world, good, [MEAN], contract=of_four(by_rows={"acme_mean": means()}), **claim)
    assert (holds.codes, holds.report.stage_reached) == ([], "proven")
    broken = run(world, good, [MEAN], contract=of_four(by_rows={"acme_mean": means(1 + 2**-23)}), **claim)
    assert broken.codes == ["BIT_IDENTITY_BROKEN"]


@pytest.mark.parametrize(
    ("others", "name", "more", "said"),
    [
        ([MEAN], "acme::mean", {}, "does not say how kernels of acme_mean make its outputs"),
        ([], "acme::gone", {}, "it claims the bits of acme::gone, which nothing serves on this target"),
        ([], "acme::sum", {}, "it claims the bits of acme::sum, which it serves itself"),
        ([MEAN], "acme::mean", {"by_rows": {"acme_mean": lambda run, arguments, dims: run({})}}, "missing x, out"),
        ([MEAN], "acme::mean", {"by_rows": {"acme_mean": lambda run, arguments, dims: 1 / 0}}, "ZeroDivisionError"),
        ([("acme::sum_one", contract("acme_sum_one", most=1), raises)], "acme::sum_one", {}, "no such stream"),
    ],
)
def test_claim_that_cannot_be_checked_is_reported_and_not_proven(world, others, name, more, said):
    outcome = run(world, good, [], contract=of_four(**more), bit_identical_to=(name,)) if not others else None
    outcome = outcome or run(world, good, others, contract=of_four(**more), bit_identical_to=(name,))
    (finding,) = [f for f in outcome.report.findings if f.subject == "acme::sum"]
    assert (finding.code, finding.severity) == ("UNCHECKED", "warn")
    assert said in finding.why
    assert {row.key: row.stage for row in outcome.report.kernels}["acme::sum"] == "loaded"


def test_output_that_the_other_way_does_not_make_is_broken(world):
    made = contract(by_rows={"acme_sum_one": lambda run, arguments, dims: {}})
    outcome = run(world, good, [ONE], contract=made, bit_identical_to=("acme::sum_one",))
    assert outcome.codes == ["BIT_IDENTITY_BROKEN"]


def test_malformed_by_rows_is_a_bad_spec(world):
    outcome = run(world, contract=contract(by_rows={"acme_sum_one": "row by row"}), stage=None)
    assert outcome.codes == ["BAD_SPEC"]


# equal bits


def bits_of(*values, dtype="f32"):
    """Return floats with these bits."""
    carrier = numpy_dtype(dtype)
    return np.array(values, f"u{carrier.itemsize}").view(carrier)


BITS = {
    "the same zero": (bits_of(0), bits_of(0), True),
    "+0 and -0": (bits_of(0), bits_of(0x80000000), False),
    "the same NaN": (bits_of(0x7FC00001), bits_of(0x7FC00001), True),
    "payloads of NaN": (bits_of(0x7FC00000), bits_of(0x7FC00001), False),
    "signs of NaN": (bits_of(0x7FC00000), bits_of(0xFFC00000), False),
    "a quiet NaN and a signalling one": (bits_of(0x7FC00001), bits_of(0x7F800001), False),
    "+0 and -0 of BF16": (bits_of(0, dtype="bf16"), bits_of(0x8000, dtype="bf16"), False),
    "payloads of NaN in BF16": (bits_of(0x7FC0, dtype="bf16"), bits_of(0x7FC1, dtype="bf16"), False),
    "+0 and -0 of E4M3": (bits_of(0, dtype="e4m3"), bits_of(0x80, dtype="e4m3"), False),
    "the last of many": (bits_of(*[1] * 999, 2), bits_of(*[1] * 999, 3), False),
    "shapes": (np.zeros(4, np.float32), np.zeros((2, 2), np.float32), False),
    "a column and its copy": (np.arange(6.0).reshape(2, 3)[:, 1], np.array([1.0, 4.0]), True),
    "orders in memory": (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), True),
    "nothing": (np.zeros(0), np.zeros(0), True),
    "no array": (np.zeros(1), None, False),
    "a list": (np.zeros(1), [0.0], False),
}


@pytest.mark.parametrize(("one", "other", "are_same"), BITS.values(), ids=BITS)
def test_equal_bits_are_bits(one, other, are_same):
    assert same_bits(one, other) is are_same
    if isinstance(other, np.ndarray):
        assert same_bits(other, one) is are_same


ZEROS = {"+0": np.float32(0.0), "-0": np.float32(-0.0)}


def sum_with_zero(sign):
    """A kernel that adds, and writes this zero where the sum is zero."""

    def adds(x, scratch, out):
        good(x, scratch, out)
        out[out == 0] = ZEROS[sign]

    return adds


@pytest.mark.parametrize(("sign", "codes"), [("+0", []), ("-0", ["BIT_IDENTITY_BROKEN"])])
def test_claim_sees_the_sign_of_a_zero(world, sign, codes):
    """Both zeros are within any tolerance."""

    def cancelling(dims, rng):
        x = rng.random((dims["M"], dims["K"]), np.float32)
        x[::2] = [1, -1, 2, -2, 0]
        return {"x": x, "scratch": None}

    made = contract(inputs=cancelling)
    other = ("acme::sum_one", contract("acme_sum_one", most=1), sum_with_zero("+0"))
    outcome = run(world, sum_with_zero(sign), [other], contract=made, bit_identical_to=("acme::sum_one",))
    assert outcome.codes == codes


@pytest.mark.parametrize(("bit", "codes"), [(0, []), (1, ["NOT_DETERMINISTIC"])])
def test_two_runs_with_other_signs_of_zero_differ(world, bit, codes):
    signs = cycle([0, bit])

    def zero(x, scratch, out):
        good(x, scratch, out)
        out.view(np.uint32)[out == 0] = next(signs) << 31

    def cancelling(dims, rng):
        rows = np.float32([[1, -1, 1, -1, 0], [2, 3, 4, 5, 6]])
        return {"x": np.resize(rows, (dims["M"], dims["K"])), "scratch": None}

    made = contract(inputs=cancelling)
    tiles = tuple(case for case in made.cases if case.name == "tiles")
    assert run(world, zero, contract=replace(made, cases=tiles)).codes == codes


# the built-in claims

CATALOG = discover()
CLAIMING = sorted(r.spec.key for r in CATALOG.kernels if r.spec.bit_identical_to and r.spec.archs == ("cpu",))
STEPWISE = [key for key in CLAIMING if key.startswith(("gated_delta_rule", "causal_conv1d"))]


def test_built_in_claims_on_forms_of_several_rows_are_there():
    names = ("chunk2", "chunk3", "decode_strided", "verify_n")
    assert {f"gated_delta_rule::gated_delta_rule_{name}" for name in names} < set(STEPWISE)
    assert "causal_conv1d::causal_conv1d_verify_n" in STEPWISE


@pytest.mark.parametrize("key", STEPWISE)
def test_built_in_claim_on_a_state_holds_and_breaks_with_one_bit(handle_of, key):
    handle = handle_of(key)
    assert [f for result in prove(handle, host_memory(), handle_of) for f in result.findings] == []

    def other_bits(name):
        def changed(**arguments):
            handle.spec.backend.function(**arguments)
            bits = arguments[name].reshape(-1).view(f"u{arguments[name].itemsize}")
            bits[-1:] ^= 1

        return changed

    for param in handle.contract.signature.outputs:
        spec = replace(handle.spec, backend=km.PythonKernel(other_bits(param.name)))
        loose = km.Tolerance(0.9, 1e-6, "bits alone are under test")
        made = replace(
            handle.contract,
            tolerance=loose,
            output_tolerances={},
            cases=tuple(replace(c, tolerance=loose) for c in handle.contract.cases),
        )
        broken = km.Handle(handle.key, spec, made, handle.provider, handle._runner)
        codes = {f.code for result in prove(broken, host_memory(), handle_of) for f in result.findings}
        assert codes == {"BIT_IDENTITY_BROKEN"}, param.name
