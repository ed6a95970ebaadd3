"""Whether a ``config.json`` is of a manifest's model: the one check of every command that takes a folder or a config.

A contradiction refuses. A field that nobody knows, and weights that the config does not quantise, are doubts.
"""

from collections.abc import Iterable
from typing import Protocol

from kernel_muster.MODEL_toml.hf.config import CONFIG_NAME, ConfigFacts, HfConfig, config_facts
from kernel_muster.MODEL_toml.hf.contradictions import contradictions
from kernel_muster.MODEL_toml.hf.fields import UnknownField, unknown_fields
from kernel_muster.MODEL_toml.hf.quant_contradictions import is_quantised
from kernel_muster.MODEL_toml.hf.statements import Contradiction, toml_value
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.schema import ModelTable
from kernel_muster.MODEL_toml.wording import plain, shown
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.messages.message import message

_MOST_SHOWN = 8


class HasModel(Protocol):
    """What the check needs of a manifest; one that was made without a file has no lines and no [dflash]."""

    @property
    def model(self) -> ModelTable:
        """The ``[model]`` table."""


def type_misfit(manifest: HasModel, facts: ConfigFacts) -> str | None:
    """Return both types and sizes if a config has another type or size than a manifest, else None.

    Only stated facts are compared. A type counts as the config states it, and as interleaved mrope changes it.
    """
    table, rows = manifest.model, getattr(manifest, "model_types", ())
    serves: list[tuple[str | None, int | None]] = [(row.model_type, row.hidden_size) for row in rows]
    # A drafter's config.json has the type of the plain transformer whose layers it is made of.
    own_type = None if getattr(manifest, "dflash", None) else table.model_type
    serves = serves or [(own_type, table.hidden_size)]
    if any(_fits(facts, kind, size) for kind, size in serves):
        return None
    said = f"model_type {facts.label}, hidden_size {facts.hidden_size or 'not given'}"
    have = " or ".join(f"model_type {kind or 'any'}, hidden_size {size or 'any'}" for kind, size in serves)
    return f"the config.json says {said}; {table.name} is {have}"


def type_problem(manifest: HasModel, config: HfConfig) -> str | None:
    """Return why a checkpoint's config is of another type or size, or malformed; one without a type states none."""
    if config.get("model_type") is None:
        return None
    try:
        return type_misfit(manifest, config_facts(config))
    except ValueError as error:
        return f"it is malformed: {error}"


def _fits(facts: ConfigFacts, model_type: str | None, hidden_size: int | None) -> bool:
    same_type = model_type is None or model_type in (*facts.model_types, *facts.stated)
    return same_type and (None in (hidden_size, facts.hidden_size) or hidden_size == facts.hidden_size)


def compared(manifest: Manifest, config: HfConfig) -> tuple[Contradiction, ...]:
    """Return what a config and a manifest state differently, less the fields that its builder reads itself."""
    known = manifest.model.known_config_fields
    return contradictions(manifest.model, config, dflash=manifest.dflash, known=known)


def agrees(manifest: Manifest, config: HfConfig) -> bool:
    """Whether a config has the type and size of a manifest, and contradicts it nowhere."""
    try:
        facts = config_facts(config)
    except ValueError:
        return False
    return type_misfit(manifest, facts) is None and not compared(manifest, config)


def joined(found: Iterable[Contradiction]) -> str:
    """Write contradictions as one line, numbered if there are several."""
    texts = [str(one) for one in found]
    if len(texts) < 2:
        return "".join(texts)
    more = f"; and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return " ".join(f"({at}) {text}" for at, text in enumerate(texts[:_MOST_SHOWN], 1)) + more


def contradiction_finding(manifest: Manifest, config: HfConfig, others: Iterable[Manifest] = ()) -> Finding | None:
    """Report what a config and a manifest state differently; ``others`` that agree with the config are suggested."""
    found = compared(manifest, config)
    if not found:
        return None
    why = message("unknown_model.contradicted", model=manifest.name, facts=joined(found))
    agreeing = [other.name for other in others if other is not manifest and agrees(other, config)]
    remedies = (
        *([message("remedy.name_agreeing", models=agreeing)] if agreeing else []),
        message("remedy.own_manifest"),
        message("remedy.correct_either"),
    )
    lines = dict.fromkeys(manifest.where("model", *one.path) for one in found[:_MOST_SHOWN])
    return Finding("UNKNOWN_MODEL", manifest.name, why, tuple(lines), remedies)


def doubts(manifest: HasModel, config: HfConfig) -> tuple[Finding, ...]:
    """Report what a config leaves in doubt: fields that nobody knows, and weights that it does not quantise."""
    known = manifest.model.known_config_fields
    fields = [one for one in unknown_fields(config) if one.top not in known]
    where = plain(str(config.file or CONFIG_NAME))
    return (
        *([_unknown(fields, where)] if fields else []),
        *([_unquantised(manifest.model, config, where)] if _lacks_quantisation(manifest.model, config) else []),
    )


def _unknown(fields: list[UnknownField], where: str) -> Finding:
    first = fields[:_MOST_SHOWN]
    texts = ", ".join(f"{plain(one.name)} = {toml_value(one.value) or shown(one.value)}" for one in first)
    more = f", and {len(fields) - _MOST_SHOWN} more" if len(fields) > _MOST_SHOWN else ""
    names = ", ".join(f'"{plain(name)}"' for name in dict.fromkeys(one.top for one in first))
    why = message("unknown_config_field", fields=texts + more)
    remedies = (message("remedy.remove_fields"), message("remedy.known_fields", names=names))
    return Finding("UNKNOWN_CONFIG_FIELD", CONFIG_NAME, why, (where,), remedies)


def _lacks_quantisation(model: ModelTable, config: HfConfig) -> bool:
    return model.quant != "bf16" and config.gives_layers and not is_quantised(model, config)


def _unquantised(model: ModelTable, config: HfConfig, where: str) -> Finding:
    why = message("weights_not_quantised", quant=model.quant)
    remedies = (message("remedy.quantised_folder", quant=model.quant), message("remedy.requantise"))
    return Finding("WEIGHTS_NOT_QUANTISED", model.name, why, (where,), remedies)
