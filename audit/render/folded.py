"""Findings that share one code, one cause and one way out: they are told once, with the keys that they are about."""

import textwrap
from collections.abc import Iterable

from kernel_muster.audit.render.plain import fold_layers
from kernel_muster.audit.report import FindingRow
from kernel_muster.registry.keys import KernelKey, key_problem
from kernel_muster.registry.messages.folded import FOLDED
from kernel_muster.registry.messages.message import parts_of, quoted, values_of

#: Fewer than this are easier to read one by one.
FOLD_FROM = 3
_WIDTH = 100


def folded(findings: Iterable[FindingRow]) -> list[tuple[FindingRow, ...]]:
    """Group findings about keys that differ in nothing but the key, in order of the first of each group."""
    groups: dict[object, list[FindingRow]] = {}
    for position, finding in enumerate(findings):
        is_alike = not key_problem(finding.subject) and not finding.log and not finding.explains
        kind = (finding.code, finding.allowed, cause_text(finding), remedy_texts(finding)) if is_alike else position
        groups.setdefault(kind, []).append(finding)
    made: list[tuple[FindingRow, ...]] = []
    for group in groups.values():
        made += [tuple(group)] if len(group) >= FOLD_FROM else [(finding,) for finding in group]
    return made


def cause_text(finding: FindingRow) -> str:
    """Return why, for any key: ``no plugin registers KEY``; of a chain, each distinct reason once."""
    return "; ".join(dict.fromkeys(part.for_audience(FOLDED) for part in parts_of(finding.why)))


def remedy_texts(finding: FindingRow) -> tuple[str, ...]:
    """Return the remedies, for any key."""
    return tuple(quoted(remedy).for_audience(FOLDED) for remedy in finding.remedies)


def key_lines(group: Iterable[FindingRow], *, verbose: bool) -> tuple[str, ...]:
    """Return the keys of a group, with layers and sites if all is asked for."""
    if not verbose:
        return tuple(finding.subject for finding in group)
    lines: list[str] = []
    for finding in group:
        layers = f" ({fold_layers(finding.layers)})" if finding.layers else ""
        lines += [f"{finding.subject}{layers}", *(f"    {site}" for site in finding.where)]
    return tuple(lines)


def consequence_lines(explains: Iterable[str]) -> tuple[str, ...]:
    """Return what a finding explains; of many keys that the same happens to, what happens is said once."""
    groups: dict[str, list[str]] = {}
    for text in explains:
        groups.setdefault(quoted(text).for_audience(FOLDED), []).append(text)
    lines: list[str] = []
    for what, texts in groups.items():
        keys = [str(key) for text in texts for key in values_of(text, KernelKey)]
        if len(texts) < FOLD_FROM or len(keys) != len(texts):
            lines += texts
        else:
            lines += [f"{what}, for {len(keys)} keys:"]
            lines += [f"  {line}" for line in textwrap.wrap(", ".join(keys), _WIDTH, break_long_words=False)]
    return tuple(lines)
