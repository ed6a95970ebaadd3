"""Runs of an arm: their times, and early ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernel_muster.ab.decoding.decoders import Decoded
from kernel_muster.registry.plugin_code.watch import foreign_place, one_line
from kernel_muster.registry.values import frozen

#: The reference arm once more, with the results of some kernels moved.
FLOOR = "A, booted again to measure rounding,"


class ArmStopped(Exception):
    """A booted arm did not decode to its end."""

    def __init__(self, arm: str, where: str, error: BaseException) -> None:
        super().__init__(f"arm {arm} stopped: {raised_text(error)}")
        self.arm, self.where = arm, where


def raised_text(error: BaseException) -> str:
    """Return an exception on one line, with its kernel if the meter knows it, and its line of a plugin."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{one_line(error)}{f' ({notes})' if notes else ''}{foreign_place(error)}".split())


@contextmanager
def stops(arm: str, where: str) -> Iterator[None]:
    """Turn every exception of a kernel, of a later one or of the driver, into ArmStopped."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ArmStopped(arm, where, error) from error


@frozen
class Run:
    """The seconds of one run."""

    prefill_s: float
    decode_s: float

    def speed(self, tokens: int) -> float:
        """Return tokens a second of one sequence, after its first token."""
        return (tokens - 1) / self.decode_s if self.decode_s > 0 else float("inf")


@dataclass
class Timed:
    """Runs of both arms, pair by pair; whether each repeated the tokens of the first run; kernels' seconds in each."""

    a: list[Run] = field(default_factory=list)
    b: list[Run] = field(default_factory=list)
    agree: tuple[bool, bool] = (True, True)
    kernels_a: list[dict[str, float]] = field(default_factory=list)
    kernels_b: list[dict[str, float]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """B's speed over A's, pair by pair."""
        return [a.decode_s / b.decode_s if b.decode_s > 0 else 1.0 for a, b in zip(self.a, self.b, strict=True)]

    def add(self, a: Decoded, b: Decoded, first: tuple[Decoded, Decoded]) -> None:
        """Add a pair of runs, and whether they repeated the tokens of the first."""
        self.a.append(Run(a.prefill_s, sum(a.step_s)))
        self.b.append(Run(b.prefill_s, sum(b.step_s)))
        self.agree = (
            self.agree[0] and a.tokens == first[0].tokens,
            self.agree[1] and b.tokens == first[1].tokens,
        )
