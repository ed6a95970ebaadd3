"""The checks that decide in ``muster ab``, one by one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_muster.ab.judging import allowed_of, judge_proofs, judge_rows
from kernel_muster.ab.measure.logits import MARGIN, SPREAD, Distance, distance
from kernel_muster.ab.result import Allowed, Kernels, Proof, Row, Side, Speculation, Speed, Thresholds

SPEED = Speed(per_sequence=10.0, low=9.0, high=11.0, aggregate=40.0, prefill_s=0.1)
SIDE = Side(speed=SPEED, is_identical=True, broken=None, place="", repeats_agree=True, repeated=0.0, loop=0)
DRAFTED = Speculation(
    proposer="mtp", drafts=3, steps=40, step_ms=1.0, accepted=12, drafted=120, same_tokens=True, parted=None, margin=0.0
)
SAME = distance([[np.arange(4.0)]], [[np.arange(4.0)]], [[1]], [[1]])
OTHER: Distance = replace(SAME, same_bits=False, positions=16, worst=1e-3, worst_sequence=2, median=1e-3)
ROW = Row(
    sequences=4, prompts=4, a=SIDE, b=SIDE, speed=1.1, speed_low=1.0, speed_high=1.2,
    kernels=Kernels(differing=("m::f",), seconds_a=2.0, seconds_b=1.0, method="by hand"), distance=SAME, floor=SAME,
    allowed=Allowed(kl=0.0, median=0.0, largest=0.0, gap=0.0),
)  # fmt: skip


def checks(row: Row, **thresholds: Any) -> dict[str, tuple[str, str]]:
    """Return the last check of each name that did not pass."""
    found = judge_rows([row], Thresholds(**thresholds))
    return {check.name: (check.outcome, check.text) for check in found if check.outcome != "passed"}


def test_row_of_equal_arms_passes_every_check() -> None:
    assert checks(ROW) == {}
    assert checks(replace(ROW, a=replace(SIDE, speculation=DRAFTED), b=replace(SIDE, speculation=DRAFTED))) == {}


def allowed(max_kl: float | None = None, *, floor: Distance | None = None, routes: bool = False) -> Allowed:
    return allowed_of(Thresholds(max_kl=max_kl), floor, unrelated=0.8, routes=routes)


def test_kl_is_allowed_up_to_four_times_what_rounding_does() -> None:
    floor = replace(SAME, median=2e-4, worst=7e-4)
    assert allowed(floor=floor).kl == MARGIN * 7e-4  # the worst sequence against the worst one
    assert allowed(floor=floor).median == MARGIN * 2e-4
    assert allowed(floor=replace(floor, median=0.0)).median == 7e-4  # most positions of a small model do not move
    assert allowed(0.5, floor=floor).kl == 0.5
    assert allowed().kl == 0
    row = replace(ROW, distance=OTHER)
    assert checks(replace(row, allowed=Allowed(kl=1e-3, median=1e-3, largest=1.0, gap=0.0))) == {}
    outcome, text = checks(replace(row, allowed=Allowed(kl=0.9e-3, median=0.9e-3, largest=1.0, gap=0.0)))["kl"]
    assert (outcome, "sequence 2 has a median KL of 1.00e-03, allowed 9.00e-04" in text) == ("failed", True)


def test_median_of_all_positions_is_judged_where_one_sequence_allows_much() -> None:
    row = replace(ROW, distance=replace(OTHER, median=0.9e-3))
    found = checks(replace(row, allowed=Allowed(kl=1e-2, median=0.8e-3, largest=1.0, gap=0.0)))
    text = "the median KL of all positions is 9.00e-04, allowed 8.00e-04 (what rounding explains here)"
    assert found == {"kl": ("failed", text)}
    assert checks(replace(row, allowed=Allowed(kl=1e-2, median=0.9e-3, largest=1.0, gap=0.0))) == {}


def test_fewer_positions_than_a_median_takes_are_judged_one_by_one() -> None:
    few = replace(OTHER, positions=3, worst=0.0, median=0.5, largest=0.5)
    row = replace(ROW, distance=few, allowed=Allowed(kl=1e-4, median=1e-4, largest=0.6, gap=0.0))
    assert checks(row) == {
        "kl": ("informs", "only 3 positions of one context: too few for a median, each is judged alone")
    }
    far = checks(replace(row, allowed=Allowed(kl=1e-4, median=1e-4, largest=0.4, gap=0.0)))
    assert far["largest"][0] == "failed"
    # If the arms do not differ, even a single other bit fails.
    assert checks(replace(row, floor=None))["kl"][0] == "failed"


def test_floor_whose_texts_all_part_at_once_allows_by_all_its_positions() -> None:
    floor = replace(SAME, positions=5, worst=0.0, median=2e-4)
    assert allowed(floor=floor).kl == allowed(floor=floor).median == MARGIN * 2e-4


def test_other_bits_of_the_same_kernels_fail() -> None:
    outcome, text = checks(replace(ROW, distance=replace(OTHER, worst=0.0), floor=None))["kl"]
    assert outcome == "failed"
    assert text.endswith("a kernel is not deterministic")


def test_one_position_may_move_as_far_as_rounding_its_spread_or_a_router_moves_it() -> None:
    floor = replace(SAME, median=1e-6, worst=1e-5, largest=2e-5, reach=0.01)
    assert allowed(floor=floor).largest == pytest.approx(MARGIN * SPREAD * 1e-5)
    assert allowed(floor=replace(floor, largest=5e-3)).largest == pytest.approx(MARGIN * 5e-3)
    assert allowed(floor=floor, routes=True).largest == pytest.approx(0.8 / MARGIN)
    assert allowed(1e-3, floor=floor).largest == pytest.approx(SPREAD * 1e-3)
    assert allowed(routes=True).largest == 0


def test_one_position_that_is_far_off_fails_whatever_the_median() -> None:
    row = replace(ROW, distance=replace(OTHER, worst=0.0, median=0.0, largest=0.5, largest_at=(3, 7)))
    assert checks(replace(row, allowed=Allowed(kl=1e-4, median=1e-4, largest=0.5, gap=0.0))) == {}
    outcome, text = checks(replace(row, allowed=Allowed(kl=1e-4, median=1e-4, largest=0.4, gap=0.0)))["largest"]
    assert (outcome, text) == ("failed", "sequence 3 has a KL of 5.00e-01 at token 7, allowed 4.00e-01 at any one")


@pytest.mark.parametrize(("most", "outcome"), [(0.3, None), (0.2, "failed"), (None, "informs")])
def test_text_may_part_no_further_down_than_rounding_moves_logits(most: float | None, outcome: str | None) -> None:
    row = replace(ROW, distance=replace(OTHER, worst=0.0, parted=(1, 5), gap=0.25, is_tie=False))
    found = checks(replace(row, allowed=Allowed(kl=1.0, median=1.0, largest=1.0, gap=most)))
    assert found.get("parting", (None, ""))[0] == outcome
    assert outcome is None or "in sequence 1 at token 5, where A's choice is 0.25 nats ahead" in found["parting"][1]


def test_gap_of_another_token_is_twice_what_was_seen_and_no_less_than_the_spread_explains() -> None:
    floor = replace(SAME, worst=1e-5, reach=0.5)
    assert allowed(floor=floor).gap == pytest.approx(1.0)
    assert allowed(floor=replace(floor, reach=0.0)).gap == pytest.approx(2 * (MARGIN * SPREAD * 1e-5) ** 0.5)
    assert allowed(floor=floor, routes=True).gap == pytest.approx(max(1.0, 2 * 0.2**0.5))
    assert allowed(1.0, floor=floor).gap is None


BROKEN = replace(SIDE, is_identical=False, broken=(3, 7), place="layers.1.ffn, where m::f ran")


@pytest.mark.parametrize(
    ("a", "b", "identity", "outcome"),
    [
        (SIDE, BROKEN, "reference", "failed"),
        (BROKEN, SIDE, "reference", "informs"),
        (BROKEN, BROKEN, "reference", "informs"),
        (BROKEN, SIDE, "always", "failed"),
        (SIDE, BROKEN, "always", "failed"),
        (SIDE, BROKEN, "off", "informs"),
    ],
)
def test_identity_decides_by_policy(a: Side, b: Side, identity: Any, outcome: str) -> None:
    found, text = checks(replace(ROW, a=a, b=b), identity=identity)["identity"]
    assert found == outcome
    assert text.endswith(
        "sequence 3 has other bits than n = 1 from token 7 on, first behind layers.1.ffn, where m::f ran"
    )


def test_repeats_that_differ_fail() -> None:
    assert checks(replace(ROW, b=replace(SIDE, repeats_agree=False)))["repeats"] == (
        "failed", "B: repeats gave other tokens",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parted", "allowed", "outcome"),
    [(None, None, "informs"), ((5, 9), None, "failed"), ((5, 9), 0.69, "failed"), ((5, 9), 0.7, "informs")],
)
def test_drafts_may_turn_near_ties_and_what_rounding_turns(
    parted: tuple[int, int] | None, allowed: float | None, outcome: str
) -> None:
    drafted = replace(DRAFTED, same_tokens=False, parted=parted, margin=0.12, gap=0.7, allowed=allowed)
    found, text = checks(replace(ROW, b=replace(SIDE, speculation=drafted)))["drafting"]
    assert found == outcome
    if parted is not None:
        assert "in sequence 5 at token 9, where its logit is 12.0% below the largest, by 0.7 nats" in text
        assert text.endswith(f"rounding in every kernel may turn {allowed or 0:.2g}")


@pytest.mark.parametrize(("steps", "fails"), [(15, True), (16, False)])
def test_verify_must_have_run(steps: int, fails: bool) -> None:
    row = replace(ROW, a=replace(SIDE, speculation=replace(DRAFTED, steps=steps)))
    found = checks(row).get("verify", ("passed", ""))
    assert found[0] == ("inconclusive" if fails else "passed")
    assert ("raise --tokens or --sequences, lower --least-verify-steps, or leave drafting out" in found[1]) is fails


@pytest.mark.parametrize(("least", "fails"), [(None, False), (1.1, False), (1.11, True)])
def test_speed_decides_when_a_least_is_given(least: float | None, fails: bool) -> None:
    assert ("speed" in checks(ROW, least_speed=least)) is fails


def test_coherence_informs() -> None:
    row = replace(ROW, b=replace(SIDE, repeated=0.5))
    assert checks(row)["coherence"] == ("informs", "B repeats 50% of its 4-grams, A 0%")


@pytest.mark.parametrize("problems", [(), ("NUMERICS_FAILED: case one", "UNWRITTEN_OUTPUT: case two")])
def test_contract_of_a_kernel_that_one_arm_has_decides(problems: tuple[str, ...]) -> None:
    proof = Proof(arm="B", key="m::f", provider="acme 1.0", cases=3, worst=0.5, problems=problems)
    (check,) = judge_proofs([proof])
    assert (check.outcome == "failed") is bool(problems)
    assert check.text.startswith("m::f of arm B by acme 1.0: ")
    assert problems == () or "NUMERICS_FAILED: case one (and 1 more)" in check.text


def test_kernels_that_were_not_timed_have_no_ratio() -> None:
    assert ROW.kernels.speed == 2.0
    assert replace(ROW.kernels, seconds_b=0.0).speed is None
