"""Misses with one cause: a plugin that did not load, or that is blocked, explains the misses of all its keys."""

from collections.abc import Iterable
from dataclasses import replace

from kernel_muster.audit.evidence import Evidence
from kernel_muster.registry.findings import ABSENCE_CODES, Finding, sort_key
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.messages.message import Message, message, quoted
from kernel_muster.registry.selection.catalog import PluginRow
from kernel_muster.registry.selection.select import Decision
from kernel_muster.registry.wording import listed

_MOST_SITES = 3


def unblock(row: PluginRow, template: str = "remedy.unblock") -> Message:
    """Return the remedy of what a blocked plugin would provide."""
    return message(template, plugin=row.name)


def caused(evidence: Evidence, finding: Finding, decision: Decision) -> Finding:
    """Return a finding about an absent key with the plugin that would provide it; MUSTER_DISABLE is a cause itself."""
    row = None if decision.cause == "DISABLED" else evidence.catalog.absent_provider(decision.key)
    return finding if row is None else replace(finding, cause=row.name)


def of_blocked_plugins(evidence: Evidence, findings: Iterable[Finding]) -> list[Finding]:
    """Fold the misses of each blocked plugin into one finding, with the other keys as its consequences.

    A miss that is allowed stays by itself: to allow one key of a plugin excuses no other.
    """
    blocked = {row.name: row for row in evidence.catalog.plugins_that("blocked")}
    groups: dict[str, list[Finding]] = {}
    rest = []
    for finding in findings:
        if finding.code in ABSENCE_CODES and finding.cause in blocked and not _is_allowed(evidence, finding):
            groups.setdefault(finding.cause, []).append(finding)
        else:
            rest.append(finding)
    return [*rest, *(_one_of(blocked[name], group) for name, group in groups.items())]


def _is_allowed(evidence: Evidence, finding: Finding) -> bool:
    return KernelKey(*finding.subject.split("::", 1)) in evidence.options.allow_unresolved


def _one_of(row: PluginRow, group: list[Finding]) -> Finding:
    """Return one finding for all misses of a blocked plugin: about the first, which explains the others."""
    first, *others = sorted(group, key=sort_key)
    if not others:
        return first
    keys = listed([finding.subject for finding in (first, *others)])
    why = message("lookup.blocked_plugin", plugin=row.name, distribution=row.distribution, count=len(group), keys=keys)
    common = [r for r in first.remedies if all(r in other.remedies for other in others)]
    remedies = dict.fromkeys((unblock(row, "remedy.unblock_many"), *(r for r in common if r != unblock(row))))
    templates = {quoted(remedy).template for finding in (first, *others) for remedy in finding.remedies}
    if "remedy.declare" in templates:
        remedies[message("remedy.declare_many")] = None
    return replace(
        first,
        why=why,
        remedies=tuple(remedies),
        layers=tuple(dict.fromkeys(layer for finding in (first, *others) for layer in finding.layers)),
    ).explaining(consequence(finding) for finding in others)


def consequence(finding: Finding) -> Message:
    """Return a finding as the consequence of another."""
    key = KernelKey(*finding.subject.split("::", 1)) if "::" in finding.subject else finding.subject
    return message("consequence.lookup", code=finding.code, key=key, places=listed(finding.where, _MOST_SITES))
