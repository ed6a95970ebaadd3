"""Integer constants of CUDA sources: a launcher reads the numbers that it shares with its kernel."""

import ast
import re
from functools import cache
from pathlib import Path

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STATEMENT = re.compile(r"^constexpr int ([^;]*);", re.MULTILINE)
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.FloorDiv: "__floordiv__", ast.LShift: "__lshift__",
}  # fmt: skip


def constants(source: Path, *names: str) -> tuple[int, ...]:
    """Return constants that a CUDA source defines at namespace scope, as ``constexpr int NAME = value``.

    A value is an integer, or an expression of integers and of constants of the same file. ValueError for a constant
    that is missing, has two values (in branches of the preprocessor), or another kind of value.
    """
    defined = _expressions(source)
    return tuple(_value(source, defined, name) for name in names)


@cache
def _expressions(source: Path) -> dict[str, tuple[str, ...]]:
    """Return the different expressions of each constant of a source."""
    found: dict[str, dict[str, None]] = {}
    for statement in _STATEMENT.findall(source.read_text(encoding="utf-8")):
        for part in _COMMENT.sub("", statement).split(","):
            name, equals, expression = part.partition("=")
            if equals:
                found.setdefault(name.strip(), {})[" ".join(expression.split())] = None
    return {name: tuple(expressions) for name, expressions in found.items()}


def _value(source: Path, defined: dict[str, tuple[str, ...]], name: str) -> int:
    expressions = defined.get(name, ())
    if len(expressions) != 1:
        got = " and ".join(expressions) or "none"
        raise ValueError(f"{source.name}: expected one value of constexpr int {name}, got {got}")

    def evaluated(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=other):
                return _value(source, defined, other)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                result: int = getattr(evaluated(left), _OPERATORS[type(operator)])(evaluated(right))
                return result
        raise ValueError(f"{source.name}: expected an integer expression as {name}, got {expressions[0]}")

    try:
        return evaluated(ast.parse(expressions[0].replace("/", "//"), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{source.name}: expected an integer expression as {name}, got {expressions[0]}") from None
