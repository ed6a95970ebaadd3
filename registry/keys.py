"""Kernel keys: ``module::func``."""

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple, TypeVar

from kernel_muster.registry.suggestions import ALIKE, Allowance, Names

_Label = TypeVar("_Label")
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
#: How alike a function's name must be to pass for a misspelling.
MISSPELT = 0.8
_NUMBER = re.compile(r"\d+")


class KernelKey(NamedTuple):
    """What a layer asks for."""

    module: str
    func: str

    def __str__(self) -> str:
        return f"{self.module}::{self.func}"

    @property
    def problem(self) -> str | None:
        """Why this is no key, or None."""
        for part, name in (("module", self.module), ("func", self.func)):
            if not isinstance(name, str) or not _NAME.match(name):
                return f"{part} {name!r} does not match [a-z][a-z0-9_]*"
        return None


def parse_key(text: str) -> KernelKey:
    """Read ``module::func``; ValueError says what is wrong."""
    module, separator, func = text.partition("::") if isinstance(text, str) else ("", "", "")
    if not separator:
        raise ValueError(f"{text!r} is not a key: expected module::func")
    key = KernelKey(module, func)
    if key.problem:
        raise ValueError(f"{text!r} is not a key: {key.problem}")
    return key


def key_problem(text: str) -> str:
    """Return why a text is no key, or nothing."""
    try:
        parse_key(text)
    except ValueError as error:
        return str(error)
    return ""


def near(name: str, known: Iterable[str], most: int = 3, prefix: str = "", cutoff: float = ALIKE) -> list[str]:
    """Return the known names that look most like ``name``, best first; who asks often keeps a :class:`Names`."""
    return Names(known, prefix).near(name, most, cutoff)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``; did you mean ...?``, or an empty string; who asks often keeps a :class:`Names`."""
    return Names(known, prefix).did_you_mean(name)


class KeyNames:
    """Known keys, and which of them another may be meant for."""

    def __init__(self, known: Iterable[KernelKey]) -> None:
        self._known = known
        self._allowance = Allowance()
        self._siblings: dict[tuple[str, tuple[str, ...]], Names] = {}

    @cached_property
    def _keys(self) -> list[KernelKey]:
        return sorted(set(self._known))

    @cached_property
    def _by_func(self) -> dict[str, list[KernelKey]]:
        return _grouped(self._keys, lambda key: key.func)

    @cached_property
    def _by_module(self) -> dict[str, list[KernelKey]]:
        return _grouped(self._keys, lambda key: key.module)

    @cached_property
    def _by_siblings(self) -> dict[tuple[str, tuple[str, ...]], list[KernelKey]]:
        return _grouped(self._keys, _family)

    @cached_property
    def _funcs(self) -> Names:
        return Names(self._by_func, allowance=self._allowance)

    def modules_of(self, func: str) -> list[str]:
        """Return the modules that have a function of this name."""
        return [key.module for key in self._by_func.get(func, ())]

    def like(self, key: KernelKey) -> list[str]:
        """Return known keys that one may be meant for: the same function elsewhere, or a slip in its module.

        Siblings are no slips: the names of kernels tell tiles and widths by their numbers. Where a module stands in
        the place of the function, those are its keys.
        """
        if found := self._by_func.get(key.func) or self._by_module.get(key.func):
            return [str(other) for other in found[:3]]
        family = _family(key)
        if family not in self._by_siblings:
            return []
        names = self._siblings.get(family)
        if names is None:
            funcs = (other.func for other in self._by_siblings[family])
            names = self._siblings[family] = Names(funcs, allowance=self._allowance)
        return [f"{key.module}::{func}" for func in names.near(key.func, cutoff=MISSPELT)]

    def meant(self, text: str) -> list[str]:
        """Return known keys that may be meant by what is no key: ``rms_norm``, or ``norm.rms_norm``."""
        last = re.split(r"[^a-z0-9_]+", text.strip().lower())[-1]
        if not last:
            return []
        if found := self.like(KernelKey("", last)):
            return found
        alike = self._funcs.near(last, cutoff=MISSPELT)
        return [str(other) for other in sorted(key for func in alike for key in self._by_func[func][:3])[:3]]


def _family(key: KernelKey) -> tuple[str, tuple[str, ...]]:
    return key.module, tuple(_NUMBER.findall(key.func))


def _grouped(keys: Iterable[KernelKey], label: Callable[[KernelKey], _Label]) -> dict[_Label, list[KernelKey]]:
    groups: dict[_Label, list[KernelKey]] = {}
    for key in keys:
        groups.setdefault(label(key), []).append(key)
    return groups
