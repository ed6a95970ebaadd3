"""Whether the quantisation of a checkpoint is that of a manifest, judged by its config, before any weight is read."""

from collections.abc import Iterator

from kernel_muster.MODEL_toml.hf.config import HfConfig
from kernel_muster.MODEL_toml.hf.fields import QUANTISATION
from kernel_muster.MODEL_toml.hf.quantisation import (
    PLAIN,
    READABLE,
    Quantisation,
    QuantProblem,
    bare_format,
    quantisation,
)
from kernel_muster.MODEL_toml.hf.statements import Contradiction
from kernel_muster.MODEL_toml.schema import QUANTS, ModelTable
from kernel_muster.MODEL_toml.wording import plain

_FIELD, _METHOD = QUANTISATION[0], "quant_method"
_MIXER = {
    "full": tuple(f"self_attn.{name}_proj" for name in "qkvo"),
    "gdn": tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")),
}
_FFN = ("gate_proj", "up_proj", "down_proj")


def quant_contradictions(model: ModelTable, config: HfConfig) -> Iterator[Contradiction]:
    """Compare the format of every weight that a layer reads; BF16 weights are the loader's to judge."""
    try:
        stated = quantisation(config)
        found = _formats(model, stated)
    except QuantProblem as problem:
        yield from _unread(model, config, problem)
        return
    allowed = (model.quant, PLAIN)
    strangers = {quant: modules for quant, modules in found.items() if quant not in allowed}
    if not strangers:
        return
    quant, modules = next(iter(strangers.items()))
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    others = f"; {', '.join(other for other in strangers if other != quant)} too" if len(strangers) > 1 else ""
    got = f"has {plain(modules[0])}{more} in {quant}{others}"
    yield Contradiction(_FIELD, got, f'quant "{model.quant}"', _accept(list(found)))


def is_quantised(model: ModelTable, config: HfConfig) -> bool:
    """Whether the config quantises any weight that the model reads, or is too short or too odd to tell."""
    try:
        return any(quant != PLAIN for quant in _formats(model, quantisation(config)))
    except QuantProblem:
        return True


def _accept(found: list[str]) -> str:
    quantised = [quant for quant in found if quant != PLAIN]
    if len(quantised) == 1 and quantised[0] in QUANTS:
        return f'quant = "{quantised[0]}" under [model]'
    return f"no manifest accepts it: layers read {' and '.join(READABLE)}, and one quantised format a model"


def _unread(model: ModelTable, config: HfConfig, problem: QuantProblem) -> Iterator[Contradiction]:
    """Report a config that cannot be read; one that only lacks its groups is compared by its format, if it has one."""
    stated = f'quant "{model.quant}"'
    if not problem.is_incomplete:
        got = f"has {plain(problem.got)}" + (f" for {plain(problem.module)}" if problem.module else "")
        if problem.expected.startswith(_METHOD):
            got = f"has {_METHOD} {problem.got}"
        yield Contradiction(_FIELD, got, stated, f"no manifest accepts it: expected {problem.expected}")
    elif (quant := bare_format(config)) not in (None, model.quant):
        yield Contradiction(_FIELD, f"has weights in {quant}", stated, _accept([str(quant)]))


def _formats(model: ModelTable, stated: Quantisation) -> dict[str, list[str]]:
    """Return the modules of the text model by format; groups stand for them where the manifest has no dimensions."""
    found: dict[str, list[str]] = {}
    if not stated.groups:
        return found
    if not model.layer_kinds:
        for group in stated.groups:
            found.setdefault(group.quant, []).append(group.origin)
        return found
    for module in _modules(model):
        found.setdefault(stated.expected(module).quant, []).append(module)
    return found


def _modules(model: ModelTable) -> Iterator[str]:
    for index, kind in enumerate(model.layer_kinds):
        layer = f"model.layers.{index}."
        yield from (layer + name for name in _MIXER[kind])
        yield from (layer + name for name in _ffn(model))
    for index in range(0 if model.mtp is None else model.mtp.layers):
        yield from (f"mtp.layers.{index}.{name}" for name in (*_MIXER["full"], *_ffn(model)))
    yield "lm_head"


def _ffn(model: ModelTable) -> Iterator[str]:
    """Yield the projections of one FFN; one expert stands for all."""
    if model.ffn == "dense":
        yield from (f"mlp.{name}" for name in _FFN)
    elif model.moe is not None:
        yield from (f"mlp.experts.0.{name}" for name in _FFN)
        if model.moe.shared_intermediate_size is not None:
            yield from (f"mlp.shared_expert.{name}" for name in _FFN)
