"""Digests of Python code: equal on every machine, and for every path, that has the same sources.

What a module is, its source says: of bytes in a file nothing depends on the version of Python. What a function was made
with, its closure, defaults and bound arguments say: two planners of one factory differ in nothing else.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from kernel_muster.registry.plugin_code.module_sources import SourceChanged, module_value, read_source, source_of

_HOST = "kernel_muster"
#: What the host itself is, its version says; its plugins are plugins like others.
_HOST_PLUGINS = f"{_HOST}.plugins"
_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]*(\([^)]*\)|[^\n#;]*)|import[ \t]+([^\n#;]*))", re.MULTILINE
)
_NAME = re.compile(r"[\w.]+")
#: By source and name: what a module imports takes long to find. The source is kept, so that its id stays its own.
_IMPORTED: dict[tuple[int, str], tuple[bytes | None, tuple[bytes, tuple[str, ...]] | None]] = {}
_MOST_VALUES = 100_000
_NUMBERS = (bool, int, float, complex, bytes, type(None), type(Ellipsis))


def source_digest_of(module: ModuleType) -> bytes | None:
    """Return the digest of the source that a module was imported from. None if there is no file.

    SourceChanged where the file is another now.
    """
    source = source_of(module)
    return None if source is None else hashlib.sha256(source).digest()


def remember_sources(names: Iterable[str]) -> None:
    """Read the sources of modules that a plugin has just imported, as far as they count as its code."""
    for name in names:
        if name.partition(".")[0] != _HOST and _root(name):
            _digests(name)


def code_digest_of(function: Any) -> bytes:
    """Return the digest of a function that no file holds: of its bytecode with its constants and names."""
    code = getattr(function, "__code__", None)
    return _digest_of(code) if code is not None else f"{function.__module__}:{function.__qualname__}".encode()


def _digest_of(code: CodeType) -> bytes:
    constants = [_digest_of(one) if isinstance(one, CodeType) else _shown(one) for one in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).digest()


def _shown(constant: object) -> str:
    # The order of a set is another one in each process.
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def digest_of_values(values: Mapping[str, object]) -> str:
    """Return the digest of functions, and of what holds some, with the code that they run.

    It covers the source of the modules in which the functions and the classes of such objects stand, and of all modules
    of the same top-level package that these import, be it only where they run; and what functions were made with. Of
    other packages, which come in by a closure, say, it has names alone. Text and paths that begin at the root of a file
    system differ between machines, and are left out. Nothing is imported.
    """
    described = _Described(frozenset(_root(module) for value in values.values() for module in _homes(value)))
    text = {name: described.of(value) for name, value in sorted(values.items())}
    parts = [(name, digest.hex()) for name, digest in sorted(_sources(described.modules).items())]
    return hashlib.sha256(repr((sorted(text.items()), parts)).encode()).hexdigest()


class _Described:
    """Values as text that is the same in every process, and the modules of the functions and classes among them.

    ``packages`` are those whose code counts; of others only names do.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self.modules: set[str] = set()
        self._packages = packages - {""}
        self._open: list[object] = []

    def of(self, value: object) -> str:
        """Describe a value; an object without values of its own is shown by its type."""
        if type(value) in _NUMBERS:
            return repr(value)
        if type(value) is str:
            return "(a path)" if ("/" in value or "\\" in value) and os.path.isabs(value) else repr(value)
        if any(value is one for one in self._open):
            return "(itself)"
        self._open.append(value)
        try:
            return self._of(value)
        except Exception:  # noqa: BLE001  (objects of a plugin's do what they like when they are looked at)
            return f"<{type(value).__name__}>"
        finally:
            self._open.pop()

    def _of(self, value: Any) -> str:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return f"{self.of(value.__func__)} of {self.of(value.__self__)}"
        if isinstance(value, partial):
            return f"partial({self.of(value.func)}, {self.of(value.args)}, {self.of(value.keywords)})"
        if isinstance(value, ModuleType):
            return self._in(value.__name__, "module")
        if isinstance(value, type):
            return self._in(value.__module__, value.__qualname__)
        if isinstance(value, Mapping):
            pairs = (f"{self.of(key)}: {self.of(one)}" for key, one in _first(value.items()))
            return f"{{{', '.join(sorted(pairs))}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.of, _first(value))))}}}"
        if isinstance(value, Sequence) and not isinstance(value, range):
            return f"[{', '.join(map(self.of, _first(value)))}]"
        return self._object(value)

    def _in(self, module: str, name: str) -> str:
        if _root(module) not in self._packages:  # where a class of another package stands may differ between versions
            return name
        self.modules.add(module)
        return f"{module}:{name}"

    def _function(self, function: FunctionType) -> str:
        # A decorator's function has the name of what it wraps, and the globals of its own module.
        module = str(function.__globals__.get("__name__", ""))
        name = self._in(module, function.__qualname__)
        if _root(module) not in self._packages:
            return f"{name}({self.of(_own(function).get('__wrapped__'))})"
        name += f":{function.__code__.co_firstlineno}"
        if _digests(module) is None:
            name += f" {code_digest_of(function).hex()}"
        made_with = dict(zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=False))
        return f"{name}{self.of((made_with, function.__defaults__, function.__kwdefaults__))}"

    def _object(self, value: Any) -> str:
        if isinstance(value, PurePath):
            return "(a path)"
        if isinstance(value, range):
            return repr(value)
        kind = self.of(type(value))
        if isinstance(value, Enum):
            return f"{kind}.{value.name}"
        if (inner := _own(value).get("__wrapped__")) is not None:  # functools.cache
            return f"{kind}({self.of(inner)})"
        if is_dataclass(value):
            return f"{kind}({self.of({item.name: getattr(value, item.name) for item in fields(value)})})"
        # A cached property, say, stands among an object's own values too, once it was asked for.
        own = {name: one for name, one in _own(value).items() if not hasattr(type(value), name)}
        return f"{kind}({self.of(own)})"


def _first(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values; ValueError for more than a closure holds: a plugin's own sequence may never end."""
    for at, value in enumerate(values):
        if at == _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values")
        yield value


def _homes(value: Any) -> Iterator[str]:
    """Yield the modules in which the functions stand that a value is, or holds, whoever decorated or bound them."""
    if isinstance(value, tuple):
        yield from (module for one in value for module in _homes(one))
    elif isinstance(value, dict):
        yield from (module for one in value.values() for module in _homes(one))
    elif isinstance(value, partial):
        yield from _homes(value.func)
    elif isinstance(value, MethodType):
        yield from _homes(value.__func__)
    elif (inner := _own(value).get("__wrapped__")) is not None and inner is not value:
        yield from _homes(inner)
    elif isinstance(value, FunctionType):
        yield str(value.__globals__.get("__name__", ""))
    elif callable(value):
        yield str((value if isinstance(value, type) else type(value)).__module__)


def _own(value: object) -> Mapping[str, object]:
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return "(empty)"


def _root(module: str) -> str:
    """Return the package whose modules count as one plugin's code; empty for Python's own and the host's."""
    if module == _HOST_PLUGINS or module.startswith(f"{_HOST_PLUGINS}."):
        return _HOST_PLUGINS
    top = module.partition(".")[0]
    return "" if top == _HOST or top in sys.stdlib_module_names else top or "(nowhere)"


def _sources(modules: Iterable[str]) -> dict[str, bytes]:
    """Return the digests of modules, and of what they import of their own packages, as far as there is a source."""
    found: dict[str, bytes] = {}
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            if (digests := _digests(name)) is not None:
                found[name], imported = digests
                waiting += imported
    return found


def _digests(name: str) -> tuple[bytes, tuple[str, ...]] | None:
    """Return the digest of a module's source, and which modules of its own package it may import; None without any."""
    try:
        if (module := sys.modules.get(name)) is not None:
            return _digests_of(module, name)
        if (spec := _found(name)) is not None and spec.origin is not None and spec.origin.endswith(".py"):
            return _digests_in(read_source(spec.origin, spec.loader), name, spec.parent)
    except SourceChanged:
        raise
    except Exception:  # noqa: BLE001  (what stands for a module may be anything)
        return None
    return None


def _digests_of(module: ModuleType, name: str) -> tuple[bytes, tuple[str, ...]] | None:
    """Read a source in Python; machine code of an extension module is another on each machine."""
    file, has_path = module_value(module, "__file__"), module_value(module, "__path__") is not None
    package = module_value(module, "__package__") or (name if has_path else name.rpartition(".")[0])
    source = source_of(module) if type(file) is str and file.endswith(".py") else None
    known = _IMPORTED.get((id(source), name))
    if known is None:
        known = _IMPORTED[id(source), name] = source, _digests_in(source, name, package)
    return known[1]


def _digests_in(source: bytes | None, name: str, package: str | None) -> tuple[bytes, tuple[str, ...]] | None:
    if source is None:
        return None
    root = _root(name)
    imported = (one for one in dict.fromkeys(_imports(source, package or "")) if _root(one) == root)
    return hashlib.sha256(source).digest(), tuple(one for one in imported if one in sys.modules or _found(one))


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yield the names of what may be modules among all that a source imports; no module has the other names."""
    for dots, named, names, plain in _IMPORT.findall(source.replace(b"\\\n", b" ")):
        text = re.sub(rb"#[^\n]*", b"", names or plain).decode(errors="replace")
        listed = [words[0] for part in text.strip("() \t\n\r").split(",") if (words := _NAME.findall(part))]
        if plain:
            yield from listed
            continue
        base = package.rsplit(".", len(dots) - 1)[0] if dots else ""
        base = ".".join(filter(None, (base, named.decode(errors="replace"))))
        yield base
        yield from (f"{base}.{one}" for one in listed)


def _found(name: str) -> ModuleSpec | None:
    """Find a module that nobody has imported, without importing the packages that hold it."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        whole = ".".join(parts[:number])
        loaded = sys.modules.get(whole)
        if loaded is not None:
            spec, path = None, getattr(loaded, "__path__", None)
        else:
            spec = _asked(whole, path)
            path = spec.submodule_search_locations if spec is not None else None
        if path is None and number < len(parts):
            return None
    return spec


def _asked(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        with suppress(Exception):  # finders may be anybody's
            if (spec := finder.find_spec(name, path)) is not None:
                return spec
    return None
