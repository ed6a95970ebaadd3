"""Two reports compared: releases, machines or ranks. What changes from run to run by itself is left out.

Left out are the date, paths and dispatch sites. Everything that says which kernels serve, and why not, is compared.
Between a boot and a replay what no trace holds is left out too.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field

from kernel_muster.audit.render.plain import ascii_only, fold_layers, plural
from kernel_muster.audit.render.sections import value_text
from kernel_muster.audit.report import Report
from kernel_muster.registry.distributions import normal_name
from kernel_muster.registry.values import frozen

SCHEMA = "kernel-muster/diff"
#: 1.1: what was ``left_out``, because one report is a replay's.
VERSION = "1.1"

#: What is a folder of the machine: no kernel depends on it.
_LEVERS_OF_A_MACHINE = ("MUSTER_CACHE_DIR",)
#: What a replay does not know: nothing is built there, no device is at hand, no weight is planned, and its trace has
#: the levers' values without who set them. Of a part, these rows of the verdict, these fields of others, or all.
_NOT_IN_A_REPLAY = {
    "verdict": ("target", "device", "stage reached", "builder", "below the stage asked", "failure"),
    "kernels": ("stage",),
    "levers": ("origin",),
    "copies of weights": (),
}
_LEFT_OUT = ("targets and devices", "stages", "builders", "origins of levers", "copies of weights")
#: Fewer than this are easier to read one by one.
_FOLD_FROM = 3
_WIDTH = 110

Fields = Mapping[str, str]
Rows = Mapping[str, Fields]


@frozen(kw_only=True)
class Change:
    """One row of one part: ``before`` is empty where it was added, ``after`` where it was removed."""

    name: str
    kind: str  # added, removed or changed
    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)


@frozen(kw_only=True)
class Part:
    """What differs in one part of the reports."""

    title: str
    changes: tuple[Change, ...]


@frozen(kw_only=True)
class Difference:
    """Everything that differs between two reports."""

    schema: str = SCHEMA
    version: str = VERSION
    equal: bool
    parts: tuple[Part, ...]
    left_out: tuple[str, ...] = ()


def compare(one: Report, other: Report) -> Difference:
    """Compare two reports."""
    before, after = _parts(one), _parts(other)
    is_mixed = one.replayed is not other.replayed
    if is_mixed:
        before, after = _known_to_replays(before), _known_to_replays(after)
    parts = tuple(Part(title=title, changes=tuple(_changes(before[title], after[title]))) for title in before)
    parts = tuple(part for part in parts if part.changes)
    return Difference(equal=not parts, parts=parts, left_out=_LEFT_OUT if is_mixed else ())


def _known_to_replays(parts: dict[str, Rows]) -> dict[str, Rows]:
    """Return parts without what only a live boot says: of a part that is named with no fields, nothing is left."""
    known = dict(parts)
    for title, fields in _NOT_IN_A_REPLAY.items():
        if title == "verdict":
            known[title] = {name: row for name, row in parts[title].items() if name not in fields}
        else:
            rows = parts[title] if fields else {}
            known[title] = {
                name: {label: value for label, value in row.items() if label not in fields}
                for name, row in rows.items()
            }
    return known


def _parts(report: Report) -> dict[str, Rows]:
    return {
        "verdict": _verdict(report),
        "findings": _findings(report),
        "kernels": _kernels(report),
        "waivers": {w.key: {"reason": w.reason, "until": w.until} for w in report.waivers},
        "levers": {
            v.name: {"value": _without_folder(value_text(v.value)), "origin": v.origin}
            for v in report.levers
            if v.name not in _LEVERS_OF_A_MACHINE
        },
        "plugins": _folded(
            (
                f"{p.name} of {normal_name(p.distribution)}",
                {"version": p.version, "status": p.status, "keys": str(p.kernels)},
            )
            for p in report.plugins
        ),
        "copies of weights": _folded(
            (f"{row.weight} in {row.layout}", {"bytes": str(row.size_bytes), "condition": row.condition})
            for row in report.layouts
        ),
    }


def _without_folder(value: str) -> str:
    """Return a file's name without its folder; what is no path stays."""
    return re.split(r"[/\\]", value)[-1] if re.match(r"([/~.]|[A-Za-z]:[/\\])", value) else value


def _verdict(report: Report) -> Rows:
    degraded, complete = ("yes" if flag else "no" for flag in (report.degraded, report.complete))
    facts = {
        "verdict": report.verdict,
        "degraded": degraded,
        "complete": complete,
        "model": report.model,
        "target": report.target,
        "arch": report.arch,
        "device": report.device,
        "quant": report.quant,
        "profile": report.profile,
        "stage asked": report.stage_asked,
        "stage reached": report.stage_reached,
        "set hash": report.set_hash,
        "kernel-muster": report.muster_version,
        "builder": f"{report.builder} ({report.maturity})" if report.builder else "",
        "below the stage asked": "yes" if report.below_stage_asked else "no",
        "failure": report.failure.partition(" (at ")[0],
        "lookups": str(report.counts.lookups),
    }
    return {name: {"": value} for name, value in facts.items()}


def _findings(report: Report) -> Rows:
    def why(text: str) -> str:
        return text.replace(report.as_of, "(date)") if report.as_of else text

    return _folded(
        (f"{f.code} {f.subject}", {"severity": f"{f.severity}{', allowed' if f.allowed else ''}", "why": why(f.why)})
        for f in report.findings
    )


def _kernels(report: Report) -> Rows:
    names = [" > ".join(row.chain) or row.key for row in report.kernels]
    several = {name for name, count in Counter(names).items() if count > 1}
    return _folded(
        (
            f"{name} ({row.kind})" if name in several else name,
            {
                "kind": row.kind,
                "outcome": row.outcome,
                "served by": row.served_by,
                "distribution": normal_name(row.distribution),
                "version": row.version,
                "tier": row.tier,
                "backend": row.backend,
                "archs": " ".join(row.archs),
                "contract": row.contract,
                "stage": row.stage,
                "when": row.when,
                "layers": fold_layers(row.layers),
            },
        )
        for name, row in zip(names, report.kernels, strict=True)
    )


def _folded(rows: Iterable[tuple[str, Fields]]) -> Rows:
    """Join rows of one name: a key may be asked for in two ways, a plugin have two findings of one code."""
    found: dict[str, list[Fields]] = {}
    for name, fields in rows:
        found.setdefault(name, []).append(fields)
    return {name: {label: _joined(same, label) for label in same[0]} for name, same in found.items()}


def _joined(rows: Iterable[Fields], label: str) -> str:
    return " / ".join(sorted({fields[label] for fields in rows}))


def _changes(before: Rows, after: Rows) -> Iterable[Change]:
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old is None:
            yield Change(name=name, kind="added", after=_given(new))
        elif new is None:
            yield Change(name=name, kind="removed", before=_given(old))
        elif changed := [label for label in old if old[label] != new[label]]:
            yield Change(
                name=name,
                kind="changed",
                before={label: old[label] for label in changed},
                after={label: new[label] for label in changed},
            )


def _given(fields: Fields | None) -> dict[str, str]:
    return {label: value for label, value in (fields or {}).items() if value}


def render_diff(difference: Difference) -> str:
    """Return a difference as plain ASCII."""
    left_out = f"left out, as one is a replay: {', '.join(difference.left_out)}" if difference.left_out else ""
    if difference.equal:
        return "EQUAL: the reports say the same" + (f" ({left_out})" if left_out else "")
    counted = ", ".join(f"{part.title} {len(part.changes)}" for part in difference.parts)
    total = sum(len(part.changes) for part in difference.parts)
    lines = [f"DIFFERENT: {plural(total, 'difference')}: {counted}", *([left_out] if left_out else [])]
    reached = _stages_reached(difference)
    for part in difference.parts:
        lines += ["", part.title]
        alike: dict[object, list[Change]] = {}
        for position, change in enumerate(part.changes):
            alike.setdefault(_pairs(change) if change.kind == "changed" else position, []).append(change)
        for group in alike.values():
            if len(group) < _FOLD_FROM:
                lines += map(_line, group)
            elif part.title == "kernels" and _pairs(group[0]) == reached:  # what all reached is no news of each
                lines.append(f"  ~ {len(group)} keys: {reached}, as the boots")
            else:
                lines += _folded_lines(group)
    return ascii_only("\n".join(lines))


def _stages_reached(difference: Difference) -> str:
    """Say how the kernels' stages differ if they do as the boots' do; empty where the boots reached the same."""
    found = (one for part in difference.parts if part.title == "verdict" for one in part.changes)
    return next((f"stage {_pairs(one)}" for one in found if one.name == "stage reached"), "")


def _folded_lines(group: list[Change]) -> list[str]:
    """Tell a change that several rows share once, with their names; the JSON keeps the rows apart."""
    names = textwrap.wrap(", ".join(change.name for change in group), _WIDTH - 6, break_long_words=False)
    return [f"  ~ {len(group)} alike: {_pairs(group[0])}", *(f"      {line}" for line in names)]


def _line(change: Change) -> str:
    if change.kind == "changed":
        return f"  ~ {change.name}: {_pairs(change)}"
    fields = change.after if change.kind == "added" else change.before
    details = ", ".join(f"{label} {value}" for label, value in fields.items())
    return f"  {'+' if change.kind == 'added' else '-'} {change.name}{f': {details}' if details else ''}"


def _pairs(change: Change) -> str:
    return "; ".join(f"{label} {change.before[label] or '(none)'} -> {change.after[label] or '(none)'}".strip()
                     for label in change.before)  # fmt: skip
