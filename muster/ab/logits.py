"""Logits compared: bits, where two runs part, and how far their distributions are from each other.

Only positions with the same context are compared: those up to the first token in which two greedy runs differ. There
the token differs, and the logits that chose it had the same context still.

**Top-k KL**: the divergence of the other arm's next-token distribution from the reference's, over the reference's k
likeliest tokens and one bin for all others, in nats.

How much KL rounding alone explains is measured, see :mod:`kernel_muster.ab.nudging`. The KL of two distributions whose
logits differ by e is Var(e) / 2 to second order, so that MARGIN = 4 allows twice the deviation of the measured one.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_muster.registry.values import frozen
from numpy.typing import NDArray

TOP_K = 64
MARGIN = 4.0
#: Two logits that are this close, relative to the larger, may change places by rounding: two units in the last place.
NEAR_TIE = 2.0**-6


def digest(row: Any) -> bytes:
    """Return what tells the bits of a row of logits from any others."""
    return hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=16).digest()


def digests(rows: Sequence[Sequence[Any]]) -> tuple[tuple[bytes, ...], ...]:
    """Return the digest of each row of each sequence."""
    return tuple(tuple(map(digest, sequence)) for sequence in rows)


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


def margin(row: Any) -> float:
    """Return how far the two largest logits of a row are apart, relative to the larger."""
    values = np.asarray(row).astype(np.float64)
    second, largest = np.partition(values, -2)[-2:]
    return float((largest - second) / abs(largest)) if largest != second else 0.0


def is_near_tie(row: Any) -> bool:
    """Whether the two largest logits of a row are equal up to a rounding."""
    return margin(row) <= NEAR_TIE


@frozen(kw_only=True)
class Distance:
    """One run's logits against the reference's, over positions of one context.

    ``worst`` is the largest median of a sequence: one position may move far where a near tie of a router turns, a whole
    sequence may not. ``divergence`` is the first token that differs in any of the ``diverged`` sequences, counted from
    0; ``is_tie`` whether the reference was undecided wherever one did.
    """

    positions: int
    same_bits: bool
    median: float
    mean: float
    largest: float
    worst: float
    worst_sequence: int
    divergence: int | None
    diverged: int
    is_tie: bool


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
    same = True
    for mine, theirs, parting in zip(reference, other, partings, strict=True):
        count = len(mine) if parting is None else parting + 1
        pairs = list(zip(mine[:count], theirs[:count], strict=True))
        equal = [digest(p) == digest(q) for p, q in pairs]
        same = same and parting is None and all(equal)
        kls.append(np.array([0.0 if e else top_k_kl(p, q, k) for e, (p, q) in zip(equal, pairs, strict=True)]))
    medians = [float(np.median(row)) for row in kls]
    worst = max(range(len(kls)), key=medians.__getitem__)
    together = np.concatenate(kls)
    parted = [at for at in partings if at is not None]
    ties = [is_near_tie(rows[at]) for rows, at in zip(reference, partings, strict=True) if at is not None]
    return Distance(
        positions=together.size, same_bits=same, median=float(np.median(together)), mean=float(together.mean()),
        largest=float(together.max()),
        worst=medians[worst], worst_sequence=worst,
        divergence=min(parted, default=None), diverged=len(parted), is_tie=all(ties),
    )  # fmt: skip
