"""Comparison of logits: bits, the position where two runs part, and the distance of their distributions.

Only positions with the same context are compared: up to and including the first token in which two greedy runs differ.
The logits of that token still had the same context.

**Top-k KL**: the divergence of the other arm's next-token distribution from the reference's, over the reference's k
likeliest tokens and one bin for all others, in nats.

The KL from rounding alone is measured: :mod:`kernel_muster.ab.nudge.nudging`. If the logits of two distributions differ
by e, their KL is Var(e) / 2 to second order. MARGIN = 4 therefore allows twice the measured deviation.

**Unrelated**: the KL of the reference's own distributions at neighbouring positions, which have different contexts.
Any garbage is that far off.
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
#: A median of fewer positions is the value of one of them: a sequence that parts at once has no more.
LEAST = 4
#: Rounding may swap two logits this close, relative to the larger: two units in the last place.
NEAR_TIE = 2.0**-6
#: Without routing, rounding moves no position further than this many medians: 10 or less in reduced models of every
#: kind, 50 to 130 positions each. The largest of few positions is a weaker bound.
SPREAD = 10.0


def digest(row: Any) -> bytes:
    """Return a digest of the bits of a row of logits."""
    return hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=16).digest()


def digests(rows: Sequence[Sequence[Any]]) -> tuple[tuple[bytes, ...], ...]:
    """Return the digest of each row of each sequence."""
    return tuple(tuple(map(digest, sequence)) for sequence in rows)


def not_finite(rows: Sequence[Sequence[Any]]) -> str:
    """Describe the first row of each sequence with logits that are not finite. Empty if there are none."""
    for sequence, row in enumerate(rows):
        for at, values in enumerate(row):
            bad = int((~np.isfinite(np.asarray(values).astype(np.float32))).sum())
            if bad:
                return f"sequence {sequence}, token {at}: {bad} of {len(values)} logits are no finite numbers"
    return ""


def is_flat(rows: Sequence[Sequence[Any]]) -> bool:
    """Whether every row of logits is constant, so no token is chosen. Never for a single logit.

    NaN and infinities are reported separately.
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
    """Return the top-k KL of one row of logits from the reference's. Infinite if one is not finite."""
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
    """Return the distance of a token's logit from the largest, in nats: log-probabilities have the same distance."""
    values = np.asarray(row).astype(np.float64)
    found = float(values.max() - values[token])
    return found if np.isfinite(found) else float("inf")


def margin(row: Any, token: int) -> float:
    """Return the distance of a token's logit from the largest, relative to that."""
    found = gap(row, token)
    return found / abs(float(np.asarray(row).astype(np.float64).max())) if found else 0.0


def is_near_tie(row: Any, token: int) -> bool:
    """Whether a token's logit equals the largest up to a rounding."""
    return margin(row, token) <= NEAR_TIE


def reach(reference: Any, other: Any, k: int = TOP_K) -> float:
    """Return the movement of the logits of the reference's k likeliest tokens against each other, in nats."""
    one, moved = (np.asarray(row).astype(np.float64) for row in (reference, other))
    chosen = np.argpartition(one, -min(k, one.size))[-min(k, one.size) :]
    found = float(np.ptp((moved - one)[chosen]))
    return found if np.isfinite(found) else float("inf")


def unrelated_kl(rows: Sequence[Sequence[Any]], k: int = TOP_K) -> float:
    """Return the median KL of neighbouring positions of one run. 0 where there are none."""
    found = [top_k_kl(one, other, k) for row in rows for one, other in pairwise(row)]
    return float(np.median(found)) if found else 0.0


@frozen(kw_only=True)
class Distance:
    """One run's logits against the reference's, over positions of one context.

    ``worst`` is the largest median of a sequence with LEAST positions, 0 if there is none. ``largest`` is the KL of one
    position, and ``largest_at`` its sequence and token. ``divergence`` is the first differing token in any of the
    ``diverged`` sequences, counted from 0. ``is_tie`` is true if the reference had a near tie in each of them.
    Otherwise ``parted`` is the clearest decision of the reference, by ``gap`` nats. ``reach`` is the largest movement
    of likely tokens against each other.
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
