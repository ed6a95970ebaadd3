"""One loaded manifest: what the file says, with the position of everything in it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.locate import Lines, line_of
from kernel_muster.MODEL_toml.schema import (
    AbsentTable,
    Document,
    ModelTable,
    ModelTypeRow,
    PresentTable,
)
from kernel_muster.MODEL_toml.waivers import Expectation, Waiver
from kernel_muster.MODEL_toml.wording import PathPart
from kernel_muster.registry.keys import KernelKey

_Entries = Mapping[str, Mapping[str, str | PresentTable]]


@dataclass(frozen=True, eq=False)
class Manifest:
    """A valid manifest. ``waivers`` and ``expected_present`` hold the common and the per-target entries alike.

    ``label`` is the path as its user wrote it, for messages.
    """

    path: Path
    document: Document
    lines: Lines = field(repr=False)
    extensions: Mapping[str, Any] = field(default_factory=dict)
    waivers: tuple[Waiver, ...] = ()
    expected_present: tuple[Expectation, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """The model's name."""
        return self.document.model.name

    @property
    def hf_id(self) -> str | None:
        """The model's Hugging Face id."""
        return self.document.model.hf_id

    @property
    def quant(self) -> str:
        """The quantisation of the weights."""
        return self.document.model.quant

    @property
    def match_names(self) -> tuple[str, ...]:
        """What tells the model apart from others of its type."""
        return self.document.model.match_names

    @property
    def model(self) -> ModelTable:
        """The ``[model]`` table, with all dimensions."""
        return self.document.model

    @property
    def model_types(self) -> tuple[ModelTypeRow, ...]:
        """The config.json types that the manifest claims."""
        return self.document.model_types

    @property
    def model_type(self) -> str | None:
        """What the model's builder is found by: ``model.model_type``, else the one type of ``[[model_types]]``."""
        types = {row.model_type for row in self.model_types}
        return self.model.model_type or (types.pop() if len(types) == 1 else None)

    @property
    def defaults(self) -> Mapping[str, bool | int | str]:
        """The levers that this model sets."""
        return self.document.defaults

    @property
    def sampling(self) -> Mapping[str, Mapping[str, Any]]:
        """The carried ``[sampling.*]`` tables."""
        return self.document.sampling

    @property
    def behavior(self) -> Mapping[str, Any]:
        """The carried ``[behavior]`` table."""
        return self.document.behavior

    @property
    def dflash(self) -> Mapping[str, Any]:
        """The carried ``[dflash]`` table."""
        return self.document.dflash

    @property
    def kernel(self) -> Mapping[str, Any]:
        """The carried ``[kernel]`` table."""
        return self.document.kernel

    def where(self, *path: PathPart) -> str:
        """Return ``file:line`` of a key or table."""
        return f"{self.label or self.path}:{line_of(self.lines, path)}"


def make_manifest(
    path: Path, document: Document, lines: Lines, extensions: Mapping[str, Any], label: str = ""
) -> Manifest:
    """Put a valid document and its positions together."""
    file = label or str(path)
    waivers = tuple(Waiver(**entry) for entry in _entries("expected_absent", document, file, lines))
    present = tuple(Expectation(**entry) for entry in _entries("expected_present", document, file, lines))
    return Manifest(path, document, lines, extensions, waivers, present, label)


def _entries(table: str, document: Document, file: str, lines: Lines) -> Iterator[dict[str, Any]]:
    yield from _flat(getattr(document, table), (table,), (), file, lines)
    for arch, tables in document.target.items():
        yield from _flat(getattr(tables, table), ("target", arch, table), (arch,), file, lines)


def _flat(
    modules: _Entries, prefix: tuple[str, ...], archs: tuple[str, ...], file: str, lines: Lines
) -> Iterator[dict[str, Any]]:
    for module, funcs in modules.items():
        for func, entry in funcs.items():
            path = (*prefix, module, func)
            fields = {
                "key": KernelKey(module, func),
                "path": path,
                "where": f"{file}:{line_of(lines, path)}",
                "archs": archs,
            }
            if isinstance(entry, str):
                yield fields | {"reason": entry}
            else:
                yield fields | _scope(entry, archs)


def _scope(entry: PresentTable, archs: tuple[str, ...]) -> dict[str, Any]:
    scope: dict[str, Any] = {
        "reason": entry.reason,
        "archs": archs or entry.archs or (),
        "quants": entry.quants or (),
        "levers": entry.levers or (),
    }
    if isinstance(entry, AbsentTable):
        scope["until"] = entry.until
    return scope
