"""Whether the rope parameters of a config are those of a manifest, wherever they stand in it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernel_muster.MODEL_toml.hf.config import ROPE_TABLES, HfConfig
from kernel_muster.MODEL_toml.hf.fields import ATTENTION, BESIDE_ROPE, NOT_YARN, ROPE_KEYS, WINDOW, YARN, YARN_OPTIONS
from kernel_muster.MODEL_toml.hf.statements import (
    NOBODY,
    Contradiction,
    compared,
    is_same,
    read_by_builder,
    toml_value,
    value_text,
)
from kernel_muster.MODEL_toml.schema import ModelTable, RopeTable
from kernel_muster.MODEL_toml.wording import shown

_KINDS = ("rope_type", "type")
_SPLIT = NOBODY + "config.json gives it two values"


def rope_contradictions(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare rope parameters wherever they stand: which of two tables a loader takes depends on its release."""
    for key in ROPE_TABLES:
        if (table := config.get(key)) is not None and not isinstance(table, Mapping):
            yield Contradiction(key, shown(table), "[model.rope]", NOBODY + "expected an object")
    if model.rope is None:
        return
    tables = dict(_rope_tables(config))
    for where, table in tables.items():
        for found in _one_rope(model.rope, table, where):
            yield replace(found, accept=_SPLIT) if _is_split(found.field, tables.values()) else found


def _is_split(field: str, tables: Iterable[Mapping[str, Any]]) -> bool:
    """Whether two places of a config give a parameter different values."""
    keys = _KINDS if field in _KINDS else (field,)
    values = [table[key] for table in tables for key in keys if table.get(key) is not None]
    if field in _KINDS:
        values = [value == YARN for value in values]
    return any(value != values[0] for value in values)


def _one_rope(rope: RopeTable, table: Mapping[str, Any], where: str) -> Iterator[Contradiction]:
    for name, key in ROPE_KEYS.items():
        yield from compared(f"rope.{name}", getattr(rope, name), key, table.get(key), where)
    is_yarn, factor = rope.yarn_factor is not None, table.get("factor")
    stated = "rope.yarn_factor" if is_yarn else "no rope.yarn_factor"
    kinds = [(key, kind) for key in _KINDS if (kind := table.get(key)) is not None]
    for key, kind in kinds:
        if kind != YARN and kind not in NOT_YARN:
            accept = f"{NOBODY}expected {' or '.join((*NOT_YARN, YARN))}"
            yield Contradiction(key, value_text(kind), stated, accept, where=where)
        elif (kind == YARN) is not is_yarn:
            yield Contradiction(key, value_text(kind), stated, _accept_yarn(table), where=where)
    if not kinds and factor is not None and not is_same(1, factor):
        accept = f"{NOBODY}a factor needs its rope_type"
        yield Contradiction("factor", f"{value_text(factor)} without rope_type", stated, accept, where=where)
    for key, built_in in YARN_OPTIONS.items() if is_yarn else ():
        if (value := table.get(key)) is not None and (built_in is None or not is_same(built_in, value)):
            wanted = f"{'none' if built_in is None else toml_value(built_in)}, built into the YaRN kernel"
            yield Contradiction(key, value_text(value), wanted, read_by_builder(key), where=where, is_built_in=True)


def _accept_yarn(table: Mapping[str, Any]) -> str:
    if YARN not in (table.get("rope_type"), table.get("type")):
        return "no yarn_factor under [model.rope]"
    keys = ("yarn_factor", "yarn_original_context")
    values = [toml_value(table.get(ROPE_KEYS[key])) or "..." for key in keys]
    return " and ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True)) + " under [model.rope]"


def _rope_tables(config: HfConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables of rope parameters, those in them for a kind of attention, and what stands beside them."""
    for key in ROPE_TABLES:
        table = config.get(key)
        if isinstance(table, Mapping):
            yield key, table
            for kind in (ATTENTION, WINDOW):
                if isinstance(own := table.get(kind), Mapping):
                    yield f"{key}.{kind}", own
    yield "", {key: value for key in BESIDE_ROPE if (value := config.get(key)) is not None}
