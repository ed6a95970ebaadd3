"""Every host kernel of every built-in family against its contract: registering a kernel is testing it."""

import dataclasses
import math
from importlib.metadata import entry_points

import numpy as np
import pytest
from families import CONTRACTS, FAMILIES, MODULES, SPECS
from kernel_muster.registry.contract.contracts import Case, Contract, Tolerance
from kernel_muster.registry.contract.signature import ScalarParam, Signature, TensorParam, WeightParam, dim_symbols
from kernel_muster.registry.contract.specs import KernelSpec, Provider, PythonKernel
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.runners import HostRunner
from kernel_muster.registry.selection.handles import Handle

# Cases for a device's many tiles: host kernels go row by row and take no other path for them, only time.
LARGEST_HOST_CASE = 2e7
_WORK = (
    ("M", "N", "K"),  # projections
    ("S", "M", "Hq", "D", "B", "L"),  # attention over all pages
    ("M", "T", "H", "I"),  # experts
    ("E", "H", "I"),  # their weights
    ("M", "S", "R", "value_heads", "key_dim", "value_dim"),  # states, handed on from row to row
)


def host_work(case):
    """Return about how many products a case takes."""
    return max(math.prod(case.dims.get(name, 1) for name in names) for names in _WORK)


PROOFS = [
    pytest.param(spec, case, id=f"{key}-{case.name}")
    for key, spec in SPECS.items()
    for case in CONTRACTS[spec.contract].cases
    if host_work(case) <= LARGEST_HOST_CASE
]


def handle_of(spec, contract=None):
    return Handle(
        spec.kernel_key, spec, contract or CONTRACTS[spec.contract], Provider("test", "test", "1"), HostRunner()
    )


def arguments_of(contract, case):
    return contract.arguments(case, np.random.default_rng(7))


def copied(arguments):
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def launched(spec, contract, arguments):
    """Run a kernel on copies of the arguments and return all of them."""
    handle = handle_of(spec, contract)
    mine = copied({name: value for name, value in arguments.items() if name in contract.signature.names})
    for param in contract.signature.params:
        if isinstance(param, WeightParam):
            mine[param.name] = handle.prepare_weight(mine[param.name])
    handle(**mine)
    return mine


def bits(value):
    """Return everything an argument holds, as bytes."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    if dataclasses.is_dataclass(value):
        return b"".join(bits(getattr(value, field.name)) for field in dataclasses.fields(value))
    return repr(value).encode()


def outputs_with(arguments, contract, value):
    """Replace what a kernel shall overwrite."""
    outs = [param.name for param in contract.signature.outputs if param.role == "out"]
    return {**arguments, **{name: np.full_like(arguments[name], value) for name in outs}}


def is_within(got, expected, tolerance):
    if np.asarray(expected).shape != got.shape:
        return False
    if got.dtype.kind in "iub":
        return np.array_equal(got, expected)
    wide = np.asarray(expected, np.float64)
    error = np.abs(got.astype(np.float64) - wide)
    return bool((error <= tolerance.absolute + tolerance.relative * np.abs(wide)).all())


def violations(spec, contract, case):
    """Say what a kernel does wrong on a case."""
    arguments = arguments_of(contract, case)
    dims = contract.signature.bind("test", (), copied(arguments)).dims
    expected = contract.reference(arguments, dims)
    result = launched(spec, contract, arguments)
    again = launched(spec, contract, outputs_with(arguments, contract, 1))
    outputs = {param.name for param in contract.signature.outputs}
    found = [
        f"{name} is outside the tolerance"
        for name in sorted(outputs)
        if not is_within(result[name], expected[name], contract.tolerance_of(name, case))
    ]
    found += [f"{name} depends on what it held" for name in sorted(outputs) if bits(result[name]) != bits(again[name])]
    for name, before in arguments_of(contract, case).items():
        after = result if isinstance(before, np.ndarray) else arguments  # weights are launched uncopied
        if name not in outputs and bits(before) != bits(after[name]):
            found.append(f"input {name} was changed")
    if is_row_wise(contract) and case.dims[rows_of(contract)] != 1:
        found += _row_violations(spec, contract, arguments, result)
    return found


def rows_of(contract):
    """Return the dimension that counts rows: tokens, else sequences of one token each, else features."""
    named = {name for case in contract.cases for name in case.dims}
    return next(name for name in ("M", "S", "N") if name in named)


def is_row_wise(contract):
    """Whether rows stand side by side in every argument that has them, so that one row can be run alone."""
    rows = rows_of(contract)
    shapes = [param.shape for param in contract.signature.params if not isinstance(param, ScalarParam)]
    uses = [dim for shape in shapes for dim in shape if rows in dim_symbols(dim)]
    return rows != "N" and bool(uses) and set(uses) == {rows} and "cu_rows" not in contract.signature.names


def rows_axes(contract):
    """Return the axis of the rows for each argument that has one."""
    rows = rows_of(contract)
    tensors = [param for param in contract.signature.params if isinstance(param, TensorParam)]
    return {param.name: param.shape.index(rows) for param in tensors if rows in param.shape}


def row_of(contract, arguments, row):
    """Return the arguments of one row, outputs included."""
    cut = {name: (slice(None),) * axis + (slice(row, row + 1),) for name, axis in rows_axes(contract).items()}
    return {**arguments, **{name: arguments[name][cut[name]] for name in cut}}


def _row_violations(spec, contract, arguments, result):
    """Compare with the same kernel, and with the kernels it claims to equal, run row by row.

    What has no rows and is written, such as a pool of states, is handed on from row to row and compared at the end.
    """
    found, by_row = [], rows_axes(contract)
    for key in (spec.key, *spec.bit_identical_to):
        other, handed_on = spec if key == spec.key else SPECS[key], arguments
        names = shared_outputs(contract, other)
        for row in range(arguments_rows(contract, arguments)):
            alone = launched(other, contract_of(other, contract), row_of(contract, handed_on, row))
            together = row_of(contract, result, row)
            for name in names & by_row.keys():
                if bits(alone[name]) != bits(together[name]):
                    found.append(f"row {row} of {name} differs from {key} run on that row alone")
            handed_on = {**handed_on, **{name: alone[name] for name in names - by_row.keys()}}
        for name in sorted(names - by_row.keys()):
            if bits(handed_on[name]) != bits(result[name]):
                found.append(f"{name} differs from {key} run row by row")
    return found


def arguments_rows(contract, arguments):
    name, axis = next(iter(rows_axes(contract).items()))
    return arguments[name].shape[axis]


def contract_of(spec, default=None):
    return CONTRACTS.get(spec.contract, default)


def shared_outputs(contract, other):
    """Return the outputs that another kernel has, too: a verify form also writes what a prefill does not."""
    names = {param.name for param in contract.signature.outputs}
    return names & set(contract_of(other, contract).signature.names)


@pytest.mark.parametrize(("spec", "case"), PROOFS)
def test_kernel_on_every_case_keeps_its_contract(spec, case):
    assert violations(spec, CONTRACTS[spec.contract], case) == []


@pytest.mark.parametrize(("spec", "case"), [proof for proof in PROOFS if proof.values[0].bit_identical_to])
def test_kernel_that_claims_the_bits_of_another_has_them(spec, case):
    contract = CONTRACTS[spec.contract]
    arguments = arguments_of(contract, case)
    ours = launched(spec, contract, arguments)
    for key in spec.bit_identical_to:
        claimed = SPECS[key]
        if is_row_wise(contract) and case.dims[rows_of(contract)] != 1:
            continue  # compared row by row by the test above: the claimed kernel may take one row only
        theirs = launched(claimed, CONTRACTS[claimed.contract], arguments)
        for name in shared_outputs(contract, claimed):
            assert bits(ours[name]) == bits(theirs[name])


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
def test_contract_is_well_formed_and_says_where_its_tolerance_comes_from(contract):
    assert contract.problems() == []
    assert contract.summary
    assert len(contract.tolerance.derivation) > 20
    names = [case.name for case in contract.cases]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
def test_contract_reference_changes_nothing_and_gives_every_output(contract):
    case = contract.cases[0]
    arguments = arguments_of(contract, case)
    dims = contract.signature.bind("test", (), copied(arguments)).dims
    outputs = contract.reference(arguments, dims)
    assert sorted(outputs) == sorted(param.name for param in contract.signature.outputs)
    for name, value in arguments_of(contract, case).items():
        assert bits(value) == bits(arguments[name])


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS)
def test_contract_cases_cover_one_row_nothing_and_odd_sizes(contract):
    sizes = [case.dims for case in contract.cases]
    rows = rows_of(contract)
    assert {0, 1} <= {dims[rows] for dims in sizes}
    assert any(size % 2 and size > 1 for dims in sizes for size in dims.values())
    if "K" in sizes[0]:
        assert any(dims["K"] % 32 for dims in sizes)
        assert any(dims["K"] % 64 for dims in sizes)


def limits_of(contract):
    return [(dim, most) for dim, most in contract.signature.limits if isinstance(most, int)]


@pytest.mark.parametrize("contract", [c for c in CONTRACTS.values() if limits_of(c)], ids=lambda c: c.name)
def test_contract_one_row_above_its_limit_is_refused(contract):
    spec = next(spec for spec in SPECS.values() if spec.contract == contract.name)
    for dim, most in limits_of(contract):
        full = next(case for case in contract.cases if case.dims[dim] == most)
        case = dataclasses.replace(full, name="above", dims={**full.dims, dim: most + 1})
        with pytest.raises(ContractError, match=rf"{spec.key}: {dim} is {most + 1}, expected at most {most}"):
            launched(spec, contract, arguments_of(contract, case))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_spec_is_well_formed_and_of_the_reference_tier(spec):
    assert spec.problems() == []
    assert spec.tier == "reference"
    assert all(key in SPECS and key != spec.key for key in spec.bit_identical_to)
    takes_weight = any(isinstance(p, WeightParam) for p in CONTRACTS[spec.contract].signature.params)
    assert (spec.weight_layout is not None) == takes_weight


def test_every_contract_is_implemented_and_no_key_or_contract_appears_twice():
    specs = [spec for module in MODULES for spec in module.muster_kernels()]
    contracts = [contract for module in MODULES for contract in module.muster_contracts()]
    implemented = {spec.contract for spec in specs}
    assert implemented <= {contract.name for contract in contracts}
    # the contract of an open key may have no kernel here: anybody may provide one
    assert {contract.name for contract in contracts if not contract.open_keys} <= implemented
    assert len({contract.name for contract in contracts}) == len(contracts)
    offers = [(spec.key, spec.archs) for spec in specs]
    assert len(set(offers)) == len(offers)


def test_every_family_is_listed_as_an_entry_point():
    listed = {point.value for point in entry_points(group="kernel_muster.v1")}
    assert {f"kernel_muster.plugins.{family}" for family in FAMILIES} <= listed


# The checks above must notice a broken kernel: each of these breaks one thing.

DOUBLE = Contract(
    "double",
    "out = 2 x",
    Signature((TensorParam("x", "f32", ("M", "H")), TensorParam("out", "f32", ("M", "H"), "out"))),
    lambda arguments, dims: {"out": 2.0 * arguments["x"].astype(np.float64)},
    (Case("some", {"M": 3, "H": 5}),),
    Tolerance(0.0, 0.0, "a product by two is exact"),
)


def right(x, out):
    out[...] = 2 * x


def leaves_the_last_column(x, out):
    out[:, :-1] = 2 * x[:, :-1]


def skips_the_last_row(x, out):
    out[:-1] = 2 * x[:-1]


def is_slightly_off(x, out):
    out[...] = np.nextafter(2 * x, np.float32(9))


def changes_its_input(x, out):
    x *= 2
    out[...] = x


def adds_to_its_output(x, out):
    out[np.isnan(out)] = 0
    out += 2 * x


def depends_on_the_number_of_rows(x, out):
    out[...] = 2 * x + np.float32(len(x) == 1)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (right, ""),
        (leaves_the_last_column, "out is outside the tolerance"),
        (skips_the_last_row, "out depends on what it held"),
        (is_slightly_off, "out is outside the tolerance"),
        (changes_its_input, "input x was changed"),
        (adds_to_its_output, "out depends on what it held"),
        (depends_on_the_number_of_rows, "row 0 of out differs"),
    ],
)
def test_checks_given_a_broken_kernel_say_what_is_broken(kernel, expected):
    spec = KernelSpec(key="double::double", contract="double", archs=("cpu",), backend=PythonKernel(kernel))
    found = violations(spec, DOUBLE, DOUBLE.cases[0])
    assert any(line.startswith(expected) for line in found) if expected else found == []


def test_checks_cover_every_row_wise_contract():
    """The others route by slots (compared in test_moe.py) or take rows of several sequences (in test_mixers.py)."""
    slotted = {"transpose_nvfp4", "moe_sort_by_expert", "moe_unpermute_reduce_indexed", "moe_unpermute_shared_add"}
    slotted |= {"quantize_bf16_to_nvfp4", "quantize_bf16_to_nvfp4_t"}
    grouped = {name for name in CONTRACTS if name.startswith("moe_w4a16_grouped")}
    ragged = {name for name, contract in CONTRACTS.items() if "cu_rows" in contract.signature.names}
    assert {name for name, contract in CONTRACTS.items() if not is_row_wise(contract)} == slotted | grouped | ragged


def test_row_tiers_claim_the_bits_of_their_one_row_kernel():
    tiers = [key for key in SPECS if key.startswith("w4a16_gemv::") and "_batch" in key]
    assert tiers
    assert all(SPECS[key].bit_identical_to == (key.rsplit("_batch", 1)[0],) for key in tiers)
