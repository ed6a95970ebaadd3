"""The source that a module was imported from: bytes of a file, unless the file has changed since.

A module's source is read once for each import. Where a plugin loads, that is right after its import. A module that the
program had imported before is compared with its file: see :func:`source_of`.
"""

import ast
import os
import time
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kernel_muster.registry.plugin_code.regular_files import read_regular

_PLAIN_FILES = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
_VALUES: Any = vars(ModuleType)["__dict__"]
_LITERALS = (bool, int, float, complex, str, bytes, type(None))
#: By module and spec: importlib.reload gives a module another spec. Both are kept, so that their ids stay their own.
_READ: dict[tuple[int, int], tuple[object, object, bytes | None]] = {}


class SourceChanged(OSError):
    """The file of a module is no longer what was imported: nobody knows which code runs."""


def module_value(module: object, name: str) -> Any:
    """Return an attribute that a module really has, or None: no ``__getattr__`` of a plugin's runs."""
    return _VALUES.__get__(module).get(name) if issubclass(type(module), ModuleType) else None


def module_name(value: object) -> str:
    """Return a module's name; empty for any other object."""
    name = module_value(value, "__name__")
    return str.__str__(name) if isinstance(name, str) else ""


def source_of(module: ModuleType) -> bytes | None:
    """Return the source that a module was imported from; None if there is no file of source.

    SourceChanged where the file was written after the process began, and its functions or constants are others than
    the module's.
    """
    spec = module_value(module, "__spec__")
    key = id(module), id(spec)
    if key not in _READ:
        file, loader = module_value(module, "__file__"), module_value(module, "__loader__")
        source = read_source(file, loader) if type(file) is str else None
        if source is not None and _is_younger(file) and not _is_same(module, source, file):
            name = module_value(module, "__name__")
            raise SourceChanged(f"{file} was changed after {name} was imported: restart the process or reload {name}")
        _READ[key] = module, spec, source
    return _READ[key][2]


def read_source(file: str, loader: Any) -> bytes | None:
    """Return the bytes of a module's file as they are now; None where they cannot be read."""
    try:
        # A loader of plain files would wait for a pipe; one of archives alone can read them.
        if isinstance(loader, _PLAIN_FILES) or not hasattr(loader, "get_data"):
            return read_regular(Path(file))
        data: bytes = loader.get_data(file)
    except OSError:
        return None
    return data


def _is_younger(file: str) -> bool:
    """Whether a file was written after this process began; a module of another one cannot be older than it."""
    try:
        return os.stat(file).st_ctime >= _process_start() - 1
    except OSError:
        return False  # in an archive


@cache
def _process_start() -> float:
    """Return when this process began, in seconds since the epoch; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def _is_same(module: ModuleType, source: bytes, file: str) -> bool:
    """Whether a module's functions and plain constants are those of a source."""
    try:
        tree = ast.parse(source)
        compiled = set(_codes(compile(tree, file, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    values = _VALUES.__get__(module)
    live = _functions(values, str(values.get("__name__")), set())
    return all(code in compiled for code in live) and all(
        _is_equal(values[name], value) for name, value in _constants(tree) if name in values
    )


def _codes(code: CodeType) -> Iterator[tuple[str, bytes, str]]:
    yield _fingerprint(code)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _fingerprint(code: CodeType) -> tuple[str, bytes, str]:
    constants = [one.co_qualname if isinstance(one, CodeType) else _shown(one) for one in code.co_consts]
    return code.co_qualname, code.co_code, repr((constants, code.co_names, code.co_varnames, code.co_firstlineno))


def _shown(constant: object) -> str:
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _functions(values: Any, module: str, seen: set[int]) -> Iterator[tuple[str, bytes, str]]:
    """Yield the functions that stand in a module or in its classes; a copy of the values: others may add to them."""
    for value in list(values.values()):
        if type(value) in (staticmethod, classmethod):
            value = value.__func__
        if type(value) is FunctionType and value.__module__ == module and "__wrapped__" not in value.__dict__:
            if value.__code__.co_filename.startswith("<"):  # made by exec: of a dataclass, say
                continue
            yield from _codes(value.__code__)
        elif type(value) is type and value.__dict__.get("__module__") == module and id(value) not in seen:
            seen.add(id(value))
            yield from _functions(value.__dict__, module, seen)


def _constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Yield the names that a source binds exactly once, at its top level, to a literal."""
    bound: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = bound.get(node.id, 0) + 1
    for line in tree.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        value = getattr(line, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and bound[target.id] == 1:
            yield target.id, value.value


def _is_equal(live: object, written: object) -> bool:
    return type(live) not in _LITERALS or (type(live) is type(written) and repr(live) == repr(written))
