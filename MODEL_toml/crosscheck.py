"""What no single table can tell: entries that contradict or repeat each other, and levers that nobody declares.

These checks read the parsed TOML, not the validated document, so that they speak up beside other problems.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from kernel_muster.MODEL_toml.problems import Path, Problem
from kernel_muster.MODEL_toml.schema import LEVER_SCOPE_PATTERN
from kernel_muster.MODEL_toml.waivers import Expectation, contradicting_levers, scopes_overlap
from kernel_muster.MODEL_toml.wording import dotted, shown
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.levers import Lever
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.suggestions import Names

_TABLES = ("expected_absent", "expected_present")


def cross_problems(data: Mapping[str, Any]) -> list[Problem]:
    """Say which entries and rows contradict or repeat each other."""
    entries = list(_entries(data))
    found = (_archs_in_target(data), _clashes(entries), _never(entries), _repeated_rows(data), _huge_integers(data))
    return [problem for one in found for problem in one]


def _entries(data: Mapping[str, Any]) -> Iterator[Expectation]:
    for table in _TABLES:
        yield from _flat(data.get(table), (table,), ())
        for arch, tables in _items(data.get("target")):
            if isinstance(tables, dict):
                yield from _flat(tables.get(table), ("target", arch, table), (arch,))


def _flat(modules: object, prefix: tuple[str, ...], archs: tuple[str, ...]) -> Iterator[Expectation]:
    for module, funcs in _items(modules):
        for func, entry in _items(funcs):
            scope = {name: _texts(entry, name) for name in ("archs", "quants", "levers")}
            scope["archs"] = archs or scope["archs"]
            yield Expectation(key=KernelKey(module, func), reason="", where="", path=(*prefix, module, func), **scope)


def _items(table: object) -> Iterator[tuple[str, Any]]:
    if isinstance(table, dict):
        yield from table.items()


def _texts(entry: object, name: str) -> tuple[str, ...]:
    values = entry.get(name) if isinstance(entry, dict) else None
    return tuple(value for value in values if isinstance(value, str)) if isinstance(values, list) else ()


def _clashes(entries: list[Expectation]) -> Iterator[Problem]:
    by_key: dict[KernelKey, list[Expectation]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, []).append(entry)
    for key, same in by_key.items():
        for one, other in _may_clash(same):
            if scopes_overlap(one, other):
                yield _clash(key, one, other)


def _may_clash(entries: list[Expectation]) -> Iterator[tuple[Expectation, Expectation]]:
    """Yield pairs of entries that share an architecture, in order; a manifest may have thousands for one key."""
    everywhere = [at for at, entry in enumerate(entries) if not entry.archs]
    by_arch: dict[str, list[int]] = {}
    for at, entry in enumerate(entries):
        for arch in dict.fromkeys(entry.archs):
            by_arch.setdefault(arch, []).append(at)
    pairs = {pair for places in by_arch.values() for pair in combinations(places, 2)}
    pairs |= {(min(one, other), max(one, other)) for one in everywhere for other in range(len(entries)) if one != other}
    return ((entries[one], entries[other]) for one, other in sorted(pairs))


def _never(entries: list[Expectation]) -> Iterator[Problem]:
    for entry in entries:
        if both := contradicting_levers(entry.levers):
            path = (*entry.path, "levers")
            why = f"{dotted(path)}: {' and '.join(map(shown, both))} never hold together"
            yield Problem(path, why, "keep one of the two")


def _clash(key: KernelKey, one: Expectation, other: Expectation) -> Problem:
    kinds = {next(table for table in _TABLES if table in entry.path) for entry in (one, other)}
    what = "is both expected absent and expected present" if len(kinds) == 2 else "stands twice"
    why = f"{dotted(other.path)}: {_named(key)} {what}: {dotted(one.path)} applies at the same time"
    return Problem(other.path, why, "remove one of the two, or scope both so that they never apply together")


def _named(key: KernelKey) -> str:
    return str(key) if key.problem is None else shown(str(key))


def _archs_in_target(data: Mapping[str, Any]) -> Iterator[Problem]:
    for arch, tables in _items(data.get("target")):
        for table in _TABLES:
            for module, funcs in _items(tables.get(table) if isinstance(tables, dict) else None):
                for func, entry in _items(funcs):
                    if isinstance(entry, dict) and "archs" in entry:
                        path: Path = ("target", arch, table, module, func, "archs")
                        scope = dotted(("target", arch))
                        yield Problem(path, f"{dotted(path)}: [{scope}] is the scope already", "remove archs here")


def _repeated_rows(data: Mapping[str, Any]) -> Iterator[Problem]:
    rows = data.get("model_types")
    seen: dict[tuple[str, str], int] = {}
    for index, row in enumerate(rows if isinstance(rows, list) else ()):
        if isinstance(row, dict):
            content = (shown(row.get("model_type")), shown(row.get("hidden_size")))
            first = seen.setdefault(content, index)
            if first != index:
                path: Path = ("model_types", index)
                yield Problem(path, f"{dotted(path)}: the same row as model_types[{first}]", "remove one of the two")


def _huge_integers(data: Mapping[str, Any]) -> Iterator[Problem]:
    """TOML's integers have 64 bits; Python's larger ones cannot even be printed safely."""
    pending: list[tuple[Path, Any]] = [((), data)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending.extend(((*path, name), inner) for name, inner in value.items())
        elif isinstance(value, list):
            pending.extend(((*path, index), inner) for index, inner in enumerate(value))
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield Problem(path, f"{dotted(path)}: {shown(value)} does not fit into 64 bits")


def lever_scope_problems(scopes: Iterable[tuple[Path, str]], declared: Mapping[str, Lever]) -> Iterator[Problem]:
    """Say which of ``levers = ["NAME=value"]``, each with its path, name no lever, or no value of it."""
    names = Names(declared)
    for path, text in scopes:
        name, _, value = text.partition("=")
        if name not in declared:
            near = names.near(name)
            why = message("bad_manifest.lever", path=dotted(path), lever=name, near=near)
            yield Problem(path, why, message("remedy.list_levers"), "" if near else "muster_levers")
            continue
        try:
            declared[name].parse(value)
        except ValueError as error:
            yield Problem(path, f"{dotted(path)}: {name}: {error}", f"write {name}=<{declared[name].grammar}>")


def lever_scopes(data: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield what ``levers`` of waivers and expectations hold, with its path; what is malformed is told elsewhere."""
    tables: list[tuple[tuple[str, ...], object]] = [((table,), data.get(table)) for table in _TABLES]
    for arch, inner in _items(data.get("target")):
        tables += [(("target", arch, table), inner.get(table)) for table in _TABLES if isinstance(inner, dict)]
    for prefix, modules in tables:
        for module, funcs in _items(modules):
            for func, entry in _items(funcs):
                levers = entry.get("levers") if isinstance(entry, dict) else None
                for position, text in enumerate(levers if isinstance(levers, list) else ()):
                    if isinstance(text, str) and re.match(LEVER_SCOPE_PATTERN, text):
                        yield (*prefix, module, func, "levers", position), text
