"""Read one manifest: everything that is wrong with it at once, and either the whole manifest or none."""

import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli
from kernel_muster.MODEL_toml.crosscheck import cross_problems, lever_scope_problems, lever_scopes
from kernel_muster.MODEL_toml.locate import Lines, key_lines, line_of
from kernel_muster.MODEL_toml.manifest import Manifest, make_manifest
from kernel_muster.MODEL_toml.problems import Problem, validated
from kernel_muster.MODEL_toml.wording import dotted, tidy
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.levers import Lever
from kernel_muster.registry.messages.message import message

#: The shipped manifests are about 3 KiB; a file this large is no manifest.
MOST_BYTES = 256 * 1024
_AT = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)\Z")
_DECLARED_TWICE = ("overwrite", "declare", "twice", "immutable", "mutate")
# Enough to say of a broken manifest whose it is.
_NAME = re.compile(r"^\s*name\s*=\s*[\"']([A-Za-z0-9][A-Za-z0-9._-]*)[\"']", re.MULTILINE)


def load_manifest(
    path: str | Path, *, levers: Iterable[Lever] | None = None, label: str = ""
) -> tuple[Manifest | None, list[Finding]]:
    """Read a manifest; None and BAD_MANIFEST findings if anything at all is wrong with it.

    With the declared levers given, lever scopes are checked against them too. ``label`` is what messages call the file.
    """
    file, shown = Path(path), label or str(path)
    text, problem = read_text(file)
    if text is None:
        return None, [_finding(shown, problem, None)]
    data, problem, line = _parse(text)
    if data is None:
        return None, [_finding(shown, problem, {(): line})]
    lines = key_lines(text)
    document, extensions, problems = validated(data)
    problems += cross_problems(data)
    if levers is not None:
        problems += lever_scope_problems(lever_scopes(data), {lever.name: lever for lever in levers})
    manifest = None if document is None or problems else make_manifest(file, document, lines, extensions, label)
    return manifest, [_finding(shown, one, lines) for one in _in_order(problems, lines)]


def check_levers(manifest: Manifest, levers: Iterable[Lever]) -> list[Finding]:
    """Say which lever scopes name a lever that nobody declares, or a value that it cannot have."""
    declared = {lever.name: lever for lever in levers}
    entries = (*manifest.waivers, *manifest.expected_present)
    scopes = [((*entry.path, "levers", i), text) for entry in entries for i, text in enumerate(entry.levers)]
    file = manifest.label or str(manifest.path)
    return [_finding(file, one, manifest.lines) for one in lever_scope_problems(scopes, declared)]


def claimed_names(path: Path) -> set[str]:
    """Return the names that a file which does not load may have meant: its folder's, and what it says."""
    text, _ = read_text(path)
    return {path.parent.name, *(_NAME.findall(text or "")[:1])}


_NO_PROBLEM = Problem((), "")


def read_text(path: Path) -> tuple[str | None, Problem]:
    """Read a regular file of bounded size as UTF-8; None and the problem if that cannot be done."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return None, Problem((), "it is a directory, expected a file", "name the MODEL.toml inside it")
        if not stat.S_ISREG(mode):
            return None, Problem((), "it is no regular file")
        with path.open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None, Problem((), "there is no such file", "check the path")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return None, Problem((), f"it cannot be read: {getattr(error, 'strerror', None) or error}")
    if len(raw) > MOST_BYTES:
        return None, Problem((), f"it has more than {MOST_BYTES} bytes, which no manifest needs")
    try:
        return raw.decode("utf-8-sig"), _NO_PROBLEM
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
        return None, Problem((), why, "save the file as UTF-8")


def _parse(text: str) -> tuple[dict[str, Any] | None, Problem, int]:
    try:
        return tomli.loads(text), _NO_PROBLEM, 1
    except RecursionError as error:
        return None, Problem((), f"it is nested too deeply: {tidy(str(error))}"), 1
    except ValueError as error:  # TOMLDecodeError is one; an integer of thousands of digits is another
        return None, *_toml_problem(tidy(str(error)), text)


def _toml_problem(message: str, text: str) -> tuple[Problem, int]:
    place = _AT.search(message)
    line = 1
    if place is not None:
        line = int(place[1]) if place[1] else text.count("\n") + (not text.endswith("\n"))
        message = message[: place.start()]
    twice = any(word in message.lower() for word in _DECLARED_TWICE)
    remedy = "a key or table stands here a second time: keep one of them" if twice else ""
    return Problem((), f"it is not valid TOML: {_printable(message)}", remedy), max(line, 1)


def _printable(text: str) -> str:
    text = text.encode("ascii", "backslashreplace").decode()
    return "".join(character if character.isprintable() else "?" for character in text)


def _in_order(problems: Iterable[Problem], lines: Lines) -> list[Problem]:
    return sorted(set(problems), key=lambda problem: (line_of(lines, problem.path), dotted(problem.path), problem.why))


def _finding(file: str, problem: Problem, lines: Lines | None) -> Finding:
    subject = dotted(problem.path) or file
    why = problem.why if problem.path else message("bad_manifest.file", file=file, why=problem.why)
    where = file if lines is None else f"{file}:{line_of(lines, problem.path)}"
    remedies = (problem.remedy,) if problem.remedy else ()
    return Finding("BAD_MANIFEST", subject, why, (where,), remedies, lacks=problem.lacks)
