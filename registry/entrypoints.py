"""Entry points: what installed distributions say they offer, read so that nothing disappears.

``importlib.metadata.entry_points`` keeps one distribution of each name and forgets where an entry came from; two
that compete, or one that is on the path twice, must be seen here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hookspecs import ENTRY_POINT_GROUP
from kernel_muster.registry.values import frozen
from kernel_muster.registry.watch import cause_chain, one_line

# Any spelling of our group's name: one that is not exactly ours is reported, and not taken for somebody else's.
_OURS = re.compile(r"kernel[-_.]?muster(\..*)?", re.IGNORECASE)
# importlib.metadata takes such a line for no section, and drops what stands below it.
_MARKED = re.compile(r"\ufeff[^\S\n]*\[([^\n]*)\]")


@frozen
class Entry:
    """One entry point with the distribution that has it."""

    name: str
    value: str
    group: str
    distribution: str
    version: str
    location: str
    notes: tuple[str, ...] = ()

    def load(self) -> object:
        """Import what the entry point names."""
        return EntryPoint(self.name, self.value, self.group).load()


@frozen
class Scan:
    """All entries of our groups: one for each plugin, those that compete, and those of another host API."""

    entries: tuple[Entry, ...]
    competing: tuple[tuple[Entry, ...], ...]
    mismatched: tuple[Entry, ...]
    findings: tuple[Finding, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of all of them."""
        groups = (self.entries, self.mismatched, *self.competing)
        return frozenset(entry.name for group in groups for entry in group)


def scan(path: Sequence[str] | None = None) -> Scan:
    """Read the entry points of every distribution on ``path`` (None: ``sys.path``)."""
    found: list[Entry] = []
    findings: list[Finding] = []
    for distribution in distributions() if path is None else distributions(path=list(path)):
        try:
            found.extend(_entries(distribution))
        except Exception as error:  # noqa: BLE001  (metadata on disk may be anything)
            findings.append(_unreadable(distribution, error))
    same_version = [entry for entry in found if entry.group == ENTRY_POINT_GROUP]
    names: dict[str, list[Entry]] = {}
    for entry in sorted(same_version, key=lambda e: (e.name, e.distribution, e.version, e.location)):
        names.setdefault(entry.name, []).append(entry)
    groups = [_deduplicate(entries) for entries in names.values()]
    return Scan(
        tuple(group[0] for group in groups if len(group) == 1),
        tuple(group for group in groups if len(group) > 1),
        tuple(
            sorted(
                (e for e in found if e.group != ENTRY_POINT_GROUP),
                key=lambda e: (e.name, e.group, e.location),
            )
        ),
        tuple(findings),
    )


def _entries(distribution: Distribution) -> Iterable[Entry]:
    text = distribution.read_text("entry_points.txt") or ""
    if "muster" not in text.lower():  # most distributions: parsing all of them would take longer
        return
    marked = _MARKED.match(text)
    if marked and _OURS.fullmatch("".join(marked[1].split())):
        raise ValueError("its entry_points.txt begins with a byte order mark, so that its first group is not seen")
    points = [point for point in distribution.entry_points if _OURS.fullmatch("".join(point.group.split()))]
    if not points:
        return
    name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    if not name or not version:
        raise ValueError(f"its METADATA has no {'Version' if name else 'Name'}, or is not there")
    for point in points:
        yield Entry(point.name, point.value, point.group, name, version, str(distribution.locate_file("")))


def _deduplicate(entries: list[Entry]) -> tuple[Entry, ...]:
    """Fold one distribution's metadata, seen twice with equal content, into one entry with a note."""
    kinds: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry.distribution.lower().replace("_", "-"), entry.version, entry.value), []).append(entry)
    folded = []
    for same in kinds.values():
        places = sorted({entry.location for entry in same})
        note = (f"metadata seen {len(same)} times: {', '.join(places)}",) if len(same) > 1 else ()
        folded.append(replace(same[0], notes=note))
    return tuple(folded)


def _unreadable(distribution: Distribution, error: Exception) -> Finding:
    place = getattr(distribution, "_path", None)
    where = Path(place).name if place else "unknown"
    return Finding(
        "PLUGIN_LOAD_FAILED",
        where,
        f"the metadata of an installed distribution cannot be read: {one_line(error)}",
        (str(place or "unknown"),),
        ("reinstall the distribution",),
        log=cause_chain(error),
    )
