"""Entry points: what installed distributions say they offer, read so that nothing disappears.

``importlib.metadata.entry_points`` keeps one distribution of each name and forgets where an entry came from; two
that compete, or one that is on the path twice, must be seen here.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import Distribution, EntryPoint, distributions
from itertools import chain
from pathlib import Path

from kernel_muster.registry.discovery.host_files import intrusion
from kernel_muster.registry.discovery.origins import places_of
from kernel_muster.registry.distributions import HOST_DISTRIBUTION, HOST_MODULE, normal_name, same_distribution
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hookspecs import ENTRY_POINT_GROUP
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.watch import cause_chain, one_line
from kernel_muster.registry.values import frozen

# Any spelling of our group's name: one that is not exactly ours is reported, and not taken for somebody else's.
_OURS = re.compile(r"kernel[-_.]?muster(\..*)?", re.IGNORECASE)
_MENTIONED = re.compile(r"kernel[-_.]?muster", re.IGNORECASE)
#: How alike the letters of a group must be to those of ours to pass for a slip. Names of others are less: 0.90 has
#: kernel_cluster.v1, 0.85 kernel_muster_bench.v1; kernel_mustre.v1 has 0.93.
_SLIP = 0.92
_REFERENCE = re.compile(r"[\w.]+\s*(?::\s*[\w.]+\s*)?(?:\[.*\])?")
# importlib.metadata takes such a line for no section, and drops what stands below it.
_MARKED = re.compile(r"\ufeff[^\S\n]*\[([^\n]*)\]")


@frozen
class Entry:
    """One entry point with the distribution that has it; ``places`` are where that says its module is, if it does."""

    name: str
    value: str
    group: str
    distribution: str
    version: str
    location: str
    notes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module that it names; of the host's own plugins, the package that holds them all."""
        return _module_of(self.distribution, self.value)

    @property
    def problem(self) -> str:
        """Why it names no plugin, or nothing."""
        if not self.name.strip():
            return "its entry point has no name"
        if not self.value.strip():
            return "its entry point names no module: nothing stands behind the ="
        if not _REFERENCE.fullmatch(self.value.strip()):
            return f"its entry point names {self.value!r}, which is no module"
        return ""

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
    def all_entries(self) -> Iterator[Entry]:
        """All of them."""
        return chain(self.entries, self.mismatched, *self.competing)

    @property
    def names(self) -> frozenset[str]:
        """The names of all of them."""
        return frozenset(entry.name for entry in self.all_entries)


def scan(path: Sequence[str] | None = None) -> Scan:
    """Read the entry points of every distribution on ``path`` (None: ``sys.path``)."""
    found: list[Entry] = []
    findings: list[Finding] = []
    for distribution in distributions() if path is None else distributions(path=list(path)):
        try:
            if entries := list(_entries(distribution)):
                found.extend(entries)
                findings.extend(intrusion(distribution))
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
    # Most distributions have none of these letters: parsing all of them would take longer.
    if not any(part in text.lower() for part in ("muster", "kernel")):
        return
    marked = _MARKED.match(text)
    if marked and _is_meant(marked[1]):
        raise ValueError("its entry_points.txt begins with a byte order mark, so that its first group is not seen")
    if lost := _lost_line(text):
        why = f"its entry_points.txt has the line {lost!r}, which begins no group, so that what it says is not seen"
        raise ValueError(f"{why}: expected [{ENTRY_POINT_GROUP}]")
    if not _MENTIONED.search(text) and not any(map(_is_meant, _groups(text))):
        return
    points = [point for point in distribution.entry_points if _is_meant(point.group)]
    if not points:
        return
    name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    if not name or not version:
        raise ValueError(f"its METADATA has no {'Version' if name else 'Name'}, or is not there")
    location = str(distribution.locate_file(""))
    places = places_of(distribution, {_module_of(name, point.value) for point in points})
    for point in points:
        where = places[_module_of(name, point.value)]
        yield Entry(point.name, point.value, point.group, name, version, location, places=where)


def _module_of(distribution: str, value: str) -> str:
    """Return an entry point's module; for the host its package: that it is another one is said once."""
    return HOST_MODULE if same_distribution(distribution, HOST_DISTRIBUTION) else value.partition(":")[0].strip()


def _is_meant(group: str) -> bool:
    """Whether a group is ours, in whatever spelling, or ours with a slip in it."""
    if _OURS.fullmatch("".join(group.split())):
        return True
    given, ours = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (group, ENTRY_POINT_GROUP))
    return difflib.SequenceMatcher(None, given, ours).ratio() >= _SLIP


def _lines(text: str) -> Iterator[str]:
    return (line for one in text.splitlines() if (line := one.strip()) and not line.startswith("#"))


def _groups(text: str) -> Iterator[str]:
    return (line.strip("[]") for line in _lines(text) if line.startswith("[") and line.endswith("]"))


def _lost_line(text: str) -> str:
    """Return the first line that means our group, and that importlib.metadata takes for none or drops."""
    has_group = False
    for line in _lines(text):
        if line.startswith("[") and line.endswith("]"):
            has_group = True
        elif has_group and "=" in line and not line.startswith("["):
            continue
        elif _MENTIONED.search(line) or _is_meant(line):
            return line
    return ""


def _deduplicate(entries: list[Entry]) -> tuple[Entry, ...]:
    """Fold one distribution's metadata, seen twice with equal content, into one entry with a note."""
    kinds: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((normal_name(entry.distribution), entry.version, entry.value), []).append(entry)
    folded = []
    for same in kinds.values():
        places = sorted({entry.location for entry in same})
        note = (f"metadata seen {len(same)} times: {', '.join(places)}",) if len(same) > 1 else ()
        modules = tuple(dict.fromkeys(place for entry in same for place in entry.places))
        folded.append(replace(same[0], notes=note, places=modules))
    return tuple(folded)


def _unreadable(distribution: Distribution, error: Exception) -> Finding:
    place = getattr(distribution, "_path", None)
    where = Path(place).name if place else "unknown"
    return Finding(
        "PLUGIN_LOAD_FAILED",
        where,
        message("plugin_load_failed.metadata", error=one_line(error)),
        (str(place or "unknown"),),
        (message("remedy.reinstall"),),
        log=cause_chain(error),
    )
