"""The layout plan: which copies of a weight the chosen kernels read, and which the model builds."""

from dataclasses import dataclass, field, replace

from kernel_muster.registry.keys import KernelKey


@dataclass
class WeightCopy:
    """One weight in one layout: who reads it, and whether and why it is built.

    ``condition`` is what a plan without values cannot know: with weights the copy is built only where it holds.
    """

    weight: str
    layout: str
    readers: set[KernelKey] = field(default_factory=set)
    size_bytes: int = 0
    reason: str = ""
    shape: tuple[int, ...] = ()
    condition: str = ""

    @property
    def is_built(self) -> bool:
        """Whether the plan builds this copy."""
        return bool(self.reason)


class LayoutPlan:
    """Collects what kernels want and what a builder builds; the audit compares the two."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], WeightCopy] = {}

    def want(self, weight: str, layout: str | None, *readers: KernelKey) -> None:
        """Say that these kernels read ``weight`` in ``layout`` (None: they read no weight)."""
        if layout is not None:
            self._copy(weight, layout).readers.update(readers)

    def build(
        self, weight: str, layout: str, size_bytes: int, reason: str, shape: tuple[int, ...] = (), condition: str = ""
    ) -> None:
        """Say that the model builds this copy, how large it is, and why; ``shape`` is that of the logical weight.

        ``condition`` says on what it depends, where a plan has no values that would decide it.
        """
        copy = self._copy(weight, layout)
        copy.size_bytes, copy.reason, copy.shape, copy.condition = size_bytes, reason, shape, condition

    @property
    def copies(self) -> tuple[WeightCopy, ...]:
        """All copies wanted or built, sorted by weight and layout. A change of one does not change the plan."""
        kept = (self._copies[place] for place in sorted(self._copies))
        return tuple(replace(copy, readers=set(copy.readers)) for copy in kept)

    @property
    def missing(self) -> tuple[WeightCopy, ...]:
        """Copies that a chosen kernel reads and nobody builds."""
        return tuple(copy for copy in self.copies if copy.readers and not copy.is_built)

    def _copy(self, weight: str, layout: str) -> WeightCopy:
        copy = self._copies.get((weight, layout))
        if copy is None:
            copy = self._copies[weight, layout] = WeightCopy(weight, layout)
        return copy
