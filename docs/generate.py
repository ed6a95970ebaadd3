"""Write the generated parts of the manual: ``python docs/generate.py`` (``--check`` only lists stale ones).

A page holds ``<!-- generated: NAME -->`` and ``<!-- end generated -->``. The code writes the text between them.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

import kernel_muster as km
import tomli
import typer
from kernel_muster.audit.replay import trace_model as trace
from kernel_muster.cli.app import _app as make_app
from kernel_muster.MODEL_toml.generate import manifest_schema
from kernel_muster.plugins.generate import KEYS_FILE, keys_text
from kernel_muster.registry import hookspecs
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.discovery.entry_points import scan
from kernel_muster.registry.discovery.loading import HOOKS
from kernel_muster.registry.findings import CODES, Code
from kernel_muster.registry.levers import Lever
from typer.models import ArgumentInfo

DOCS = Path(__file__).resolve().parent
LOOKUPS = DOCS / "lookups.md"
sys.path.insert(0, str(DOCS))
from excerpts import EXCERPTS, excerpt  # noqa: E402  (neighbours, not installed modules)
from lookup_page import page_text  # noqa: E402

_PART = re.compile(r"<!-- generated: (\S+) -->\n(.*?)<!-- end generated -->\n", re.DOTALL)
_DOES = {"refuse": "refuses", "warn": "warns", "note": "notes"}
GROUPS = {
    "lookups": "What layers asked for",
    "build": "Building for the target",
    "proof": "Proving on a device",
    "late": "After the seal",
    "plugins": "Plugins",
    "manifest": "Manifests and models",
    "levers": "Levers and tuning tables",
    "coverage": "The audit itself",
}


def pages() -> Iterator[Path]:
    """Yield every page of the manual, the README and its neighbours."""
    yield from sorted(DOCS.rglob("*.md"))
    yield from (DOCS.parent / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))


def generated(page: Path) -> str:
    """Return a page with current generated parts."""

    def part(found: re.Match[str]) -> str:
        lines = "".join(f"{line}\n" for line in PARTS[found[1]](page))
        return f"<!-- generated: {found[1]} -->\n{lines}<!-- end generated -->\n"

    return _PART.sub(part, page.read_text(encoding="utf-8"))


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    columns = tuple(header)
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(cell if cell.startswith('[') else _prose(cell) for cell in row)} |"


def _prose(text: str) -> str:
    """Return text of the code as Markdown: with its code spans, and with HTML and cell separators escaped."""
    parts = text.replace("``", "`").replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "\\<") for index, part in enumerate(parts))


def code_index(page: Path) -> Iterator[str]:
    """All finding codes, by group."""
    for group, codes in groupby(CODES.values(), lambda code: code.group):
        yield from (f"## {GROUPS[group]}", "")
        rows = ((f"[{c.name}]({c.name}.md)", _DOES[c.serve], _DOES[c.qualify], c.title) for c in codes)
        yield from _table(("code", "serving", "qualifying", "what it says"), rows)
        yield ""


def code_severity(page: Path) -> Iterator[str]:
    """One code's group and effect."""
    code: Code = CODES[page.stem]
    yield f"*{code.title[0].upper()}{code.title[1:]}.*"
    yield f"Group {code.group}; {_DOES[code.serve]} when serving, {_DOES[code.qualify]} when qualifying."


def code_excerpt(page: Path) -> Iterator[str]:
    """An excerpt of a real report with the code. Its head alone if that needs a compiler or a GPU."""
    code = CODES[page.stem]
    if page.stem in EXCERPTS:
        sentence, lines = excerpt(page.stem)
    else:
        sentence = "The entry begins like this; `why`, `where` and `log` say which kernel, which tool and what it said:"
        lines = f"  1. {code.name} acme_attn::decode\n     what    {code.title}"
    yield from (sentence, "", "```text", *lines.splitlines(), "```")


def hook_table(page: Path) -> Iterator[str]:
    """All hooks."""
    rows = []
    for name in HOOKS:
        function = getattr(hookspecs, name)
        result = str(function.__annotations__["return"]).split("[")[-1].rstrip("]").strip("\"'").split(".")[-1]
        returns = "nothing" if name == "muster_audit_finished" else f"`{result}`, any number"
        rows.append((f"`{name}`", returns, str(function.__doc__).strip()))
    yield from _table(("hook", "returns", "what for"), rows)


def built_in_levers() -> tuple[Lever, ...]:
    """Return the levers of an installation without third-party packages, by name."""
    strangers = {entry.name for entry in scan().entries if entry.distribution != "kernel-muster"}
    catalog = discover(blocked=strangers)
    if catalog.findings:
        raise AssertionError(f"the built-in plugins are not sound: {catalog.findings}")
    return tuple(sorted(catalog.levers, key=lambda lever: lever.name))


def lever_list(page: Path) -> Iterator[str]:
    """All built-in levers."""
    for lever in built_in_levers():
        default = "unset" if lever.default is None else _value(lever.default)
        yield from (f"### {lever.name}", "", _prose(lever.doc), "")
        yield f"- values: {lever.grammar}; default: {default}"
        for value, effect in lever.effects.items():
            yield f"- `{_value(value)}`: {effect}"
        if lever.evidence:
            yield f"- evidence: {lever.evidence}"
        if lever.conflicts:
            yield f"- excludes: {', '.join(lever.conflicts)}"
        if lever.diagnostic:
            yield "- diagnostic: for experiments, not for serving"
        yield ""


def _value(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def commands(page: Path | None = None) -> dict[str, Any]:
    """Return every command by its full name."""
    found: dict[str, Any] = {}

    def walk(command: Any, name: str) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = command
            return
        for part, one in inner.items():
            walk(one, f"{name} {part}")

    walk(typer.main.get_command(make_app()), "muster")
    return found


def command_list(page: Path) -> Iterator[str]:
    """All commands with their arguments and options."""
    for name, command in commands().items():
        given = parameters(command)
        usage = " ".join(p.names[0] if p.is_required else f"[{p.names[0]}]" for p in given if p.is_argument)
        yield from (f"## {name}", "", f"`{' '.join(filter(None, (name, '[OPTIONS]', usage)))}`", "")
        for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(str(command.help))):
            yield from (" ".join(paragraph.split()), "")
        rows = ((", ".join(f"`{one}`" for one in p.names), p.values, p.meaning) for p in given)
        yield from _table(("argument or option", "values", "meaning"), rows)
        yield ""


@dataclass(frozen=True)
class Parameter:
    """One argument or option of a command."""

    names: tuple[str, ...]
    values: str
    meaning: str
    is_argument: bool
    is_required: bool


def parameters(command: Any) -> tuple[Parameter, ...]:
    """Read a command's parameters from its function, independent of the version of typer."""
    function = inspect.unwrap(command.callback)
    hints = get_type_hints(function, include_extras=True)
    return tuple(
        _parameter(name, parameter.default, *get_args(hints[name])[:2])
        for name, parameter in inspect.signature(function).parameters.items()
    )


def _parameter(name: str, default: Any, kind: Any, info: Any) -> Parameter:
    inner = [one for one in _types(kind) if one is not type(None)]
    choices = next((one for one in inner if issubclass(one, StrEnum)), None)
    is_argument = isinstance(info, ArgumentInfo)
    declared = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    names = (info.metavar or name.upper(),) if is_argument else declared or (f"--{name.replace('_', '-')}",)
    kinds = (("", bool), ("path", Path), ("text", str))
    values = info.metavar or next((word for word, one in kinds if one in inner), "")
    values = " ".join(choices) if choices is not None else "" if is_argument else values
    more = f" Default: {default.value}." if isinstance(default, StrEnum) else ""
    return Parameter(tuple(names), values, (info.help or "") + more, is_argument, default is inspect.Parameter.empty)


def _types(kind: Any) -> Iterator[type]:
    """Yield the types within ``list[Path] | None``."""
    inner = get_args(kind)
    if inner:
        for one in inner:
            yield from _types(one)
    elif isinstance(kind, type):
        yield kind


def manifest_tables(page: Path) -> Iterator[str]:
    """All tables of a manifest with their keys."""
    schema = manifest_schema()
    tables = {"the whole file": schema} | {name: schema["$defs"][name] for name in sorted(schema["$defs"])}
    order = ("the whole file", "ModelTable", "ModelTypeRow", "AbsentTable", "PresentTable", "TargetTable")
    for name in (*order, *(name for name in tables if name not in order)):
        table = tables[name]
        title = str(table.get("description", name)).splitlines()[0]
        yield from (f"### {'The whole file' if name == 'the whole file' else _prose(title)}", "")
        required = set(table.get("required", ()))
        rows = (
            (f"`{key}`", _type_of(value), "required" if key in required else _default(value), _described(value))
            for key, value in table["properties"].items()
        )
        yield from _table(("key", "type", "default", "meaning"), rows)
        yield ""


def _described(value: dict[str, Any]) -> str:
    return str(value.get("description", ""))


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return (
        "" if default in (None, [], {}, "") else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    )


def _type_of(value: dict[str, Any]) -> str:
    """Return a JSON Schema type in the words of TOML."""
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type_of(one) for one in value["anyOf"] if one.get("type") != "null"))
    if "enum" in value or "const" in value:
        # An empty choice means an omitted key: see the third column. Its code span would be a stray backtick.
        return " ".join(f"`{one}`" for one in value.get("enum", (value.get("const"),)) if one != "")
    if "prefixItems" in value:
        return f"[{', '.join(_type_of(one) for one in value['prefixItems'])}]"
    if value.get("type") == "array":
        return f"list of {_type_of(value['items'])}"
    if value.get("format") == "date":
        return "date"
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
    return names.get(str(value.get("type", "")), "table")


def trace_tables(page: Path) -> Iterator[str]:
    """All parts of a trace with their keys."""
    parts = (("The whole trace", trace.Trace), *((name, kind) for name, kind in trace.PARTS.items()))
    for name, kind in parts:
        yield from (f"### {name if kind is trace.Trace else f'`{name}`'}", "")
        if kind is not trace.Trace:
            yield from (_prose(str(kind.__doc__).strip()), "")
        rows = ((f"`{key}`", _type_of(value) if "$ref" not in value else "table",
                 "required" if key in kind.model_json_schema().get("required", ()) else _default(value) or "optional")
                for key, value in kind.model_json_schema()["properties"].items())  # fmt: skip
        yield from _table(("key", "type", ""), rows)
        yield ""


def public_names(page: Path) -> Iterator[str]:
    """All names of ``kernel_muster`` itself."""
    rows = []
    for name in sorted(set(km.__all__) - {"__version__"}, key=str.casefold):
        value = getattr(km, name)
        text = str(value.__doc__ or "").strip().split("\n\n")[0]
        rows.append((f"`{name}`", " ".join(text.split()) if name != "hookimpl" else "Mark a function as a hook."))
    yield from _table(("name", "what it is"), rows)


def dependency_table(page: Path) -> Iterator[str]:
    """All requirements with their ranges."""
    rows = []
    for extra, requirements in declared_requirements().items():
        for requirement in requirements:
            name, bounds = re.fullmatch(r"([\w.-]+(?:\[\w,]+\])?)([^;]*).*", requirement).groups()  # type: ignore[union-attr]
            rows.append((f"`{name}`", f"`{bounds}`" if bounds else "", extra))
    yield from _table(("requirement", "range", "extra"), rows)


def declared_requirements() -> dict[str, list[str]]:
    """Return the requirements of pyproject.toml, by extra. The empty name is the core."""
    table = tomli.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


PARTS: dict[str, Callable[[Path], Iterator[str]]] = {
    "codes": code_index,
    "severity": code_severity,
    "excerpt": code_excerpt,
    "hooks": hook_table,
    "levers": lever_list,
    "commands": command_list,
    "manifest": manifest_tables,
    "trace": trace_tables,
    "api": public_names,
    "dependencies": dependency_table,
}


def main(arguments: list[str]) -> int:
    """Write the pages and the keys of the built-in families, or check them."""
    texts = [(page, generated(page)) for page in pages()] + [
        (KEYS_FILE, keys_text()),
        (DOCS / "lookups.md", page_text()),
    ]
    stale = [(page, text) for page, text in texts if text != page.read_text(encoding="utf-8")]
    for page, text in stale:
        print(page.name if page == KEYS_FILE else page.relative_to(DOCS.parent))
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
