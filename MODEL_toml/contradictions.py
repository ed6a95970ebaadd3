"""Where a ``config.json`` says something else than a manifest: then it is another model, whatever its type and size.

Only what both of them state is compared. What a manifest has no word for (an activation, a bias) is not.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kernel_muster.MODEL_toml.schema import ModelTable, RopeTable
from kernel_muster.MODEL_toml.wording import shown

#: Each key of a manifest's [model] by its name in configs.
_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "attention.heads": "num_attention_heads",
    "attention.kv_heads": "num_key_value_heads",
    "attention.head_dim": "head_dim",
    "attention.gated": "attn_output_gate",
    "gdn.key_heads": "linear_num_key_heads",
    "gdn.key_dim": "linear_key_head_dim",
    "gdn.value_heads": "linear_num_value_heads",
    "gdn.value_dim": "linear_value_head_dim",
    "gdn.conv_width": "linear_conv_kernel_dim",
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.intermediate_size": "moe_intermediate_size",
    "moe.shared_intermediate_size": "shared_expert_intermediate_size",
    "moe.renormalise": "norm_topk_prob",
    "mtp.layers": "mtp_num_hidden_layers",
}
#: The same for rope parameters, in their table; configs of an older generation have some of them outside.
_ROPE_KEYS = {
    "theta": "rope_theta",
    "partial_factor": "partial_rotary_factor",
    "mrope_sections": "mrope_section",
    "mrope_interleaved": "mrope_interleaved",
    "yarn_factor": "factor",
    "yarn_original_context": "original_max_position_embeddings",
}
_ROPE_TABLES = ("rope_parameters", "rope_scaling")
_YARN, _NOT_YARN = "yarn", ("default", "mrope")
#: What YaRN's kernel has built in (plugins/rope); None: it follows from the factor.
_YARN_OPTIONS: Mapping[str, Any] = {
    "beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None, "mscale": None, "mscale_all_dim": None,
}  # fmt: skip
_GDN, _ATTENTION = "linear_attention", ("full_attention", "sliding_attention")
#: Whether norms multiply by 1 + weight, by model type. Configs do not say; the classes of Hugging Face transformers do
#: (Qwen3NextRMSNorm and its successors; Qwen2RMSNorm, Qwen3RMSNorm, LlamaRMSNorm).
_ZERO_CENTRED = {
    "qwen3_next": True,
    "qwen3_5": True,
    "qwen3_5_moe": True,
    "qwen3_6_moe": True,
    "qwen3": False,
    "qwen3_moe": False,
    "qwen2": False,
    "qwen2_moe": False,
    "llama": False,
    "mistral": False,
}
_NORM_RULES = {True: "1 + weight", False: "the weight alone"}
#: Methods that are formats of their own; the other ones say theirs in more words, which loading reads.
_METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
_READ_WHEN_LOADING = ("compressed-tensors", "modelopt")
_LONGEST = 60
_OF_LAYERS = ("num_hidden_layers ", "layer_types ", "full_attention_interval ")

Get = Callable[[str], Any]


def contradictions(model: ModelTable, config: Mapping[str, Any], *, has_all_layers: bool = True) -> tuple[str, ...]:
    """Say where a config and a manifest's [model] state different things; the text model may be nested.

    Without ``has_all_layers`` the manifest may be of some layers of that model.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}

    def get(key: str) -> Any:
        value = text.get(key)
        return config.get(key) if value is None else value

    checks = (_plain, _norms, _context, _layers, _rope, _quant)
    found = tuple(text for check in checks for text in check(model, get))
    return found if has_all_layers else tuple(text for text in found if not text.startswith(_OF_LAYERS))


def _plain(model: ModelTable, get: Get) -> Iterator[str]:
    for path, key in _KEYS.items():
        table, _, name = path.rpartition(".")
        owner = getattr(model, table) if table else model
        yield from _compared(path, None if owner is None else getattr(owner, name), key, get(key))
    if model.ffn == "dense":
        key = "intermediate_size"
        yield from _compared(key, model.intermediate_size, key, get(key))
        if experts := get("num_experts"):
            yield f"num_experts is {shown(experts)}, expected none (ffn = 'dense')"
    key = "shared_expert_intermediate_size"
    if model.moe is not None and model.moe.shared_intermediate_size is None and (size := get(key)):
        yield f"{key} is {shown(size)}, expected none (moe.shared_intermediate_size)"


def _norms(model: ModelTable, get: Get) -> Iterator[str]:
    """Compare what norms multiply by, which a model type of Hugging Face decides; no norm, no rule."""
    if model.rms_norm_eps is None and "rms_norm_zero_centred" not in model.model_fields_set:
        return
    kind = get("model_type")
    theirs = _ZERO_CENTRED.get(kind.removesuffix("_text")) if isinstance(kind, str) else None
    mine = model.rms_norm_zero_centred
    if theirs is not None and theirs is not mine:
        got, wanted = _NORM_RULES[theirs], _NORM_RULES[mine]
        yield f"norms of model_type {shown(kind)} multiply by {got}, expected {wanted} (rms_norm_zero_centred)"


def _context(model: ModelTable, get: Get) -> Iterator[str]:
    """Compare the context: a manifest may give a model less than its config, and as much more as YaRN stretches it."""
    mine, theirs = model.context_length, get("max_position_embeddings")
    if mine is None or theirs is None:
        return
    rope = model.rope
    stretched = 0.0 if rope is None else (rope.yarn_factor or 0.0) * (rope.yarn_original_context or 0)
    is_number = isinstance(theirs, int | float) and not isinstance(theirs, bool)
    if not is_number or not mine <= max(theirs, stretched):
        yield f"max_position_embeddings is {shown(theirs)}, expected at least {mine} (context_length)"


def _compared(path: str, mine: Any, key: str, theirs: Any) -> Iterator[str]:
    if mine is None or theirs is None or _is_same(mine, theirs):
        return
    wanted = list(mine) if isinstance(mine, tuple) else shown(mine)
    got = str(theirs)[:_LONGEST] if isinstance(theirs, list) else shown(theirs)
    yield f"{key} is {got}, expected {wanted} ({path})"


def _is_same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, tuple):
        return isinstance(theirs, list) and len(theirs) == len(mine) and all(map(_is_same, mine, theirs))
    if isinstance(mine, bool) or isinstance(theirs, bool):
        return mine is theirs
    return isinstance(theirs, int | float) and bool(mine == theirs)


def _layers(model: ModelTable, get: Get) -> Iterator[str]:
    """Compare the kind of every layer; attention to a window counts as full attention, as manifests have no other."""
    kinds = model.layer_kinds
    stated, every = get("layer_types"), get("full_attention_interval")
    if not kinds:
        return
    if isinstance(stated, list):
        theirs = tuple("gdn" if kind == _GDN else "full" for kind in stated)
        if unknown := next((shown(kind) for kind in stated if kind != _GDN and kind not in _ATTENTION), None):
            yield f"layer_types has {unknown}, expected {' or '.join((_GDN, *_ATTENTION))}"
        elif theirs != kinds:
            yield f"layer_types are {_counted(theirs)}, expected {_counted(kinds)} (layer_pattern)"
    elif stated is not None:
        yield f"layer_types is {shown(stated)}, expected a list of the kind of each layer"
    if every is None:
        return
    if isinstance(every, bool) or not isinstance(every, int | float) or every < 1 or every != every // 1:
        yield f"full_attention_interval is {shown(every)}, expected a positive integer"
        return
    theirs = tuple("gdn" if (at + 1) % every else "full" for at in range(len(kinds)))
    if theirs != kinds:
        yield f"full_attention_interval is {shown(every)}, expected {_counted(kinds)} (layer_pattern)"


def _counted(kinds: tuple[str, ...]) -> str:
    if not kinds:
        return "none"
    first = next((at for at, kind in enumerate(kinds) if kind == "full"), None)
    where = "" if first is None else f", the first full one at {first}"
    return f"{kinds.count('gdn')} gdn and {kinds.count('full')} full{where}"


def _rope(model: ModelTable, get: Get) -> Iterator[str]:
    """Compare rope parameters wherever they stand: which of two tables a loader takes depends on its release."""
    tables = tuple(_rope_tables(get))
    for key in _ROPE_TABLES:
        if (table := get(key)) is not None and not isinstance(table, Mapping):
            yield f"{key} is {shown(table)}, expected an object"
    if model.rope is not None:
        found = (text for table in tables for text in _one_rope(model.rope, table))
        plain = {key: get(key) for name, key in _ROPE_KEYS.items() if not name.startswith(_YARN)}
        yield from dict.fromkeys((*found, *_rope_values(model.rope, plain)))


def _one_rope(rope: RopeTable, table: Mapping[str, Any]) -> Iterator[str]:
    yield from _rope_values(rope, table)
    is_yarn, factor = rope.yarn_factor is not None, table.get("factor")
    kinds = [kind for key in ("rope_type", "type") if (kind := table.get(key)) is not None]
    for kind in kinds:
        if kind != _YARN and kind not in _NOT_YARN:
            yield f"rope_type is {shown(kind)}, expected {' or '.join((*_NOT_YARN, _YARN))}"
        elif (kind == _YARN) is not is_yarn:
            yield f"rope_type is {shown(kind)}, expected {'another' if kind == _YARN else _YARN} (rope.yarn_factor)"
    if not kinds and factor is not None and not _is_same(1, factor):
        yield f"rope factor is {shown(factor)} and rope_type is missing, expected {_YARN if is_yarn else 'no factor'}"
    if is_yarn:
        for key, built_in in _YARN_OPTIONS.items():
            if (value := table.get(key)) is not None and (built_in is None or not _is_same(built_in, value)):
                wanted = "none" if built_in is None else shown(built_in)
                yield f"rope {key} is {shown(value)}, expected {wanted}, which the YaRN kernel has built in"


def _rope_values(rope: RopeTable, table: Mapping[str, Any]) -> Iterator[str]:
    for name, key in _ROPE_KEYS.items():
        mine = getattr(rope, name)
        yield from _compared(f"rope.{name}", None if mine == () else mine, key, table.get(key))


def _rope_tables(get: Get) -> Iterator[Mapping[str, Any]]:
    """Yield the tables of rope parameters, and those in them for a kind of attention."""
    for key in _ROPE_TABLES:
        table = get(key)
        if isinstance(table, Mapping):
            yield table
            yield from (own for kind in _ATTENTION if isinstance(own := table.get(kind), Mapping))


def _quant(model: ModelTable, get: Get) -> Iterator[str]:
    """Compare the method of quantisation; without one, weights may be requantised when they are loaded."""
    stated = get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if method is None or (isinstance(method, str) and method.startswith(_READ_WHEN_LOADING)):
        return
    if not isinstance(method, str) or _METHODS.get(method) != model.quant:
        yield f"quantization_config.quant_method is {shown(method)}, expected one of {model.quant} (quant)"
