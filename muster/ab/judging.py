"""The judgement: KL and bit identity decide, contracts and repeatability too; coherence and speed inform."""

from collections.abc import Iterable, Iterator

from kernel_muster.ab.logits import MARGIN, Distance
from kernel_muster.ab.result import Check, Proof, Row, Side, Thresholds

#: Greedy texts this much more repetitive than the reference's are worth a look.
_MORE_REPETITIVE = 0.2


def allowed_kl(thresholds: Thresholds, floor: Distance | None) -> float:
    """Return the KL up to which arms agree: as given, or MARGIN times what rounding was seen to do; 0 if nothing is
    there that could round differently.
    """
    if thresholds.max_kl is not None:
        return thresholds.max_kl
    return MARGIN * floor.median if floor is not None else 0.0


def judge_rows(rows: Iterable[Row], thresholds: Thresholds) -> Iterator[Check]:
    """Yield every check of the rows of one model."""
    rows = tuple(rows)
    for row in rows:
        where = f"C={row.sequences}"
        yield _kl(row, where, thresholds)
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
    text = (
        f"sequence {found.worst_sequence} has a median KL of {found.worst:.2e}, allowed {row.allowed_kl:.2e} ({origin})"
    )
    outcome = "passed" if found.worst <= row.allowed_kl else "failed"
    if row.floor is None and thresholds.max_kl is None:
        text = "other bits, although both arms ran the same kernels equally often: a kernel is not deterministic"
        outcome = "failed"
    return Check(name="kl", where=where, outcome="passed" if outcome == "passed" else "failed", text=text)


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
            text = (
                f"{name}: drafting gives another token than plain decode in sequence {found.parted[0]} at token "
                f"{found.parted[1]}, where the two likeliest logits are {found.margin:.1%} apart"
            )
            outcome = "failed"
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
            text += ": that proves nothing about speculation"
        outcome = "passed" if steps >= least else "failed"
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
