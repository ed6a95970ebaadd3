"""Lookups of a key for ``muster explain``: by model, as required or optional, with the decisions that reach it."""

from collections.abc import Iterable, Iterator
from typing import Any

from kernel_muster.audit.render.plain import plural
from kernel_muster.audit.render.sections import Section
from kernel_muster.cli.explain_site import asked_by_models
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.records import LookupEntry
from kernel_muster.registry.selection.select import Selector
from kernel_muster.registry.values import frozen


@frozen
class Asking:
    """One kind of lookup of a key by models. ``is_tried`` unless an earlier member of the chain serves."""

    entry: LookupEntry
    models: tuple[str, ...]
    is_tried: bool


def askings_of(key: KernelKey, selector: Selector) -> tuple[Asking, ...]:
    """Return the lookups of a key in plan builds of all models, for a target and levers."""
    found: dict[tuple[object, ...], tuple[LookupEntry, dict[str, None]]] = {}
    for model, entry in asked_by_models(selector):
        if key in entry.members:
            question = (entry.kind != "required", entry.members, entry.when, entry.reached_by)
            found.setdefault(question, (entry, {}))[1][model] = None
    return tuple(
        Asking(entry, tuple(models), _is_tried(key, entry, selector)) for _, (entry, models) in sorted(found.items())
    )


def _is_tried(key: KernelKey, entry: LookupEntry, selector: Selector) -> bool:
    before = entry.members[: entry.members.index(key)]
    return all(selector.decide(member).chosen is None for member in before)


def asking_data(askings: Iterable[Asking]) -> list[dict[str, Any]]:
    """Return the lookups of a key as plain data for JSON."""
    return [
        {
            "kind": one.entry.kind,
            "chain": list(map(str, one.entry.members)) if len(one.entry.members) > 1 else [],
            "tried": one.is_tried,
            "when": one.entry.when,
            "reached_by": one.entry.reached_by,
            "requested_by": one.entry.requested_by or "",
            "models": list(one.models),
        }
        for one in askings
    ]


def asking_section(askings: Iterable[Asking], selector: Selector) -> Section:
    """Return the lookups of a key as a section."""
    every = tuple(askings)
    if not every:
        return Section(f"No model asks for it on {selector.target} under these levers")
    return Section("Asked for by models", lines=tuple(line for one in every for line in _lines(one)))


def _lines(one: Asking) -> Iterator[str]:
    entry = one.entry
    yield f"{entry.kind}, by {plural(len(one.models), 'model')}: {', '.join(one.models)}"
    if len(entry.members) > 1:
        behind = "" if one.is_tried else " (an earlier member serves)"
        yield f"    in the chain {' > '.join(map(str, entry.members))}{behind}"
    facts = (("when", entry.when), ("reached by", entry.reached_by), ("asked for by", entry.requested_by))
    yield from (f"    {label}: {text}" for label, text in facts if text)
