"""Logits compared: bits, where two runs part, and how far their distributions are from each other.

Only positions with the same context are compared: those up to the first token in which two greedy runs differ. There
the token differs, and the logits that chose it had the same context still.

**Top-k KL**: the divergence of the other arm's next-token distribution from the reference's, over the reference's k
likeliest tokens and one bin for all others, in nats.

The KL that rounding alone explains is measured: :mod:`kernel_muster.ab.nudge.nudging`. The KL of two
distributions whose logits differ by e is Var(e) / 2 to second order, so that MARGIN = 4 allows twice the deviation of
the measured one.

**Unrelated**: the KL of the reference's own distributions at neighbouring positions, which have different contexts.
What computes garbage is that far off, whatever the garbage is.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from kernel_muster.registry.values import frozen
from numpy.typing import NDArray

TOP_K = 64
MARGIN = 4.0
#: A median of fewer positions is the word of one of them: a sequence whose text parts at once has no more.
LEAST = 4
#: Two logits that are this close, relative to the larger, may change places by rounding: two units in the last place.
NEAR_TIE = 2.0**-6
#: Rounding moves no position further than so many medians, where nothing routes: 10 or less in reduced models of every
#: kind, 50 to 130 positions each; the largest of few positions says less than that.
SPREAD = 10.0


def digest(row: Any) -> bytes:
    """Return what tells the bits of a row of logits from any others."""
    return hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=16).digest()


def digests(rows: Sequence[Sequence[Any]]) -> tuple[tuple[bytes, ...], ...]:
    """Return the digest of each row of each sequence."""
    return tuple(tuple(map(digest, sequence)) for sequence in rows)


def not_finite(rows: Sequence[Sequence[Any]]) -> str:
    """Say which of the logits of each sequence are no finite numbers, the first row that has some; empty if none."""
    for sequence, row in enumerate(rows):
        for at, values in enumerate(row):
            bad = int((~np.isfinite(np.asarray(values).astype(np.float32))).sum())
            if bad:
                return f"sequence {sequence}, token {at}: {bad} of {len(values)} logits are no finite numbers"
    return ""


def is_flat(rows: Sequence[Sequence[Any]]) -> bool:
    """Whether every row of logits holds one number over and over, so that nothing chooses a token; of one logit, never.

    What is no number is told by itself.
    """
    every = [np.asarray(values) for row in rows for values in row]
    return bool(every) and all(len(values) > 1 and bool((values == values[0]).all()) for values in every)


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Return the first position in which two sequences differ, or None."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine != theirs:
            return at
    return None


def log_softmax(row: Any) -> NDArray[np.float64]:
    """Return log-probabilities of a row of logits."""
    values: NDArray[np.float64] = np.asarray(row).astype(np.float64)
    top = float(values.max())
    shifted: NDArray[np.float64] = values - top
    return shifted - float(np.log(np.exp(shifted).sum()))


def top_k_kl(reference: Any, other: Any, k: int = TOP_K) -> float:
    """Return the top-k KL of one row of logits from the reference's; infinite where one of them is not finite."""
    if not all(np.isfinite(np.asarray(row).astype(np.float64)).all() for row in (reference, other)):
        return float("inf")
    p, q = log_softmax(reference), log_softmax(other)
    chosen = np.argpartition(p, -min(k, p.size))[-min(k, p.size) :]
    kl = float((np.exp(p[chosen]) * (p[chosen] - q[chosen])).sum())
    rest_p, rest_q = (max(1 - float(np.exp(x[chosen]).sum()), 0.0) for x in (p, q))
    if rest_p > 1e-12:
        kl += rest_p * float(np.log(rest_p / max(rest_q, 1e-300)))
    return max(kl, 0.0)


def gap(row: Any, token: int) -> float:
    """Return by how much a token's logit is below the largest: in nats, for it is their log-probabilities' too."""
    values = np.asarray(row).astype(np.float64)
    found = float(values.max() - values[token])
    return found if np.isfinite(found) else float("inf")


def margin(row: Any, token: int) -> float:
    """Return how far a token's logit is below the largest, relative to that."""
    found = gap(row, token)
    return found / abs(float(np.asarray(row).astype(np.float64).max())) if found else 0.0


def is_near_tie(row: Any, token: int) -> bool:
    """Whether a token's logit equals the largest up to a rounding."""
    return margin(row, token) <= NEAR_TIE


def reach(reference: Any, other: Any, k: int = TOP_K) -> float:
    """Return how far the logits of the reference's k likeliest tokens moved against each other, in nats."""
    one, moved = (np.asarray(row).astype(np.float64) for row in (reference, other))
    chosen = np.argpartition(one, -min(k, one.size))[-min(k, one.size) :]
    found = float(np.ptp((moved - one)[chosen]))
    return found if np.isfinite(found) else float("inf")


def unrelated_kl(rows: Sequence[Sequence[Any]], k: int = TOP_K) -> float:
    """Return the median KL of neighbouring positions of one run; 0 where there are none."""
    found = [top_k_kl(one, other, k) for row in rows for one, other in pairwise(row)]
    return float(np.median(found)) if found else 0.0


@frozen(kw_only=True)
class Distance:
    """One run's logits against the reference's, over positions of one context.

    ``worst`` is the largest median of a sequence that has LEAST positions, 0 if none has; ``largest`` the KL of one
    position, which ``largest_at`` names as sequence and token. ``divergence`` is the first token that differs in any of
    the ``diverged`` sequences, counted from 0; ``is_tie`` whether the reference was undecided wherever one did. If not,
    ``parted`` is where it was decided most, by ``gap`` nats. ``reach`` is how far likely tokens moved against each
    other, at most.
    """

    positions: int
    same_bits: bool
    median: float
    mean: float
    largest: float
    largest_at: tuple[int, int]
    worst: float
    worst_sequence: int
    divergence: int | None
    diverged: int
    is_tie: bool
    parted: tuple[int, int] | None = None
    gap: float = 0.0
    reach: float = 0.0


def distance(
    reference: Sequence[Sequence[Any]],
    other: Sequence[Sequence[Any]],
    tokens: Sequence[Sequence[int]],
    other_tokens: Sequence[Sequence[int]],
    k: int = TOP_K,
) -> Distance:
    """Compare the logits of two runs of the same prompts."""
    partings = [first_difference(mine, theirs) for mine, theirs in zip(tokens, other_tokens, strict=True)]
    kls: list[NDArray[np.float64]] = []
    same, furthest = True, 0.0
    for mine, theirs, parting in zip(reference, other, partings, strict=True):
        count = len(mine) if parting is None else parting + 1
        pairs = list(zip(mine[:count], theirs[:count], strict=True))
        equal = [digest(p) == digest(q) for p, q in pairs]
        same = same and parting is None and all(equal)
        furthest = max(furthest, *(0.0 if e else reach(p, q, k) for e, (p, q) in zip(equal, pairs, strict=True)), 0.0)
        kls.append(np.array([0.0 if e else top_k_kl(p, q, k) for e, (p, q) in zip(equal, pairs, strict=True)]))
    medians = [float(np.median(row)) if len(row) >= LEAST else 0.0 for row in kls]
    worst = max(range(len(kls)), key=medians.__getitem__)
    together = np.concatenate(kls)
    highest = max(((float(kl), at, token) for at, row in enumerate(kls) for token, kl in enumerate(row)))
    parted = [at for at in partings if at is not None]
    decided = [
        (gap(reference[at][token], other_tokens[at][token]), at, token)
        for at, token in enumerate(partings)
        if token is not None and not is_near_tie(reference[at][token], other_tokens[at][token])
    ]
    clearest = max(decided, default=None)
    return Distance(
        positions=together.size, same_bits=same, median=float(np.median(together)), mean=float(together.mean()),
        largest=highest[0], largest_at=highest[1:],
        worst=medians[worst], worst_sequence=worst,
        divergence=min(parted, default=None), diverged=len(parted), is_tie=not decided,
        parted=clearest[1:] if clearest else None, gap=clearest[0] if clearest else 0.0, reach=furthest,
    )  # fmt: skip
