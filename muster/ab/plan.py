"""The plan of a comparison."""

from collections.abc import Callable
from pathlib import Path

from kernel_muster.ab.booted import Building, Sized
from kernel_muster.ab.decoding.prompts import longest_prompt
from kernel_muster.ab.drafting import DrafterWish
from kernel_muster.ab.result import Thresholds
from kernel_muster.registry.contract.specs import Stage
from kernel_muster.registry.launch.runners import Progress
from kernel_muster.registry.values import frozen

#: Default number of drafts in each step for a model with a head.
DRAFTS = 3
#: Room after the tokens for a drafter's block; with a longer block the last steps have no drafts.
_BLOCK = 16
Say = Callable[[str], None]


@frozen(kw_only=True)
class Plan:
    """The runs of a comparison. ``drafts`` None: the default number for a model with a head, else none.

    ``drafter`` replaces the head, with its own number of drafts. ``tell_failure`` receives the exception of a builder.
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
        """Return the build of each arm's model."""
        ahead = _BLOCK if self.drafter is not None else self.drafts or DRAFTS
        whole = longest_prompt(self.prompts) + self.tokens
        return Building(
            sized=self.sized, folder=self.folder, seed=self.seed, sequences=max(self.sequences),
            context=whole + ahead + 1, reads=whole - 1, stage=self.stage, progress=self.progress,
        )  # fmt: skip
