"""The sources of a kernel file written in Python: the file, and every module of its author's that it imports."""

import ast
import importlib.util
import sys
import traceback
from pathlib import Path

from kernel_muster.registry.backends.nvrtc.closure import read_source
from kernel_muster.registry.backends.request import BuildFailure

# Not followed: their versions are part of a cache key instead.
_OTHERS = frozenset({"cuda", "ml_dtypes", "numba", "numpy"}) | sys.stdlib_module_names

Sources = tuple[tuple[str, bytes], ...]


def read_sources(source: Path) -> Sources:
    """Return ``(module, text)`` of a file, whose name is empty, and of what it imports besides Python, Numba and NumPy.

    What is hashed is all that is compiled. BuildFailure COMPILE_FAILED names what cannot be read.
    """
    found = {"": read_source(source)}
    names = _imports(source, found[""])
    while names:
        name = names.pop()
        path = None if name in found else _module_file(name)
        if path is not None:
            found[name] = read_source(path)
            names += _imports(path, found[name])
    return tuple(sorted(found.items()))


def _imports(path: Path, text: bytes) -> list[str]:
    try:
        nodes = list(ast.walk(ast.parse(text, str(path))))
    except SyntaxError as error:
        at = f"{path}:{error.lineno}" if error.lineno else str(path)
        why, log = f"{at}: {error.msg}", "".join(traceback.format_exception_only(error)).rstrip()
        raise BuildFailure("COMPILE_FAILED", why, log, (f"correct the source at {at}",), (at,)) from None
    except ValueError as error:
        raise BuildFailure("COMPILE_FAILED", f"{path}: {error}", remedies=("write it as UTF-8 text",)) from None
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.partition(".")[0] not in _OTHERS]


def _module_file(name: str) -> Path | None:
    """Return the file of a module; None for what is no module, or has no source."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
