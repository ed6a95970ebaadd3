"""Import modules from bytes that were read before, whatever this process has imported under their names.

A kernel's digest is that of the files as they are now. The modules in ``sys.modules`` may be older: what is compiled
must be what was hashed.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Bytes(InspectLoader):
    """Executes given bytes as a module."""

    def __init__(self, text: bytes, origin: str, *, is_package: bool) -> None:
        self._text, self._origin, self._is_package = text, origin, is_package

    def is_package(self, fullname: str) -> bool:
        """Whether the module is a package."""
        return self._is_package

    def get_source(self, fullname: str) -> str:
        """Return the text."""
        return self._text.decode()

    def exec_module(self, module: ModuleType) -> None:
        """Execute the text."""
        exec(compile(self._text, self._origin, "exec"), vars(module))  # noqa: S102  (a plugin's module)


class _Finder(MetaPathFinder):
    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that executes the given bytes, for the given names alone."""
        text = self._texts.get(fullname)
        real = None if text is None else PathFinder.find_spec(fullname, path, target)
        if text is None or real is None or real.origin is None:
            return None
        places = real.submodule_search_locations
        real.loader = _Bytes(text, real.origin, is_package=places is not None)
        return real


@contextmanager
def fresh_modules(texts: Mapping[str, bytes]) -> Iterator[None]:
    """Let imports of these modules, inside, execute the given bytes; afterwards all names mean what they meant."""
    before = {name: sys.modules.pop(name) for name in texts if name in sys.modules}
    finder = _Finder(texts)
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in texts:
            made = sys.modules.pop(name, None)
            known = before.get(name)
            if known is not None:
                sys.modules[name] = known
            parent, _, child = name.rpartition(".")
            holder = sys.modules.get(parent)
            if holder is not None and made is not None and getattr(holder, child, None) is made:
                setattr(holder, child, known) if known is not None else delattr(holder, child)
