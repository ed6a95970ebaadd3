"""Discovery: from installed entry points to a catalog.

Plugins are loaded sorted by name, each in a transaction; rules that compare plugins run after all have loaded. So
nothing depends on the order of plugins, of entry points, or of ``sys.path``.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any

from kernel_muster.registry.contract.specs import Provider, Registered
from kernel_muster.registry.discovery.cross_checks import check_together, contracts_of
from kernel_muster.registry.discovery.entry_points import Entry, Scan, scan
from kernel_muster.registry.discovery.loading import LOCAL, Loaded, load_plugin
from kernel_muster.registry.discovery.origins import strange_file
from kernel_muster.registry.discovery.remembered import Remembered
from kernel_muster.registry.distributions import HOST_DISTRIBUTION, normal_name, same_distribution
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import Finding, Severity
from kernel_muster.registry.hookspecs import ENTRY_POINT_GROUP
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.levers import CORE_LEVERS
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.plugin_code.module_sources import module_name
from kernel_muster.registry.plugin_code.running import report_guest
from kernel_muster.registry.selection.catalog import Catalog, PluginRow, PluginStatus
from kernel_muster.registry.suggestions import Names
from kernel_muster.registry.values import frozen
from kernel_muster.registry.wording import listed


@frozen
class Draft:
    """A plugin with all it gave, before plugins are compared with each other."""

    row: PluginRow
    loaded: Loaded

    @property
    def is_sound(self) -> bool:
        """Whether nothing found so far refuses it."""
        return self.row.status == "loaded"

    @property
    def provider(self) -> Provider:
        """The provider that its registrations carry."""
        return Provider(self.row.name, self.row.distribution, self.row.version)


def discover(
    *,
    blocked: Iterable[str] = (),
    demanded: Iterable[str] = (),
    local: Mapping[str, object] | None = None,
    timeout_s: float = 10,
    path: Sequence[str] | None = None,
    options: tuple[str, str] = ("--plugin", "--no-plugin"),
    remembered: Remembered | None = None,
) -> Catalog:
    """Find, load and compare all plugins.

    ``blocked`` plugins are never imported; ``demanded`` ones must be there. ``local`` adds plugin objects of this
    process, by name, as distribution ``(local)``. ``path`` replaces ``sys.path`` in the search for metadata.
    ``options`` are what the caller calls them by that demand and block a plugin. ``remembered`` keeps the keys of
    third-party plugins that load, and has those of the others.
    """
    local = local or {}
    if unnamed := [name for name in local if not isinstance(name, str) or not name.strip()]:
        raise UsageError(f"local plugins: {unnamed[0]!r} is no name of a plugin: names are text")
    found = scan(path)
    asked = _Asked(found, local)
    (demanded, absent), (blocked, unblocked) = asked.plugins(demanded), asked.plugins(blocked)
    if both := sorted((blocked & demanded) | (absent & unblocked)):
        raise UsageError(f"{', '.join(both)}: demanded and blocked at once")
    findings = [*found.findings, *_hidden_host(found.entries)]
    findings.extend(_competing(group) for group in found.competing if group[0].name not in blocked)
    findings.extend(_mismatched(entry) for entry in found.mismatched if entry.name not in blocked)
    for option, names in zip(options, (absent, unblocked), strict=True):
        findings.extend(asked.not_found(option, name) for name in sorted(names))
    taken = {entry.name for entry in found.entries}
    findings.extend(_taken(entry) for entry in found.entries if entry.name in local)
    drafts = [_draft(entry, blocked, timeout_s) for entry in found.entries if entry.name not in local]
    drafts += [Draft(_row(e, "failed"), Loaded()) for e in found.entries if e.name in local]
    drafts += [_unloaded(entry, "failed", blocked) for group in found.competing for entry in group]
    drafts += [_unloaded(entry, "mismatched", blocked) for entry in found.mismatched]
    drafts += [_draft_local(name, local[name], blocked, timeout_s) for name in sorted(local) if name not in taken]
    drafts.sort(key=lambda d: (d.row.name, d.row.distribution, d.row.version, d.row.location))
    catalog = _catalog([_with_family_keys(draft) for draft in drafts], findings, timeout_s)
    return catalog if remembered is None else _with_last_keys(catalog, remembered)


def _with_last_keys(catalog: Catalog, remembered: Remembered) -> Catalog:
    """Keep the keys of third-party plugins that loaded, and give those that did not the keys that they last had."""
    guests = [row for row in catalog.plugins if not row.is_host and row.distribution != LOCAL]
    remembered.keep(row for row in guests if row.status == "loaded")
    last = {id(row): keys for row in guests if row.status != "loaded" and (keys := remembered.keys_of(row))}
    rows = tuple(replace(row, last_keys=last[id(row)]) if id(row) in last else row for row in catalog.plugins)
    return replace(catalog, plugins=rows) if last else catalog


def _with_family_keys(draft: Draft) -> Draft:
    """Give a built-in family that did not load the keys that it has: reports name it as the cause of their misses."""
    if draft.is_sound or not draft.row.is_host:
        return draft
    from kernel_muster.registry.discovery.family_keys import FAMILY_KEYS  # not for the boots where all load

    keys = {*draft.row.keys, *map(parse_key, FAMILY_KEYS.get(draft.row.name, ()))}
    return Draft(replace(draft.row, keys=tuple(sorted(keys))), draft.loaded)


def _row(entry: Entry, status: PluginStatus) -> PluginRow:
    return PluginRow(
        entry.name, entry.distribution, entry.version, status, entry.value, entry.location, notes=entry.notes
    )


def _unloaded(entry: Entry, status: PluginStatus, blocked: frozenset[str]) -> Draft:
    """A plugin that cannot be loaded; to block it is to say that it need not be."""
    return Draft(_row(entry, "blocked" if entry.name in blocked else status), Loaded())


def _draft(entry: Entry, blocked: frozenset[str], timeout_s: float) -> Draft:
    if entry.name in blocked:
        return Draft(_row(entry, "blocked"), Loaded())
    if not same_distribution(entry.distribution, HOST_DISTRIBUTION):
        report_guest(entry.name)
    where = f"{entry.distribution} {entry.version} ({entry.value})"
    if entry.problem:
        return _judged(_row(entry, "loaded"), Loaded(findings=[_malformed(entry, where)]))
    loaded = load_plugin(entry.name, where, entry.load, timeout_s)
    if not same_distribution(entry.distribution, HOST_DISTRIBUTION):
        loaded.findings.extend(_from_elsewhere(entry.name, where, entry))
    return _judged(_row(entry, "loaded"), loaded)


def _malformed(entry: Entry, where: str) -> Finding:
    line = f'{entry.name.strip() or "<name>"} = "<package.module>"'
    table = f'project.entry-points."{ENTRY_POINT_GROUP}"'
    remedies = (
        message("remedy.entry_point", line=line, table=table),
        message("remedy.or_uninstall", distribution=entry.distribution),
    )
    return Finding("BAD_SPEC", entry.name.strip() or entry.distribution, entry.problem, (where,), remedies)


def _from_elsewhere(subject: str, where: str, entry: Entry) -> Iterator[Finding]:
    """Find a module that hides the one of the distribution that the report would name."""
    if file := strange_file(entry.module, entry.places):
        named = f"{entry.distribution} {entry.version}"
        values = {"module": entry.module, "file": str(file), "places": entry.places}
        why = message("plugin_load_failed.elsewhere", distribution=named, **values)
        remedies = (message("remedy.unhide"), message("remedy.install_hiding", distribution=named))
        yield Finding("PLUGIN_LOAD_FAILED", subject, why, (where,), remedies)


def _hidden_host(entries: Iterable[Entry]) -> Iterator[Finding]:
    """Find a copy of this package that runs under the name and version of the installed one."""
    for entry in entries:
        if same_distribution(entry.distribution, HOST_DISTRIBUTION):
            yield from _from_elsewhere(HOST_DISTRIBUTION, f"{HOST_DISTRIBUTION} {entry.version}", entry)
            return


def _draft_local(name: str, plugin: object, blocked: frozenset[str], timeout_s: float) -> Draft:
    row = PluginRow(name, LOCAL, "", "blocked" if name in blocked else "loaded", module_name(plugin))
    return (
        Draft(row, Loaded()) if name in blocked else _judged(row, load_plugin(name, LOCAL, lambda: plugin, timeout_s))
    )


def _judged(row: PluginRow, loaded: Loaded) -> Draft:
    """A plugin with a refusing finding registers nothing; its keys are kept to explain what is missing."""
    refused = any(f.severity("serve") is Severity.REFUSE for f in loaded.findings)
    keys = tuple(sorted({spec.kernel_key for spec in loaded.items.get("muster_kernels", ()) if _has_key(spec)}))
    return Draft(replace(row, status="failed" if refused else "loaded", hooks=loaded.hooks, keys=keys), loaded)


def _has_key(spec: object) -> bool:
    try:
        return spec.kernel_key is not None  # type: ignore[attr-defined]
    except (AttributeError, ValueError, TypeError):
        return False


def _competing(entries: tuple[Entry, ...]) -> Finding:
    name = entries[0].name
    owners = tuple(dict.fromkeys(f"{e.distribution} {e.version} at {e.location}" for e in entries))
    if len(owners) > 1:
        why = message("plugin_duplicate", count=len(owners), plugin=name)
        remedy = message("remedy.keep_one_of", distributions=owners)
    else:
        why = message("plugin_duplicate.entries", distribution=owners[0], count=len(entries), plugin=name)
        remedy = message("remedy.keep_one_entry", plugin=name)
    where = tuple(f"{e.distribution} {e.version} ({e.value}) at {e.location}" for e in entries)
    return Finding("PLUGIN_DUPLICATE", name, why, where, (remedy,))


def _taken(entry: Entry) -> Finding:
    return Finding(
        "PLUGIN_DUPLICATE",
        entry.name,
        message("plugin_duplicate.local", distribution=entry.distribution, plugin=entry.name),
        (f"{entry.distribution} {entry.version} ({entry.value})",),
        (message("remedy.rename_local"),),
    )


def _mismatched(entry: Entry) -> Finding:
    return Finding(
        "API_MISMATCH",
        entry.name,
        message("api_mismatch", group=_shown(entry.group), own=ENTRY_POINT_GROUP),
        (f"{entry.distribution} {entry.version} ({entry.value})",),
        (
            message("remedy.other_version", distribution=entry.distribution, group=ENTRY_POINT_GROUP),
            message("remedy.own_group", group=ENTRY_POINT_GROUP),
            message("remedy.uninstall_or_block", plugin=entry.name),
        ),
    )


def _shown(group: str) -> str:
    """Return a group's name, in quotes where blanks in it would not be seen."""
    return group if group.split() == [group] else repr(group)


# Former built-in plugins, by their normal names.
_RENAMED = {"w4a16-gemv": ("nvfp4_gemv", "dense_gemm")}


class _Asked:
    """The plugins that options name. Their names compare as those of distributions do; the exact one comes first."""

    def __init__(self, found: Scan, local: Iterable[str]) -> None:
        self._names = found.names | set(local)
        self._normal: dict[str, set[str]] = {}
        for name in self._names:
            self._normal.setdefault(normal_name(name), set()).add(name)
        self._offers: dict[str, set[str]] = {}
        for entry in found.all_entries:
            self._offers.setdefault(normal_name(entry.distribution), set()).add(entry.name)
        self._near = Names(self._names)

    def plugins(self, asked: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return the plugins that are asked for, and the names that nobody offers."""
        found: set[str] = set()
        absent: set[str] = set()
        for name in asked:
            meant = {name} if name in self._names else self._normal.get(normal_name(name))
            (absent if meant is None else found).update(meant or {name})
        return frozenset(found), frozenset(absent)

    def not_found(self, option: str, name: str) -> Finding:
        """Return the finding about a name that nobody offers; of a distribution it names the plugins."""
        offered = self._offers.get(normal_name(name))
        values = {"option": option, "plugin": name}
        if offered:
            why = message("plugin_not_found.distribution", offered=listed(sorted(offered)), **values)
        elif now := _RENAMED.get(normal_name(name)):
            why = message("plugin_not_found.renamed", plugins=now, **values)
        else:
            why = message("plugin_not_found", near=self._near.near(name), **values)
        remedies = (message("remedy.install_plugin"), message("remedy.list_plugins"))
        return Finding("PLUGIN_NOT_FOUND", name, why, (option,), remedies)


def _catalog(drafts: list[Draft], findings: list[Finding], timeout_s: float) -> Catalog:
    rejected = check_together(
        [(d.row, d.loaded.items) for d in drafts if d.is_sound],
        [(d.row, d.loaded.items) for d in drafts if not d.is_sound],
        timeout_s,
    )
    findings += [finding for draft in drafts for finding in draft.loaded.findings]
    findings += rejected.findings
    drafts = [_failed(draft) if draft.is_sound and draft.row.name in rejected.plugins else draft for draft in drafts]
    drafts, findings = _drop_orphans(drafts, findings)
    sound = [draft for draft in drafts if draft.is_sound]

    def items(hook: str) -> list[Any]:
        return [item for draft in sound for item in draft.loaded.items.get(hook, ())]

    def of_plugins(hook: str) -> Mapping[str, tuple[Any, ...]]:
        return MappingProxyType({draft.row.name: tuple(draft.loaded.items.get(hook, ())) for draft in sound})

    return Catalog(
        plugins=tuple(draft.row for draft in drafts),
        kernels=tuple(Registered(k, d.provider) for d in sound for k in d.loaded.items.get("muster_kernels", ())),
        contracts=MappingProxyType({contract.name: contract for contract in items("muster_contracts")}),
        builders=tuple(items("muster_models")),
        levers=(*CORE_LEVERS, *items("muster_levers")),
        manifest_folders=tuple(sorted(set(items("muster_manifests")))),
        builders_of=of_plugins("muster_models"),
        folders_of=of_plugins("muster_manifests"),
        observers=tuple((d.row.name, d.loaded.observer) for d in sound if d.loaded.observer is not None),
        findings=tuple(findings),
    )


def _failed(draft: Draft, *notes: str) -> Draft:
    return Draft(replace(draft.row, status="failed", notes=(*draft.row.notes, *notes)), draft.loaded)


def _drop_orphans(drafts: list[Draft], findings: list[Finding]) -> tuple[list[Draft], list[Finding]]:
    """Drop plugins whose contracts failed with another plugin: consequences, listed in that plugin's finding.

    A plugin that is dropped takes its own contracts along; the first in order goes first.
    """
    places, notes = _Places(findings), dict[int, dict[str, str]]()
    contracts = _Contracts(drafts)
    causes: dict[str, Draft] = {}  # of plugins dropped here: the plugin with the finding
    waiting = [at for at, draft in enumerate(drafts) if draft.is_sound and contracts.lost_by(draft)]
    while waiting:
        at = heappop(waiting)
        draft = drafts[at]
        if not draft.is_sound:
            continue
        lost = contracts.lost_by(draft)
        culprit = drafts[contracts.lost[lost[0]]]
        note = f"plugin {draft.row.name} needs the contract {listed(lost)} of {culprit.row.name}, which failed"
        drafts[at] = _failed(draft, note)
        for user in contracts.lose(at, drafts):
            heappush(waiting, user)
        culprit = causes[draft.row.name] = causes.get(culprit.row.name, culprit)
        notes.setdefault(places.of(culprit.row), {})[draft.row.name] = note
    return drafts, [_needed(f, notes[at]) if at in notes else f for at, f in enumerate(findings)]


def _needed(finding: Finding, notes: dict[str, str]) -> Finding:
    """Return a plugin's finding with the plugins that needed its contracts."""
    return replace(finding.explaining(notes.values()), needed_by=(*finding.needed_by, *notes))


class _Contracts:
    """The contracts of plugins: those that are lost, each with the plugin that had it, and the users of each."""

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.lost: dict[str, int] = {}
        self._sound = Counter(c.name for draft in drafts if draft.is_sound for c in contracts_of(draft.loaded.items))
        self._users: dict[str, list[int]] = {}
        for at, draft in enumerate(drafts):
            for name in _needs(draft) if draft.is_sound else ():
                self._users.setdefault(name, []).append(at)
            for contract in contracts_of(draft.loaded.items) if not draft.is_sound else ():
                self.lost[contract.name] = at

    def lost_by(self, draft: Draft) -> list[str]:
        """Return the contracts that a plugin needs and no sound plugin has."""
        return sorted(name for name in _needs(draft) if not self._sound[name])

    def lose(self, at: int, drafts: Sequence[Draft]) -> Iterator[int]:
        """Take the contracts of one plugin away; yield the plugins that need them."""
        for contract in contracts_of(drafts[at].loaded.items):
            self._sound[contract.name] -= 1
            self.lost[contract.name] = max(at, self.lost.get(contract.name, 0))
            if not self._sound[contract.name]:
                yield from self._users.get(contract.name, ())


class _Places:
    """The place of the first finding about each plugin: its subject, or one of several at fault together."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._subjects: dict[str, int] = {}
        self._where: dict[str, int] = {}
        for at, finding in enumerate(findings):
            self._subjects.setdefault(finding.subject, at)
            for text in finding.where:
                self._where.setdefault(text, at)

    def of(self, row: PluginRow) -> int:
        """Return the place of the first finding about a plugin that failed; it has one."""
        label = f"{row.distribution} {row.version} ({row.value})"
        found = (self._subjects.get(row.name), self._where.get(label))
        return min(at for at in found if at is not None)


def _needs(draft: Draft) -> set[str]:
    return {spec.contract for spec in draft.loaded.items.get("muster_kernels", ())}
