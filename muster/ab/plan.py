"""What a comparison runs."""

from collections.abc import Callable
from pathlib import Path

from kernel_muster.ab.booted import Building, Sized
from kernel_muster.ab.decoding.prompts import longest_prompt
from kernel_muster.ab.drafting import DrafterWish
from kernel_muster.ab.result import Thresholds
from kernel_muster.registry.contract.specs import Stage
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.values import frozen

#: Drafts a step where a model has a head for them and nobody says how many.
DRAFTS = 3
#: Room behind the tokens for the block of a drafter; near the end of one with a longer block steps are plain.
_BLOCK = 16
Say = Callable[[str], None]


@frozen(kw_only=True)
class Plan:
    """What is run. ``drafts`` None: as many as usual where the model has a head for them, else none.

    ``drafter`` drafts in the place of the head, as many tokens as it makes. ``tell_failure`` is told what a builder
    raised.
    """

    sequences: tuple[int, ...]
    tokens: int
    repeats: int
    drafts: int | None
    prompts: tuple[str, ...]
    seed: int
    sized: Sized
    thresholds: Thresholds = Thresholds()
    folder: Path | None = None
    stage: Stage | None = None
    progress: Progress | None = None
    say: Say = lambda text: None
    tell_failure: Callable[[BaseException], None] = lambda error: None
    drafter: DrafterWish | None = None

    def building(self) -> Building:
        """Return how each arm's model is built."""
        ahead = _BLOCK if self.drafter is not None else self.drafts or DRAFTS
        whole = longest_prompt(self.prompts) + self.tokens
        return Building(
            sized=self.sized, folder=self.folder, seed=self.seed, sequences=max(self.sequences),
            context=whole + ahead + 1, reads=whole - 1, stage=self.stage, progress=self.progress,
        )  # fmt: skip
