"""Every lever, value and target: it changes a decision of some shipped model, or the boot reports that it did not."""

from collections.abc import Callable

import pytest
from kernel_muster.models.build import build_plan
from kernel_muster.models.decisions import check_levers, decisions
from kernel_muster.models.levers import DISPATCH_LEVERS, MODEL_LEVERS
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookups import Lookups
from reaching import MAX_ROWS, dims_of, reach, session_for

Undecided = Callable[[str, str, str, object], bool]


CASES = [
    (lever.name, value)
    for lever in MODEL_LEVERS
    if lever.name in DISPATCH_LEVERS
    for value in {"int": (lever.maximum,), "bool": (int(not lever.default),), "enum": lever.choices[1:]}[lever.kind]
]


@pytest.fixture(scope="module")
def undecided(catalog: Catalog) -> Undecided:
    """Return whether a boot reports that a lever's value decides nothing for a model on a target."""

    def undecided(model: str, target: str, lever: str, value: object) -> bool:
        session, _ = session_for(catalog, model, target, **{lever.removeprefix("MUSTER_"): value})
        kernels, dims = Lookups(session), dims_of(model)
        build_plan(dims, kernels, None, MAX_ROWS)
        check_levers(model, kernels, lambda plan: build_plan(dims, plan, None, MAX_ROWS))
        assert {request.lever for request in session.requests} <= {lever}
        return kernels.has_failed(lever)

    return undecided


TILES = {
    "MUSTER_W4A16_K64_MIN_K", "MUSTER_W4A16_M128_ABOVE", "MUSTER_W4A16_NARROW_BLOCKS", "MUSTER_NO_W4A16_K64",
    "MUSTER_W4A16_VARIANT=v2", "MUSTER_W4A16_VARIANT=v3", "MUSTER_W4A16_CHUNKED_ROWS",
}  # fmt: skip
HOPPER = {
    "MUSTER_W4A16_HOPPER_FROM", "MUSTER_W4A16_HOPPER_FROM_SMALL", "MUSTER_W4A16_HOPPER_SMALL_MI",
    "MUSTER_W4A16_GEMV_MI", "MUSTER_W4A16_HOPPER_TINY_MI", "MUSTER_W4A16_ARM=hopper",
}  # fmt: skip
EXPERTS = {"MUSTER_MOE_GROUPED_DECODE", "MUSTER_FP32_ROUTING", "MUSTER_FFN_ARM=grouped"}
#: Attention of both models is NVFP4 as stored.
BF16_ATTENTION = {"MUSTER_BF16_TIER_ROWS", "MUSTER_FP4_PROJ_DECODE"}
# The Hopper GEMM stands before all tiles. Elsewhere no built-in family has v3.
ELSEWHERE = HOPPER | {"MUSTER_W4A16_VARIANT=v3"}
SHALLOW = {"MUSTER_W4A16_NARROW_BLOCKS", "MUSTER_NO_W4A16_K64"}
DENSE, MOE = BF16_ATTENTION | EXPERTS, BF16_ATTENTION | {"MUSTER_FFN_ARM=km", "MUSTER_GDN_IN_LARGE_ROWS"}
UNDECIDED = {
    ("qwen3.6-27b", "sm_90a"): DENSE | TILES,
    ("qwen3.6-27b", "sm_121a"): DENSE | ELSEWHERE,
    ("qwen3.6-35b-a3b", "sm_121a"): MOE | ELSEWHERE | SHALLOW,
}


@pytest.mark.parametrize(("model", "target"), UNDECIDED)
def test_lever_decides_or_the_boot_reports_it(undecided: Undecided, model: str, target: str) -> None:
    enums = {lever.name for lever in MODEL_LEVERS if lever.kind == "enum"}
    found = {
        f"{lever}={value}" if lever in enums else lever
        for lever, value in CASES
        if undecided(model, target, lever, value)
    }
    assert found == UNDECIDED[model, target]


@pytest.mark.parametrize(("target", "lever", "value"), [
    ("sm_90a", "MUSTER_W4A16_VARIANT", "v2"), ("sm_121a", "MUSTER_W4A16_VARIANT", "v2"),
    ("sm_90a", "MUSTER_NO_W4A16_K64", 1), ("sm_121a", "MUSTER_NO_W4A16_K64", 1),
    ("sm_90a", "MUSTER_W4A16_ARM", "tile"),
])  # fmt: skip
def test_lever_that_changes_what_passes_launch_is_not_reported(
    catalog: Catalog, undecided: Undecided, target: str, lever: str, value: object
) -> None:
    model = "qwen3.6-27b"
    plain = reach(catalog, model, target, scales=(True,)).launched
    asked = reach(catalog, model, target, scales=(True,), **{lever.removeprefix("MUSTER_"): value}).launched
    assert plain.keys() == asked.keys() or not undecided(model, target, lever, value)


@pytest.mark.parametrize("value", [0, 6145, 1 << 20])
def test_edge_that_some_value_would_move_is_honoured_at_every_value(undecided: Undecided, value: int) -> None:
    assert not undecided("qwen3.6-27b", "sm_121a", "MUSTER_W4A16_M128_ABOVE", value)


def test_lever_that_another_one_beats_decides_nothing(catalog: Catalog) -> None:
    given = {"MOE_GROUPED_DECODE": 1, "NO_MOE_GROUPED_DECODE": 1}
    session, _ = session_for(catalog, "qwen3.6-35b-a3b", "sm_90a", **given)
    kernels, dims = Lookups(session), dims_of("qwen3.6-35b-a3b")
    check_levers("it", kernels, lambda plan: build_plan(dims, plan, None, MAX_ROWS))
    assert {request.lever for request in session.requests} == {"MUSTER_MOE_GROUPED_DECODE"}


def test_value_that_is_the_built_in_one_asks_for_nothing(catalog: Catalog) -> None:
    session, _ = session_for(catalog, "qwen3.6-27b", "sm_90a", W4A16_VARIANT="v1", NO_W4A16_K64=0)
    check_levers("it", Lookups(session), lambda plan: pytest.fail("a plan was built"))
    assert session.requests == ()


def test_decisions_of_equal_plans_are_equal(catalog: Catalog) -> None:
    dims = dims_of("qwen3.6-35b-a3b")
    plans = [build_plan(dims, Lookups(session_for(catalog, "qwen3.6-35b-a3b", "cpu")[0]), None, 64) for _ in range(2)]
    first, second = (set(decisions(plan)) for plan in plans)
    assert first == second
    assert len(first) > 10
