"""Everything that is wrong with a parsed manifest, each as a path and a sentence."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from kernel_muster.MODEL_toml.schema import EXTENSION_PATTERN, LONG_FORM, SHORT_FORM, Document
from kernel_muster.MODEL_toml.wording import PathPart, dotted, shown, type_name
from kernel_muster.registry.errors import Lacks
from kernel_muster.registry.suggestions import Names
from kernel_muster.registry.values import frozen
from pydantic import BaseModel, ValidationError

Path = tuple[PathPart, ...]
_MARKERS = frozenset({SHORT_FORM, LONG_FORM, "[key]"})
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "model_type": "a table",
    "string_type": "text",
    "tuple_type": "a list",
}
_BOUNDS = {"greater_than": "more than {gt}", "greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}"}


@frozen
class Problem:
    """One thing that is wrong, where, and what to do about it."""

    path: Path
    why: str
    remedy: str = ""
    lacks: Lacks = ""


def validated(data: dict[str, Any]) -> tuple[Document | None, dict[str, Any], list[Problem]]:
    """Check parsed TOML against the schema: the document (None if anything is wrong), ``x-`` tables, problems."""
    extensions = {name: value for name, value in data.items() if name.startswith("x-")}
    problems = list(_extension_problems(extensions))
    rest = {name: value for name, value in data.items() if name not in extensions}
    document = None
    try:
        document = Document.model_validate(rest)
    except ValidationError as error:
        details, spelling = error.errors(include_url=False), _Spelling()
        bad_names = {detail["loc"][:-1] for detail in details if detail["loc"][-1:] == ("[key]",)}
        problems.extend(_problem(detail, spelling) for detail in details if not _is_consequence(detail, bad_names))
    return (None if problems else document), extensions, problems


def _is_consequence(detail: Mapping[str, Any], bad_names: Collection[tuple[Any, ...]]) -> bool:
    """Whether something else that is wrong, and is told itself, is why this is.

    A list is too short for what is wrong with its items; a key that stands in the place of a table's name is no table.
    """
    if detail["type"] == "dict_type" and detail["loc"] in bad_names:
        return True
    return detail["type"] == "too_short" and bool(detail["input"])


def _extension_problems(extensions: Mapping[str, object]) -> Iterator[Problem]:
    for name, value in extensions.items():
        if not re.fullmatch(EXTENSION_PATTERN.strip("^$"), name):
            yield Problem((name,), f"{dotted((name,))}: no table name: expected x-<name> in small letters and digits")
        elif not isinstance(value, dict):
            yield Problem((name,), f"{dotted((name,))}: expected a table, got {type_name(value)}")


class _Spelling:
    """What may be meant by names that a manifest must not have: each list of known names is indexed once."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], Names] = {}
        self.homes = {name: table for table, fields in reversed(list(_all_tables())) for name in fields}

    def of(self, known: Iterable[str]) -> Names:
        """Return the index of these names."""
        names = tuple(known)
        return self._names.setdefault(names, Names(names))


def _problem(detail: Mapping[str, Any], spelling: _Spelling) -> Problem:
    path = tuple(part for part in detail["loc"] if part not in _MARKERS)
    kind, name = detail["type"], dotted(path)
    if kind == "extra_forbidden":
        return _unknown(path, detail["input"], spelling)
    if kind == "missing":
        return _missing(path)
    return Problem(path, f"{name}: {_sentence(detail, path, spelling)}", _remedy(kind, path))


def _sentence(detail: Mapping[str, Any], path: Path, spelling: _Spelling) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind in _EXPECTED:
        expected = "a reason or a table" if _is_entry(path) else _EXPECTED[kind]
        return f"expected {expected}, got {type_name(value)}{_value(value)}"
    if kind in _BOUNDS:
        return f"expected {_BOUNDS[kind].format(**context)}, got {shown(value)}"
    if kind == "literal_error":
        choices = [str(choice) for choice in _choices(context["expected"])]
        hint = spelling.of(choices).did_you_mean(value) if isinstance(value, str) else ""
        return f"expected {context['expected']}, got {shown(value)}{hint}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} does not match {context['pattern'].strip('^$')}"
    if kind == "too_short":
        return "the list is empty; leave the key out instead"
    if kind == "string_too_short":
        return "the text is empty"
    if kind == "string_too_long":
        return f"the text is longer than {context['max_length']} characters"
    return str(detail["msg"])


def _choices(expected: str) -> list[str]:
    return [choice.strip("' ") for choice in expected.replace(" or ", ", ").split(",")]


def _value(value: object) -> str:
    return "" if isinstance(value, dict | list | tuple) or value is None else f" {shown(value)}"


def _is_entry(path: Path) -> bool:
    inner = path[2:] if path[:1] == ("target",) else path
    return len(inner) == 3 and inner[0] in ("expected_absent", "expected_present")


def _remedy(kind: str, path: Path) -> str:
    if kind == "string_pattern_mismatch" and isinstance(path[-1], str) and "::" in path[-1]:
        module, _, func = path[-1].partition("::")
        table = dotted((*path[:-1], module)) if path[-2:-1] != (module,) else dotted(path[:-1])
        return f'write it as [{table}] {func or "func"} = "<why>"'
    return ""


def _missing(path: Path) -> Problem:
    where = f"[{dotted(path[:-1])}]" if path[:-1] else "the manifest"
    what = f"[{path[-1]}]" if path == ("model",) else str(path[-1])
    return Problem(path, f"{dotted(path)}: {where} lacks {what}", f"add {what}")


def _unknown(path: Path, value: object, spelling: _Spelling) -> Problem:
    parent, name = path[:-1], str(path[-1])
    known = spelling.of(table_fields(parent))
    what = "table" if isinstance(value, dict) else "key"
    place = f"[{dotted(parent)}]" if parent else "a manifest"
    why = f"{dotted(path)}: {place} has no {what} {shown(name)}{known.did_you_mean(name)}"
    home = spelling.homes.get(name)
    if known.near(name):
        return Problem(path, why, "correct the name")
    if home is not None:
        belongs = f"in [{dotted(home)}]" if home else "at the top of the file, before the first table"
        return Problem(path, why, f"{shown(name)} belongs {belongs}")
    return Problem(path, why, "remove it, or carry it under [x-<name>]")


def table_fields(path: Path) -> tuple[str, ...]:
    """Return the keys that the table at a path may have; empty where anything goes."""
    annotation: Any = Document
    for part in path:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = _field(annotation, str(part))
        else:
            annotation = _inside(annotation)
    model = next(_models(annotation), None)
    return () if model is None else _names(model)


def _names(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in model.model_fields.items())


def _field(model: type[BaseModel], name: str) -> Any:
    field = model.model_fields.get(name)
    if field is None:
        return None
    table = [one for one in get_args(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
    # ``AttentionTable | None`` is a table; ``tuple[ModelTypeRow, ...]`` holds some
    is_container = getattr(field.annotation, "__origin__", None) in (dict, tuple)
    return table[0] if table and not is_container else field.annotation


def _inside(annotation: Any) -> Any:
    """What a dict's values or a tuple's items are."""
    arguments = [one for one in get_args(annotation) if one is not Ellipsis]
    if getattr(annotation, "__origin__", None) is dict:
        return arguments[1]
    return arguments[0] if arguments else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif getattr(annotation, "__origin__", None) not in (dict, tuple):
        for one in get_args(annotation):
            yield from _models(one)


def _all_tables() -> Iterator[tuple[Path, tuple[str, ...]]]:
    yield (), _names(Document)
    yield ("model",), table_fields(("model",))
    for name in ("attention", "gdn", "moe", "rope", "mtp"):
        yield ("model", name), table_fields(("model", name))
