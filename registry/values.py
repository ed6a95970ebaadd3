"""Frozen value classes that are cheap to define.

``dataclass(frozen=True)`` compiles six methods for each class, 0.3 ms; over a hundred classes made that a fifth of the
time that a cold ``muster audit`` takes beyond its dependencies. Here ``__init__`` alone is compiled, and all classes
share the other methods. The classes are dataclasses still: ``replace``, ``fields`` and ``asdict`` work.
"""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar, dataclass_transform, overload

_T = TypeVar("_T")


class _Methods:
    """What all frozen classes share."""

    def __setattr__(self: Any, name: str, value: object) -> None:
        # __init__ sets each field, and nobody does again
        if name in self.__dict__ or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self: Any, other: Any) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return bool(self.__compared__(self) == self.__compared__(other))

    def __hash__(self: Any) -> int:
        return hash(self.__compared__(self))

    def __repr__(self: Any) -> str:
        shown = ", ".join(f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
        return f"{self.__class__.__qualname__}({shown})"


_SHARED = ("__setattr__", "__delattr__", "__eq__", "__hash__", "__repr__")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@overload
def frozen(cls: type[_T], /) -> type[_T]: ...
@overload
def frozen(*, kw_only: bool = False) -> Callable[[type[_T]], type[_T]]: ...


def frozen(cls: type[_T] | None = None, /, *, kw_only: bool = False) -> Any:
    """Make a class a frozen dataclass: compared and hashed by its fields, and shown with them."""

    def make(cls: type[_T]) -> type[_T]:
        made: Any = dataclass(eq=False, repr=False, kw_only=kw_only)(cls)
        names = [item.name for item in fields(made) if item.compare]
        made.__compared__ = staticmethod(attrgetter(*names) if names else lambda self: ())
        for name in _SHARED:
            if getattr(made, name) is getattr(object, name):  # the class has none of its own
                setattr(made, name, _Methods.__dict__[name])
        return cls

    return make if cls is None else make(cls)


def is_frozen_class(kind: type) -> bool:
    """Whether :func:`frozen` made exactly this class; a class derived from such a one may be anybody's."""
    return "__compared__" in vars(kind)


def copied(value: _T) -> _T:
    """Return a copy of frozen values, sets, tuples, lists and mappings, at any depth; all else is shared.

    ``object.__setattr__`` changes a frozen value. A value that plugins or callers see is therefore a copy.
    """
    return _copied(value)  # type: ignore[no-any-return]


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return kind(map(_copied, value))
    if kind is dict or kind is MappingProxyType:
        return kind({_copied(key): _copied(one) for key, one in value.items()})
    if not is_frozen_class(kind):
        return value
    made = object.__new__(kind)
    made.__dict__.update((item.name, _copied(value.__dict__[item.name])) for item in fields(value))
    return made
