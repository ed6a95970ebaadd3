"""Coherence of a greedy text from its ids: the share of repetition, and a loop at the end. It informs only.

A model with synthetic weights has no coherence to lose. With trained weights, an arm that loops while the other does
not deserves attention, but is never a verdict.
"""

from collections.abc import Sequence

from kernel_muster.registry.values import frozen

NGRAM = 4
_LEAST_ROUNDS = 3


@frozen
class Coherence:
    """``repeated``: share of 4-grams seen before; ``loop``: tokens of the final loop, else 0."""

    repeated: float
    loop: int


def coherence(tokens: Sequence[Sequence[int]]) -> Coherence:
    """Return the mean share of repeated 4-grams over sequences, and the longest loop at an end."""
    if not tokens:
        return Coherence(0.0, 0)
    shares = [_repeated(row) for row in tokens]
    return Coherence(sum(shares) / len(shares), max(loop_at_end(row) for row in tokens))


def _repeated(row: Sequence[int]) -> float:
    grams = [tuple(row[at : at + NGRAM]) for at in range(len(row) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def loop_at_end(row: Sequence[int]) -> int:
    """Return the length of a piece that repeats at the end at least three times. 0 if there is none."""
    best = 0
    for period in range(1, len(row) // _LEAST_ROUNDS + 1):
        length = period
        while length < len(row) and row[-1 - length] == row[-1 - length + period]:
            length += 1
        if length >= _LEAST_ROUNDS * period:
            best = max(best, length)
    return best
