"""Coherence of a greedy text, as far as ids tell: how much repeats, and whether it ended in a loop. It informs only.

A model with synthetic weights has no coherence to lose; with trained weights an arm that loops where the other does
not is worth a look, and never a verdict.
"""

from collections.abc import Sequence

from kernel_muster.registry.values import frozen

NGRAM = 4
_LEAST_ROUNDS = 3


@frozen
class Coherence:
    """``repeated``: share of 4-grams that stood there before; ``loop``: tokens of the loop it ends in, else 0."""

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
    """Return how many tokens at the end are one piece over and over, at least three times; 0 if none."""
    best = 0
    for period in range(1, len(row) // _LEAST_ROUNDS + 1):
        length = period
        while length < len(row) and row[-1 - length] == row[-1 - length + period]:
            length += 1
        if length >= _LEAST_ROUNDS * period:
            best = max(best, length)
    return best
