"""Which modules a quantisation config means: exact names, regular expressions, wildcards, and class names.

A config written for a text model says ``model.layers.3``, the multimodal checkpoint of the same model calls that
``model.language_model.layers.3``: a module is matched under every spelling of its name. Whether the match was meant is
then seen from the tensors, never from the name alone.
"""

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate

#: Classes of torch that configs name as targets; which class a module has is not written in a checkpoint.
CLASSES = frozenset({"Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ColumnParallelLinear", "RowParallelLinear"})
#: Where the text model hangs, in checkpoints of the text model alone and of multimodal ones.
TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


class Patterns:
    """Names and patterns, compiled once. ``whole`` names mean the module and everything below it.

    A quantisation config may name each expert of each layer, and each of those modules is looked up: names cost a look
    into a set, expressions a match each.
    """

    def __init__(
        self,
        exact: Iterable[str] = (),
        expressions: Iterable[str] = (),
        classes: Iterable[str] = (),
        whole: Iterable[str] = (),
    ) -> None:
        self.exact, self.classes, self._whole = frozenset(exact), frozenset(classes), frozenset(whole)
        self._expressions = [re.compile(expression) for expression in expressions]

    def matches(self, module: str) -> bool:
        """Whether a name or an expression matches the module; classes are left aside."""
        spellings = module_spellings(module)
        if not self.exact.isdisjoint(spellings):
            return True
        if self._whole and not self._whole.isdisjoint(name for one in spellings for name in _upwards(one)):
            return True
        return any(one.match(spelling) for one in self._expressions for spelling in spellings)


def _upwards(module: str) -> Iterator[str]:
    """Yield a module and those that it lies in."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def compressed_tensors_patterns(entries: Iterable[str]) -> Patterns:
    """Read targets or an ignore list: ``re:`` begins an expression that matches from the start, the rest is exact."""
    names = list(entries)
    expressions = [name.removeprefix("re:") for name in names if name.startswith("re:")]
    plain = [name for name in names if not name.startswith("re:")]
    return Patterns([name for name in plain if name not in CLASSES], expressions, CLASSES.intersection(plain))


def modelopt_patterns(entries: Iterable[str]) -> Patterns:
    """Read an exclude list: ``*`` is a wildcard, a plain name means the module and everything below it."""
    names = list(entries)
    wild = [translate(name) for name in names if "*" in name]
    plain = [name for name in names if "*" not in name]
    return Patterns(expressions=wild, whole=plain)


def module_spellings(module: str) -> tuple[str, ...]:
    """Return the names that a module has in text-only and multimodal checkpoints, its own first."""
    for prefix in TEXT_PREFIXES:
        if module.startswith(prefix):
            rest = module.removeprefix(prefix)
            return tuple(dict.fromkeys((module, *(other + rest for other in TEXT_PREFIXES))))
    return (module,)
