"""Kernel keys: ``module::func``."""

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

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


def near(name: str, known: Iterable[str], most: int = 3, prefix: str = "", cutoff: float = 0.72) -> list[str]:
    """Return the known names that look most like ``name``, best first; a prefix of all names does not count."""
    bare = sorted({other.removeprefix(prefix) for other in known})
    found = difflib.get_close_matches(name.removeprefix(prefix), bare, n=most, cutoff=cutoff)
    return [prefix + other for other in found]


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``; did you mean ...?``, or an empty string."""
    return named(near(name, known, prefix=prefix))


def named(names: Iterable[str]) -> str:
    """Return ``; did you mean ...?`` of these names, or an empty string."""
    text = " or ".join(names)
    return f"; did you mean {text}?" if text else ""


def keys_like(key: KernelKey, known: Iterable[KernelKey]) -> list[str]:
    """Return known keys that one may be meant for: the same function elsewhere, or a slip in its module.

    Siblings are no slips: the names of kernels tell tiles and widths by their numbers. Where a module stands in the
    place of the function, those are its keys.
    """
    others = list(known)
    if same := [str(other) for other in others if other.func == key.func]:
        return sorted(same)[:3]
    if inside := [str(other) for other in others if other.module == key.func]:
        return sorted(inside)[:3]
    numbers = _NUMBER.findall(key.func)
    in_module = [o.func for o in others if o.module == key.module and _NUMBER.findall(o.func) == numbers]
    return [f"{key.module}::{func}" for func in near(key.func, in_module, cutoff=MISSPELT)]


def keys_meant(text: str, known: Iterable[KernelKey]) -> list[str]:
    """Return known keys that may be meant by what is no key: ``rms_norm``, or ``norm.rms_norm``."""
    others = list(known)
    last = re.split(r"[^a-z0-9_]+", text.strip().lower())[-1]
    if not last:
        return []
    if found := keys_like(KernelKey("", last), others):
        return found
    like = near(last, {other.func for other in others}, cutoff=MISSPELT)
    return sorted(str(other) for other in others if other.func in like)[:3]
