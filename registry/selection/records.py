"""What lookups leave behind: one row for each question, with all its sites, counts and layers."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kernel_muster.registry.errors import Lacks
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.values import frozen

LookupKind = Literal["optional", "required"]
Phase = Literal["boot", "late"]
#: What a question that nobody can answer is recorded as.
MALFORMED = "(malformed lookup)"


@dataclass
class LookupRow:
    """One question: a key, or a preference chain of several, asked for from any number of places."""

    members: tuple[KernelKey, ...]
    kind: LookupKind
    requested_by: str | None = None
    phase: Phase = "boot"
    when: str = ""
    reached_by: str = ""  # the decisions or levers that launch it
    sites: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> KernelKey:
        """The key, or the first member of the chain."""
        return self.members[0]

    @property
    def is_chain(self) -> bool:
        """Whether it is a preference chain."""
        return len(self.members) > 1

    @property
    def count(self) -> int:
        """How often it was asked."""
        return sum(self.sites.values())

    @property
    def question(self) -> tuple[tuple[KernelKey, ...], str, str, str]:
        """What makes two rows one."""
        return self.members, self.kind, self.requested_by or "", self.phase

    def add(self, site: str, layer: str, times: int) -> None:
        """Count more lookups from a site, for a layer (empty: none was named)."""
        self.sites[site] = self.sites.get(site, 0) + times
        if layer:
            self.layers[layer] = self.layers.get(layer, 0) + times


@frozen
class LateRegistration:
    """Somebody called ``register`` after the seal."""

    plugin: str
    site: str


@frozen
class FailedRequest:
    """A lever or option asked for something that the model cannot do."""

    lever: str
    why: str
    layer: str
    site: str
    lacks: Lacks = ""  # the hook that would have given the missing thing


class LookupEntry(NamedTuple):
    """What one place asked in one layer, before rows are folded; traces hold these."""

    members: tuple[KernelKey, ...]
    kind: LookupKind
    requested_by: str | None
    phase: Phase
    when: str
    site: str
    layer: str
    times: int
    reached_by: str = ""


def fold(entries: Iterable[LookupEntry]) -> tuple[LookupRow, ...]:
    """Fold entries into rows, one a question, sorted."""
    rows: dict[tuple[tuple[KernelKey, ...], str, str, str], LookupRow] = {}
    # Where a question has several:
    conditions: dict[tuple[tuple[KernelKey, ...], str, str, str], set[str]] = {}
    decisions: dict[tuple[tuple[KernelKey, ...], str, str, str], set[str]] = {}
    places: dict[str, list[tuple[int, str]]] = {}  # of layers: many rows name the same ones
    for members, kind, requested_by, phase, when, site, layer, times, reached_by in entries:
        question = (members, kind, requested_by or "", phase)
        row = rows.get(question)
        if row is None:
            row = rows[question] = LookupRow(members, kind, requested_by or None, phase, when, reached_by)
        if when != row.when:
            conditions.setdefault(question, {row.when}).add(when)
        if reached_by != row.reached_by:
            decisions.setdefault(question, {row.reached_by}).add(reached_by)
        row.add(site, layer, times)
        if layer not in places:
            places[layer] = _layer_order(layer)
    for one, whens in conditions.items():
        rows[one].when = " or ".join(sorted(filter(None, whens)))
    for one, reasons in decisions.items():
        rows[one].reached_by = "; ".join(sorted(filter(None, reasons)))
    for row in rows.values():
        row.sites, row.layers = (
            dict(sorted(row.sites.items())),
            dict(sorted(row.layers.items(), key=lambda item: places[item[0]])),
        )
    return tuple(rows[question] for question in sorted(rows))


def _layer_order(layer: str) -> list[tuple[int, str]]:
    """Order ``layers.2`` before ``layers.10``."""
    # Labels are anybody's text: no other digits than ours, and no number too long to read.
    return [
        (int(part), "") if part.isascii() and part.isdigit() and len(part) < 19 else (-1, part)
        for part in layer.split(".")
    ]
