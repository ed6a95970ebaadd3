"""The judgement: KL and bit identity decide, contracts and repeatability too; coherence and speed inform."""

import math
from collections.abc import Iterable, Iterator

from kernel_muster.ab.measure.logits import LEAST, MARGIN, SPREAD, Distance
from kernel_muster.ab.result import Allowed, Check, Proof, Row, Side, Thresholds
from kernel_muster.audit.render.plain import plural

#: Greedy texts above this excess of repetition over the reference are reported.
_MORE_REPETITIVE = 0.2


def allowed_of(thresholds: Thresholds, floor: Distance | None, *, unrelated: float, routes: bool) -> Allowed:
    """Return the allowed distance between arms: as given, or measured from rounding; zero if no kernel differs.

    Each limit compares like with like:

    - A sequence's median KL: MARGIN times that of the floor's worst sequence, twice its deviation.
    - The median of all positions: MARGIN times the floor's, or the floor's worst sequence if that is more, because most
      positions of a small model may not move at all.
    - One position: MARGIN times the floor's largest, or SPREAD times the allowed median of a sequence, because the
      floor may have few positions. A router's near tie may turn in one arm only: then a position may move by half the
      deviation of an unrelated context, which garbage exceeds.
    - Another token: twice (the root of MARGIN) the observed movement of logits against each other. At least the
      deviation of a difference, 2 sqrt(KL), for the KL that spread or router allow to a position.
    """
    turned = unrelated / MARGIN if routes else 0.0
    if (most := thresholds.max_kl) is not None:
        return Allowed(kl=most, median=most, largest=max(SPREAD * most, turned), gap=None)
    if floor is None:
        return Allowed(kl=0.0, median=0.0, largest=0.0, gap=0.0)
    median = floor.worst or floor.median  # without a sequence of enough positions, all of them together
    spread = SPREAD * MARGIN * median
    return Allowed(
        kl=MARGIN * median, median=max(MARGIN * floor.median, floor.worst),
        largest=max(MARGIN * floor.largest, spread, turned),
        gap=max(math.sqrt(MARGIN) * floor.reach, 2 * math.sqrt(max(spread, turned))),
    )  # fmt: skip


def judge_rows(rows: Iterable[Row], thresholds: Thresholds) -> Iterator[Check]:
    """Yield every check of the rows of one model."""
    rows = tuple(rows)
    for row in rows:
        where = f"C={row.sequences}"
        yield _kl(row, where, thresholds)
        yield from _largest(row, where)
        yield from _parting(row, where)
        yield from _identity(row, where, thresholds)
        for name, side in (("A", row.a), ("B", row.b)):
            if not side.repeats_agree:
                yield Check(name="repeats", where=where, outcome="failed", text=f"{name}: repeats gave other tokens")
        yield from _drafted(row, where)
        yield from _speed(row, where, thresholds)
        yield from _coherence(row, where)
    yield from _verify_steps(rows, thresholds)


def judge_proofs(proofs: Iterable[Proof]) -> Iterator[Check]:
    """Yield a check for each kernel that was proven because it differs."""
    for proof in proofs:
        name = f"{proof.key} of arm {proof.arm} by {proof.provider}"
        if proof.problems:
            text = f"{name}: {proof.problems[0]}"
            text += f" (and {len(proof.problems) - 1} more)" if len(proof.problems) > 1 else ""
            yield Check(name="contract", where=proof.key, outcome="failed", text=text)
        else:
            text = f"{name}: {proof.cases} cases hold, largest error {proof.worst:.2g} of the tolerance"
            yield Check(name="contract", where=proof.key, outcome="passed", text=text)


def _kl(row: Row, where: str, thresholds: Thresholds) -> Check:
    found = row.distance
    origin = "given" if thresholds.max_kl is not None else "what rounding explains here"
    if found.same_bits:
        return Check(name="kl", where=where, outcome="passed", text="the same bits")
    is_measured = row.floor is not None or thresholds.max_kl is not None
    if is_measured and found.positions < LEAST:
        text = f"only {plural(found.positions, 'position')} of one context: too few for a median, each is judged alone"
        return Check(name="kl", where=where, outcome="informs", text=text)
    text = (
        f"sequence {found.worst_sequence} has a median KL of {found.worst:.2e}, allowed {row.allowed.kl:.2e} ({origin})"
    )
    outcome = "passed" if found.worst <= row.allowed.kl else "failed"
    if outcome == "passed" and (not found.worst or not found.median <= row.allowed.median):
        text = f"the median KL of all positions is {found.median:.2e}, allowed {row.allowed.median:.2e} ({origin})"
        outcome = "passed" if found.median <= row.allowed.median else "failed"
    if not is_measured:
        text = "other bits, although both arms ran the same kernels equally often: a kernel is not deterministic"
        outcome = "failed"
    return Check(name="kl", where=where, outcome="passed" if outcome == "passed" else "failed", text=text)


def _largest(row: Row, where: str) -> Iterator[Check]:
    """Judge the furthest position: medians do not see a kernel that is wrong from some token on."""
    found, most = row.distance, row.allowed.largest
    if found.same_bits:
        return
    sequence, token = found.largest_at
    text = f"sequence {sequence} has a KL of {found.largest:.2e} at token {token}, allowed {most:.2e} at any one"
    yield Check(name="largest", where=where, outcome="passed" if found.largest <= most else "failed", text=text)


def _parting(row: Row, where: str) -> Iterator[Check]:
    """Judge where greedy texts part: rounding turns near ties, and other tokens within its measured reach."""
    found, most = row.distance, row.allowed.gap
    if found.parted is None:
        return
    text = (
        f"B chooses another token than A in sequence {found.parted[0]} at token {found.parted[1]}, where A's choice is "
        f"{found.gap:.2g} nats ahead of it"
    )
    if most is None:
        yield Check(name="parting", where=where, outcome="informs", text=text)
        return
    text += f", allowed {most:.2g} where it is no near tie"
    yield Check(name="parting", where=where, outcome="passed" if found.gap <= most else "failed", text=text)


def _identity(row: Row, where: str, thresholds: Thresholds) -> Iterator[Check]:
    for name, side in (("A", row.a), ("B", row.b)):
        text = _identity_text(name, side)
        if side.is_identical:
            yield Check(name="identity", where=where, outcome="passed", text=text)
        elif thresholds.identity == "always" or (
            thresholds.identity == "reference" and name == "B" and row.a.is_identical
        ):
            yield Check(name="identity", where=where, outcome="failed", text=text)
        else:
            yield Check(name="identity", where=where, outcome="informs", text=text)


def _identity_text(name: str, side: Side) -> str:
    if side.broken is None:
        return f"{name}: every sequence has the bits of n = 1"
    text = f"{name}: sequence {side.broken[0]} has other bits than n = 1 from token {side.broken[1]} on"
    return f"{text}, first behind {side.place}" if side.place else text


def _drafted(row: Row, where: str) -> Iterator[Check]:
    for name, side in (("A", row.a), ("B", row.b)):
        found = side.speculation
        if found is None:
            continue
        if found.same_tokens:
            text, outcome = f"{name}: drafting gives the tokens of plain decode", "passed"
        elif found.parted is None:
            text, outcome = f"{name}: drafting parts from plain decode at near ties only", "informs"
        else:
            most = found.allowed or 0.0
            text = (
                f"{name}: drafting gives another token than plain decode in sequence {found.parted[0]} at token "
                f"{found.parted[1]}, where its logit is {found.margin:.1%} below the largest, by {found.gap:.2g} nats; "
                f"rounding in every kernel may turn {most:.2g}"
            )
            outcome = "informs" if found.gap <= most else "failed"
        yield Check(name="drafting", where=where, outcome=outcome, text=text)  # type: ignore[arg-type]


def _verify_steps(rows: tuple[Row, ...], thresholds: Thresholds) -> Iterator[Check]:
    least = thresholds.least_verify_steps
    for name, sides in (("A", [row.a for row in rows]), ("B", [row.b for row in rows])):
        found = [side.speculation for side in sides if side.speculation is not None]
        if not found:
            continue
        steps = sum(one.steps for one in found)
        text = f"{name}: {steps} verify steps ran, least {least}"
        if steps < least:
            text += (
                ": that proves nothing about speculation; raise --tokens or --sequences, lower --least-verify-steps, "
                "or leave drafting out with --drafts 0"
            )
        outcome = "passed" if steps >= least else "inconclusive"
        yield Check(name="verify", where="all", outcome=outcome, text=text)  # type: ignore[arg-type]


def _speed(row: Row, where: str, thresholds: Thresholds) -> Iterator[Check]:
    least = thresholds.least_speed
    if least is not None:
        outcome = "passed" if row.speed >= least else "failed"
        text = f"B runs at {row.speed:.2f} of A's speed, least {least:g}"
        yield Check(name="speed", where=where, outcome=outcome, text=text)  # type: ignore[arg-type]


def _coherence(row: Row, where: str) -> Iterator[Check]:
    if row.b.repeated > row.a.repeated + _MORE_REPETITIVE:
        text = f"B repeats {row.b.repeated:.0%} of its 4-grams, A {row.a.repeated:.0%}"
        yield Check(name="coherence", where=where, outcome="informs", text=text)
