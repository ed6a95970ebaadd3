"""The sources of a kernel file written in Python: the file, and every module of its author's that it imports."""

import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from kernel_muster.registry.backends.nvrtc.closure import read_source
from kernel_muster.registry.backends.request import BuildFailure

# Not followed: their versions are part of a cache key instead. Plugins of the host's own are followed as others are.
_OTHERS = frozenset({"cuda", "kernel_muster", "ml_dtypes", "numba", "numpy", "triton"}) | sys.stdlib_module_names
_HOST_PLUGINS = "kernel_muster.plugins."

Sources = tuple[tuple[str, bytes], ...]


def read_sources(source: Path) -> Sources:
    """Return ``(module, text)`` of a file, whose name is empty, and of all that it imports besides ``_OTHERS``.

    What is hashed is all that is compiled. BuildFailure COMPILE_FAILED names what cannot be read.
    """
    found = {"": read_source(source)}
    names = _imports(source, found[""], "")
    while names:
        name = names.pop()
        path = None if name in found else module_file(name)
        if path is not None:
            found[name] = read_source(path)
            names += _imports(path, found[name], name if path.name == "__init__.py" else name.rpartition(".")[0])
    return tuple(sorted(found.items()))


def _imports(path: Path, text: bytes, package: str) -> list[str]:
    """Return the names of all modules whose attributes a source may use; names of no module may be among them."""
    try:
        nodes = list(ast.walk(ast.parse(text, str(path))))
    except SyntaxError as error:
        at = f"{path}:{error.lineno}" if error.lineno else str(path)
        why, log = f"{at}: {error.msg}", "".join(traceback.format_exception_only(error)).rstrip()
        raise BuildFailure("COMPILE_FAILED", why, log, (f"correct the source at {at}",), (at,)) from None
    except ValueError as error:
        raise BuildFailure("COMPILE_FAILED", f"{path}: {error}", remedies=("write it as UTF-8 text",)) from None
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [name for alias in node.names for name in _bound(alias)]
        elif isinstance(node, ast.ImportFrom) and (base := _base(node, package)):
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return [name for name in names if _is_followed(name)]


def _bound(alias: ast.alias) -> Iterator[str]:
    """Yield what ``import a.b`` makes usable: ``a`` and ``a.b``; with a name of its own ``a.b`` alone."""
    parts = alias.name.split(".")
    for number in range(len(parts) if alias.asname else 1, len(parts) + 1):
        yield ".".join(parts[:number])


def _base(node: ast.ImportFrom, package: str) -> str:
    """Return the module from which names are imported; dots count from the package of the file that imports."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])]) if package and kept else ""


def _is_followed(name: str) -> bool:
    return name.partition(".")[0] not in _OTHERS or f"{name}.".startswith(_HOST_PLUGINS)


def module_file(name: str) -> Path | None:
    """Return the file of a module; None for what is no module, or has no source."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
