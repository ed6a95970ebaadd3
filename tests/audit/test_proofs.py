"""Proofs: for each code a kernel that is really broken in that way and in no other, and a good one that passes."""

import gc
import json
import threading
import time
import weakref
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit import proofs
from kernel_muster.audit.proofs import host_memory, prove
from kernel_muster.registry import stuck
from kernel_muster.registry.discovery import discover
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.watch import Worker
from numpy.lib.stride_tricks import as_strided

TILE = 8
ROWS = {"empty": 0, "one": 1, "tiles": 16, "odd": 21}
LONGEST = 5  # terms of a sum: twice the roundings of one order bound the distance of two
SUM = km.Tolerance(2 * LONGEST * 2.0**-24, 2 * LONGEST * 2.0**-24, "LONGEST FP32 additions of terms below 1")


def total(x, order):
    """Add columns in an order, in FP32."""
    out = x[:, order[0]].copy()
    for column in order[1:]:
        out += x[:, column]
    return out


def good(x, scratch, out):
    out[...] = total(x, range(x.shape[1]))


def backwards(x, scratch, out):
    out[...] = total(x, range(x.shape[1] - 1, -1, -1))


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


def raises(x, scratch, out):
    raise RuntimeError("no such stream")


def leaves(x, scratch, out):
    raise SystemExit(0)


class Speechless(Exception):
    def __str__(self):
        raise ValueError


def says_nothing(x, scratch, out):
    raise Speechless


def contract(name="acme_sum", most=None, **more):
    params = (
        km.TensorParam("x", "f32", ("M", "K")),
        km.TensorParam("scratch", "f32", ("M",), role="in", optional=True),
        km.TensorParam("out", "f32", ("M",), role="out"),
    )
    return km.Contract(
        name,
        "out = sum of each row",
        km.Signature(params, limits=(("M", most),) if most else ()),
        lambda arguments, dims: {"out": arguments["x"].astype(np.float64).sum(axis=1)},
        tuple(
            km.Case(n, {"M": m, "K": LONGEST})
            for n, m in (("empty", 0), ("one", 1), ("tiles", 16), ("odd", 21))
            if not most or m <= most
        ),
        SUM,
        **{"inputs": lambda dims, rng: {"x": rng.random((dims["M"], dims["K"]), np.float32), "scratch": None}, **more},
    )


def run(world, function=good, others=(), stage="proven", **options):
    """Boot with a kernel and ask for it; ``others`` are (key, contract, function)."""
    offers = [("acme::sum", options.pop("contract", contract()), function, options)]
    offers += [(*other, {}) for other in others]
    contracts = {made.name: made for _, made, _, _ in offers}
    kernels = [
        world.spec(key, contract=made.name, backend=km.PythonKernel(run), **more) for key, made, run, more in offers
    ]
    plugin = world.plugin("acme_plugin", kernels=kernels, contracts=list(contracts.values()))
    return world.run(world.ask(*(key for key, *_ in offers)), {"acme": plugin}, stage=stage)


ONE = ("acme::sum_one", contract("acme_sum_one", most=1), good)


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
    assert (finding.why, finding.remedies) == (said, ("correct the contract's reference",))


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


# claims of bit identity


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


# the built-in claims

CATALOG = discover()
CLAIMING = sorted(r.spec.key for r in CATALOG.kernels if r.spec.bit_identical_to and r.spec.archs == ("cpu",))
STEPWISE = [key for key in CLAIMING if key.startswith(("gated_delta_rule", "causal_conv1d"))]


@pytest.fixture(scope="module")
def handle_of():
    session = km.open_registry("cpu", levers={})._session
    return lambda key: session.handle_of(parse_key(str(key)))


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
        loose = km.Tolerance(1e9, 1e9, "bits alone are under test")
        made = replace(
            handle.contract,
            tolerance=loose,
            output_tolerances={},
            cases=tuple(replace(c, tolerance=loose) for c in handle.contract.cases),
        )
        broken = km.Handle(handle.key, spec, made, handle.provider, handle._runner)
        codes = {f.code for result in prove(broken, host_memory(), handle_of) for f in result.findings}
        assert codes == {"BIT_IDENTITY_BROKEN"}, param.name


def test_report_of_a_failed_proof_is_plain_json(world):
    from kernel_muster.audit.render_json import render_json

    report = json.loads(render_json(run(world, almost_parallel).report))
    assert report["findings"][0]["code"] == "NUMERICS_FAILED"


def test_device_that_stops_ends_the_proofs(handle_of):
    def dead():
        raise RuntimeError("cudaErrorIllegalAddress")

    memory = replace(host_memory(), wait=dead)
    (result,) = prove(handle_of("silu::silu_mul"), memory, handle_of)
    assert result.is_last
    assert result.findings[0].code == "OUT_OF_BOUNDS"
    assert "kernels after this one are not proven" in result.findings[0].why


# what does not end


def test_host_kernel_that_does_not_end_has_not_passed_and_hides_no_other(world, monkeypatch):
    monkeypatch.setattr("kernel_muster.audit.checking.CASE_S", 0.5)
    is_over = threading.Event()

    def loops(x, out):
        while not is_over.is_set():
            time.sleep(0.01)

    kernels = [world.spec("acme::a", backend=km.PythonKernel(loops)), world.spec("acme::b")]
    plugins = {"acme": world.plugin(kernels=kernels)}
    try:
        outcome = world.run(world.ask("acme::a", "acme::b"), plugins, stage="proven")
    finally:
        is_over.set()
    (found,) = outcome.report.findings
    assert (found.code, found.subject, found.severity) == ("NUMERICS_FAILED", "acme::a", "refuse")
    assert found.why == "case one: it was still running after 0.5 s, and other cases were not tried"
    assert "in loops" in found.log
    assert {row.key: row.stage for row in outcome.report.kernels} == {"acme::a": "loaded", "acme::b": "proven"}


@pytest.fixture
def device(monkeypatch):
    """Stand in for a device: what a hanging kernel has launched ends when the test does, and no earlier."""
    monkeypatch.setattr("kernel_muster.audit.checking.CASE_S", 0.5)
    monkeypatch.setattr(stuck, "_STUCK", {})
    monkeypatch.setattr(stuck, "_KEPT", [])
    is_over, launched, entered = threading.Event(), [], []

    def wait():
        if launched:
            is_over.wait()

    worker = Worker(lambda: entered.append(threading.get_ident()))
    memory = replace(host_memory(), wait=wait, watched=worker.watched, device=3)
    monkeypatch.setattr(proofs, "host_memory", lambda: memory)
    yield SimpleNamespace(launched=launched, entered=entered, memory=memory)
    is_over.set()


def hanging(device, then=None):
    """Return a kernel whose launch does not end, and which may raise after it."""

    def launches(x, out):
        device.launched.append("x")
        if then is not None:
            raise then

    return km.PythonKernel(launches)


@pytest.mark.parametrize("then", [None, RuntimeError("its second launch was refused")])
def test_launch_that_does_not_end_gives_the_device_up_and_the_boot_is_judged(world, device, then):
    kernels = [world.spec("acme::a"), world.spec("acme::b", backend=hanging(device, then)), world.spec("acme::c")]
    build = world.ask("acme::a", "acme::b", "acme::c")
    outcome = world.run(build, {"acme": world.plugin(kernels=kernels)}, stage="proven")
    assert isinstance(outcome.error, km.BootRefused)
    assert outcome.codes == ["NUMERICS_FAILED", "UNCHECKED"]
    failed, unchecked = outcome.finding("NUMERICS_FAILED"), outcome.finding("UNCHECKED")
    assert (failed.subject, failed.severity) == ("acme::b", "refuse")
    assert failed.why == "case one: it was still running after 0.5 s, and cuda:3 is given up"
    assert "in wait" in failed.log
    assert unchecked.subject == "acme::c"
    assert unchecked.why.startswith("it was not proven: cuda:3 still runs acme::b, case one, which did not end: ")
    stages = {"acme::a": "proven", "acme::b": "loaded", "acme::c": "loaded"}
    assert {row.key: row.stage for row in outcome.report.kernels} == stages


def test_thread_of_the_cases_enters_the_device_once_and_first(world, device):
    world.run(world.ask("acme::a"), {"acme": world.acme("acme::a")}, stage="proven")
    assert len(device.entered) == 1
    assert threading.get_ident() not in device.entered


def test_what_holds_memory_of_a_stuck_device_is_kept(world, device):
    class Model:
        pass

    def serves():
        model = Model()
        outcome = world.run(world.ask("acme::b"), {"acme": acme}, stage="proven")
        return weakref.ref(model), outcome.error is not None

    acme = world.plugin(kernels=[world.spec("acme::b", backend=hanging(device))])
    held, was_refused = serves()
    assert was_refused
    assert held() is not None
    stuck._KEPT.clear()
    gc.collect()
    assert held() is None


def test_device_that_is_stuck_gets_no_other_case(handle_of, device):
    stuck.mark_stuck(3, "acme::b, case one")
    (result,) = prove(handle_of("silu::silu_mul"), device.memory, handle_of)
    assert [finding.code for finding in result.findings] == ["UNCHECKED"]
    assert device.entered == []
    others = replace(device.memory, device=4)
    assert [f for result in prove(handle_of("silu::silu_mul"), others, handle_of) for f in result.findings] == []


def test_each_case_is_named_before_it_runs(handle_of):
    said = []
    handle = handle_of("silu::silu_mul")
    for result in prove(handle, host_memory(), handle_of, begin=lambda case: said.append(case.name)):
        assert said[-1] == result.case
    assert said == [case.name for case in handle.contract.cases]
