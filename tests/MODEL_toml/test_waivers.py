from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from kernel_muster.MODEL_toml.waivers import Waiver, contradicting_levers, lever_holds, scopes_overlap
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.levers import Lever, Levers, read_levers

DECLARED = (
    Lever(name="MUSTER_FAST", kind="bool", default=None, doc="x"),
    Lever(name="MUSTER_EDGE", kind="int", default=6144, doc="x"),
)


def levers(**values: object) -> Levers:
    snapshot, findings = read_levers(DECLARED, [("given", values)])
    assert findings == []
    return snapshot


def waiver(**scope: Any) -> Waiver:
    return Waiver(key=KernelKey("w4", "f"), reason="why not", where="f:1", path=("expected_absent", "w4", "f"), **scope)


@pytest.mark.parametrize(
    ("scope", "target", "quant", "values", "expected"),
    [
        ({}, "sm_90a", "nvfp4", {}, True),
        ({"archs": ("sm_90a",)}, "sm_90a", "nvfp4", {}, True),
        ({"archs": ("sm_90a",)}, "sm_90", "nvfp4", {}, False),
        ({"archs": ("sm_90a",)}, "cpu", "nvfp4", {}, False),
        ({"archs": ("cpu",)}, "cpu", "nvfp4", {}, True),
        ({"quants": ("fp8", "bf16")}, "cpu", "nvfp4", {}, False),
        ({"quants": ("fp8", "nvfp4")}, "cpu", "nvfp4", {}, True),
        ({"levers": ("MUSTER_FAST=1",)}, "cpu", "nvfp4", {}, False),
        ({"levers": ("MUSTER_FAST=on",)}, "cpu", "nvfp4", {"MUSTER_FAST": "true"}, True),
        ({"levers": ("MUSTER_EDGE=6144",)}, "cpu", "nvfp4", {}, True),
        ({"levers": ("MUSTER_EDGE=6144", "MUSTER_FAST=1")}, "cpu", "nvfp4", {}, False),
        ({"levers": ("MUSTER_EDGE=junk",)}, "cpu", "nvfp4", {}, False),
        ({"levers": ("MUSTER_NOBODY=1",)}, "cpu", "nvfp4", {}, False),
        ({"archs": ("sm_90a",), "quants": ("fp8",)}, "sm_90a", "nvfp4", {}, False),
    ],
)
def test_in_scope_holds_only_where_every_part_of_the_scope_does(
    scope: dict[str, Any], target: str, quant: str, values: dict[str, object], expected: bool
) -> None:
    assert waiver(**scope).in_scope(target, quant, levers(**values)) is expected


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        ({"archs": ("sm_90", "cpu")}, "only on sm_90 cpu; this target is sm_90a"),
        ({"quants": ("fp8",)}, "only for quant fp8; this one is nvfp4"),
        ({"levers": ("MUSTER_EDGE=6144", "MUSTER_FAST=1")}, "only where MUSTER_FAST=1; here MUSTER_FAST is unset"),
        ({"levers": ("MUSTER_EDGE=4",)}, "only where MUSTER_EDGE=4; here MUSTER_EDGE is 6144"),
        ({"levers": ("MUSTER_NOBODY=1",)}, "only where MUSTER_NOBODY=1; here nobody declares MUSTER_NOBODY"),
        ({"archs": ("sm_90a",)}, ""),
    ],
)
def test_scope_problem_says_which_part_does_not_hold_and_what_is_here(scope: dict[str, Any], said: str) -> None:
    assert waiver(**scope).scope_problem("sm_90a", "nvfp4", levers()) == said


def test_in_scope_takes_an_arch_and_none_for_the_host() -> None:
    assert waiver(archs=("sm_121a",)).in_scope(parse_arch("sm_121a"), "nvfp4", levers())
    assert waiver(archs=("cpu",)).in_scope(None, "nvfp4", levers())


UNTIL = date(2027, 6, 30)


@pytest.mark.parametrize(
    ("as_of", "expired", "expiring"),
    [
        (UNTIL - timedelta(days=31), False, False),
        (UNTIL - timedelta(days=30), False, True),
        (UNTIL, False, True),
        (UNTIL + timedelta(days=1), True, False),
        (datetime(2027, 6, 30, 23, 59, tzinfo=UTC), False, True),
        (datetime(2027, 7, 1, 1, 0, tzinfo=timezone(timedelta(hours=2))), False, True),
        (datetime(2027, 6, 30, 23, 0, tzinfo=timezone(timedelta(hours=-2))), True, False),
        (date.max, True, False),
    ],
)
def test_until_is_the_last_day_in_utc(as_of: date, expired: bool, expiring: bool) -> None:
    assert waiver(until=UNTIL).is_expired(as_of) is expired
    assert waiver(until=UNTIL).is_expiring(as_of) is expiring


def test_waiver_without_until_never_expires() -> None:
    assert not waiver().is_expired(date.max)
    assert not waiver().is_expiring(date.max)


def test_scopes_overlap_sees_two_spellings_of_a_boolean_as_one() -> None:
    on, true, off = (waiver(levers=(f"MUSTER_FAST={value}",)) for value in ("on", "TRUE", "0"))
    assert scopes_overlap(on, true)
    assert not scopes_overlap(on, off)
    assert scopes_overlap(on, waiver(levers=("MUSTER_EDGE=1",)))


@pytest.mark.parametrize("value", ["16", "016", "+16", "+0016", " 16"])
def test_scopes_overlap_sees_every_spelling_of_a_number_as_one(value: str) -> None:
    edge, same = waiver(levers=("MUSTER_EDGE=16",)), waiver(levers=(f"MUSTER_EDGE={value}",))
    assert lever_holds(same.levers[0], levers(MUSTER_EDGE=16))
    assert scopes_overlap(edge, same)
    assert not scopes_overlap(same, waiver(levers=("MUSTER_EDGE=-16",)))


@pytest.mark.parametrize(("one", "other", "meet"), [
    ("0", "-0", True), ("off", "00", True), ("On", "+1", True), ("1_6", "16", False), ("0x10", "16", False),
    ("a", "A", False), ("9" * 19, "0" + "9" * 19, False),
])  # fmt: skip
def test_scopes_overlap_where_some_lever_reads_both_values_alike(one: str, other: str, meet: bool) -> None:
    first, second = (waiver(levers=(f"MUSTER_EDGE={value}",)) for value in (one, other))
    assert scopes_overlap(first, second) is meet


def test_scope_that_contradicts_itself_meets_nothing() -> None:
    never = waiver(levers=("MUSTER_EDGE=1", "MUSTER_EDGE=2"))
    assert not scopes_overlap(never, waiver(levers=("MUSTER_EDGE=2",)))
    assert not scopes_overlap(waiver(), never)
    assert contradicting_levers(never.levers) == never.levers
    assert contradicting_levers(("MUSTER_EDGE=1", "MUSTER_FAST=0", "MUSTER_EDGE=+1")) == ()


def test_scope_in_words_names_every_part() -> None:
    scoped = waiver(archs=("sm_90a", "cpu"), levers=("MUSTER_FAST=1",))
    assert scoped.scope == "archs sm_90a cpu, levers MUSTER_FAST=1"
    assert waiver().scope == ""
