from collections.abc import Iterator
from typing import Any

import pytest
import tomli
from kernel_muster.MODEL_toml import manifest_folder
from kernel_muster.MODEL_toml.locate import key_lines, line_of

NASTY = (
    "# [no.table]\n"  # 1
    'top = "a # b = [c]" # comment = 1\n'  # 2
    "\"quoted \\u0041.b\" = 'lit # [x]'\n"  # 3
    'text = """\n[not.a.table]\nk = 1 \\""" still"""\n'  # 4-6
    "raw = '''\n'' [x] ='''\n"  # 7-8
    "a.b . 'c d' = 1.5\n"  # 9
    "list = [ # c ]\n  1,\n  { in = 1, deep = { er = [2, 3] } },\n]\n"  # 10-13
    "[ table . sub ] # ]\n"  # 14
    "when = 2027-06-30T01:02:03.5Z\n"  # 15
    "[[rows]]\nx = 1\n"  # 16-17
    "[rows.inner]\ny = 2\n"  # 18-19
    "[[rows]]\nx = {}\n"  # 20-21
    "[[rows.more]]\nz = []\n"  # 22-23
    "[table]\nlast = [[1], []]\n"  # 24-25
)
LINES = {
    ("top",): 2,
    ("quoted A.b",): 3,
    ("text",): 4,
    ("raw",): 7,
    ("a", "b", "c d"): 9,
    ("list",): 10,
    ("list", 0): 11,
    ("list", 1): 12,
    ("list", 1, "deep", "er", 1): 12,
    ("table", "sub"): 14,
    ("table", "sub", "when"): 15,
    ("rows", 0): 16,
    ("rows", 0, "x"): 17,
    ("rows", 0, "inner"): 18,
    ("rows", 0, "inner", "y"): 19,
    ("rows", 1): 20,
    ("rows", 1, "x"): 21,
    ("rows", 1, "more", 0): 22,
    ("rows", 1, "more", 0, "z"): 23,
    ("table", "last"): 25,
    ("table", "last", 0, 0): 25,
}


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path of parsed TOML: an independent list of what must have a line."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from paths(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*path, index))


@pytest.mark.parametrize(("path", "line"), LINES.items(), ids=str)
def test_key_lines_of_nasty_toml_gives_the_line(path: tuple[Any, ...], line: int) -> None:
    assert key_lines(NASTY)[path] == line


@pytest.mark.parametrize(
    "name", ["nasty", *sorted(file.parent.name for file in manifest_folder().glob("*/MODEL.toml"))]
)
def test_key_lines_holds_exactly_the_paths_that_the_parser_finds(name: str) -> None:
    text = NASTY if name == "nasty" else (manifest_folder() / name / "MODEL.toml").read_text()
    assert set(key_lines(text)) == set(paths(tomli.loads(text)))


def test_line_of_an_unknown_path_is_its_parents() -> None:
    lines = key_lines(NASTY)
    assert line_of(lines, ("rows", 1, "nothing")) == 20
    assert line_of(lines, ("nothing",)) == 1


def test_key_lines_is_linear_in_the_text() -> None:
    text = "a = [" + "'x', " * 40_000 + "]\n" + 'b = "' + '\\"' * 20_000 + '"\n'
    assert key_lines(text)["b",] == 2
