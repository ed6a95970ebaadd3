"""Whole models and the drafter's layers against transformers' own classes, with the same dequantised weights.

Found in transformers 5.24: Qwen3_5ForCausalLM (the dense models), Qwen3_5MoeForCausalLM (the others). It has no class
for qwen3_6_moe, for the multi-token-prediction head and for DFlash. The first is qwen3_5_moe with interleaved mrope,
which Qwen3_5MoeForCausalLM computes. The head is that class with one layer, behind a projection. The drafter is built
from Qwen3Attention, Qwen3MLP, Qwen3RMSNorm and Qwen3RotaryEmbedding (YaRN). All of it runs in float64 where
transformers allows it (its norms, gates and rotary angles are FP32). The float64 reference must agree to 1e-4 of the
largest logit, and the layers as closely as with that reference.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.weights.source import SyntheticWeights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]  # warnings of torch and transformers
IDS = [1, 2, 3, 4, 5, 60, 70, 8, 9, 10]
AGREES = 1e-4


def config_of(dims: ModelDims) -> Any:
    """Return the transformers config of reduced dimensions."""
    attention, gdn, moe = dims.attention, dims.gdn, dims.moe
    assert attention is not None
    assert attention.rope is not None
    assert gdn is not None
    kinds = {"attn": "full_attention", "gdn": "linear_attention"}
    rope = attention.rope
    shared = {
        "vocab_size": dims.vocab, "hidden_size": dims.hidden, "num_hidden_layers": len(dims.layer_kinds),
        "num_attention_heads": attention.q_heads, "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim, "linear_conv_kernel_dim": gdn.conv_width,
        "linear_key_head_dim": gdn.key_dim, "linear_value_head_dim": gdn.value_dim,
        "linear_num_key_heads": gdn.key_heads, "linear_num_value_heads": gdn.value_heads,
        "layer_types": [kinds[kind] for kind in dims.layer_kinds], "rms_norm_eps": dims.rms_eps,
        "tie_word_embeddings": dims.is_tied, "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": rope.theta, "mrope_section": list(rope.sections),
            "partial_rotary_factor": rope.rotary_dim / attention.head_dim, "mrope_interleaved": True,
        },
    }  # fmt: skip
    if moe is None:
        return transformers.Qwen3_5TextConfig(**shared, intermediate_size=dims.intermediate)
    return transformers.Qwen3_5MoeTextConfig(
        **shared, num_experts=moe.experts, num_experts_per_tok=moe.top_k, moe_intermediate_size=moe.intermediate,
        shared_expert_intermediate_size=moe.shared_intermediate,
    )  # fmt: skip


def tensors(dims: ModelDims, values: dict[str, Any]) -> dict[str, Any]:
    """Return dequantised weights under transformers' names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        parts = name.split(".")
        if name in TOP:
            found[TOP[name]] = value
        elif parts[0] == "layers":
            found.update(layer_tensors(dims, f"model.layers.{parts[1]}", parts[2], ".".join(parts[3:]), value))
    for prefix in {name.rpartition("#")[0] for name in found if "#" in name}:
        found[prefix] = np.concatenate([found.pop(f"{prefix}#{part}") for part in ("gate_proj", "up_proj")], axis=1)
    return found


TOP = {
    "embedding.table": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}  # fmt: skip
NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}


def layer_tensors(dims: ModelDims, layer: str, part: str, name: str, value: Any) -> dict[str, Any]:
    if name in NORMS:
        return {f"{layer}.{NORMS[name]}": value}
    if part == "attn":
        return {f"{layer}.self_attn.{name}.weight": value}
    if part == "gdn":
        return delta_net_tensors(dims, f"{layer}.linear_attn", name, value)
    if part == "ffn":
        return {f"{layer}.mlp.{name}.weight": value}
    if name.startswith("experts."):
        leaf = name.removeprefix("experts.")
        return {f"{layer}.mlp.experts.{leaf if leaf == 'down_proj' else f'gate_up_proj#{leaf}'}": value}
    if name == "shared_expert_gate":
        return {f"{layer}.mlp.shared_expert_gate.weight": value[None]}
    return {f"{layer}.mlp.{'gate' if name == 'router' else name}.weight": value}


def delta_net_tensors(dims: ModelDims, layer: str, name: str, value: Any) -> dict[str, Any]:
    gdn = dims.gdn
    assert gdn is not None
    if name == "qkvz_proj":  # per key head [q | k | v of its value heads | z of them]
        groups = np.split(value, gdn.key_heads)
        cuts = np.cumsum([gdn.key_dim, gdn.key_dim, gdn.value_heads // gdn.key_heads * gdn.value_dim])
        parts = [np.concatenate([np.split(group, cuts)[at] for group in groups]) for at in range(4)]
        return {f"{layer}.in_proj_qkv.weight": np.concatenate(parts[:3]), f"{layer}.in_proj_z.weight": parts[3]}
    if name == "ba_proj":
        beta, alpha = np.split(value, 2)
        return {f"{layer}.in_proj_b.weight": beta, f"{layer}.in_proj_a.weight": alpha}
    if name == "conv1d":
        return {f"{layer}.conv1d.weight": value[:, None]}
    names = {"a_log": "A_log", "dt_bias": "dt_bias", "norm": "norm.weight", "out_proj": "out_proj.weight"}
    return {f"{layer}.{names[name]}": value}


def causal_lm(dims: ModelDims, values: dict[str, Any]) -> Any:
    """Return transformers' model in float64 with these weights, every one of its own among them."""
    config = config_of(dims)
    config._attn_implementation = config._experts_implementation = "eager"
    kind = transformers.Qwen3_5ForCausalLM if dims.moe is None else transformers.Qwen3_5MoeForCausalLM
    model = kind(config).double().eval()
    state = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    if dims.is_tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([], [])
    return model


def theirs(reference: ModuleType, dims: ModelDims, weights: Any) -> tuple[Any, Any]:
    """Return transformers' model with the reference's weights, and the reference's logits."""
    exact = reference.Reference(dims, weights)
    logits = exact.logits(IDS)
    return causal_lm(dims, tensors(dims, exact._values)), logits


def run(model: Any, positions: Any = None) -> Any:
    with torch.no_grad():
        at = None if positions is None else torch.from_numpy(np.asarray(positions))[:, None]
        return model(input_ids=torch.tensor([IDS]), position_ids=at, use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("kind", ["dense", "moe", "bf16"])
def test_reference_agrees_with_transformers(
    reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights, kind: str
) -> None:
    model, exact = theirs(reference, tiny_dims[kind], tiny_weights)
    assert np.abs(run(model) - exact).max() <= AGREES * np.abs(exact).max()


def test_reference_agrees_with_transformers_on_image_positions(
    reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights
) -> None:
    grid = np.array([[0, 1, 2, 2, 2, 2, 4, 5, 6, 7], [0, 1, 2, 2, 3, 3, 4, 5, 6, 7], [0, 1, 2, 3, 2, 3, 4, 5, 6, 7]])
    model, _ = theirs(reference, tiny_dims["dense"], tiny_weights)
    exact = reference.Reference(tiny_dims["dense"], tiny_weights).logits(IDS, grid)
    assert np.abs(run(model, grid) - exact).max() <= AGREES * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["dense", "moe", "bf16"])
def test_layers_match_transformers_in_prefill_and_decode(
    tiny: Callable[..., Any], reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights,
    kind: str,
) -> None:  # fmt: skip
    model, exact = theirs(reference, tiny_dims[kind], tiny_weights)
    expected = run(model)
    noisy = [
        reference.Reference(tiny_dims[kind], tiny_weights, np.random.default_rng(seed)).logits(IDS) for seed in range(8)
    ]
    bound = 1.5 * np.abs(np.array(noisy) - exact).max()
    ours, state = tiny(kind), tiny(kind).new_state(StateSizes(2, 16, 4))
    one, two = state.open(), state.open()
    batch = state.batch([one], [IDS], "prefill")
    prefilled = ours.lm_head.forward(ours.run(batch, state).hidden).astype(np.float64)
    decoded = np.stack([ours.decode(state, [two], [token]).logits[0] for token in IDS]).astype(np.float64)
    for got in (prefilled, decoded):
        assert np.abs(got - expected).max() <= bound


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_mtp_reference_agrees_with_one_decoder_layer_of_transformers(
    reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights, kind: str
) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    dims = tiny_dims[kind]
    mine = reference.Reference(dims, tiny_weights)
    exact = mine.mtp_logits(IDS)
    values = {name: value for name, value in mine._values.items() if not name.startswith("layers.")}
    values["final_norm.weight"] = values.pop("mtp.norm.weight")
    own = {
        f"layers.0.{name.removeprefix('mtp.0.')}": values.pop(name) for name in [*values] if name.startswith("mtp.0.")
    }
    model = causal_lm(replace(dims, layer_kinds=("attn",)), tensors(dims, values | own))
    halves = []
    for name, rows in (("embedding_norm", mine.embed(IDS[1:])), ("hidden_norm", mine.hidden[:-1])):
        norm = loaded(Qwen3_5RMSNorm(dims.hidden, dims.rms_eps), {"weight": values[f"mtp.{name}"]})
        halves.append(norm(torch.from_numpy(rows)))
    joined = torch.cat(halves, dim=1) @ torch.from_numpy(values["mtp.fc"]).T
    with torch.no_grad():
        expected = model(inputs_embeds=joined[None], use_cache=False).logits[0].numpy()
    assert np.abs(expected - exact).max() <= AGREES * np.abs(exact).max()


def qwen3_config(dims: ModelDims) -> Any:
    own = dims.attention
    assert own is not None
    assert own.rope is not None
    assert own.rope.yarn is not None
    yarn = own.rope.yarn
    config = transformers.Qwen3Config(
        hidden_size=dims.hidden, num_attention_heads=own.q_heads, num_key_value_heads=own.kv_heads,
        head_dim=own.head_dim, intermediate_size=dims.intermediate, rms_norm_eps=dims.rms_eps, vocab_size=dims.vocab,
        num_hidden_layers=len(dims.layer_kinds), max_position_embeddings=int(yarn.factor * yarn.original_context),
        rope_parameters={
            "rope_type": "yarn", "rope_theta": own.rope.theta, "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def loaded(module: Any, values: dict[str, Any]) -> Any:
    module = module.double().eval()
    module.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()})
    return module


def test_drafter_reference_agrees_with_qwen3_layers(
    reference: ModuleType, tiny_dims: dict[str, ModelDims], tiny_weights: SyntheticWeights,
    drafter_weights: SyntheticWeights,
) -> None:  # fmt: skip
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    dims = tiny_dims["drafter"]
    drafter = dims.drafter
    assert drafter is not None
    target = reference.Reference(tiny_dims["dense"], tiny_weights)
    mine = reference.DrafterReference(dims, drafter_weights)
    exact = mine.block_logits(target, IDS, 11)
    config, values = qwen3_config(dims), mine._values

    def norm(name: str) -> Any:
        return loaded(qwen3.Qwen3RMSNorm(dims.hidden, dims.rms_eps), {"weight": values[name]})

    features = np.concatenate([target.outputs[layer] for layer in drafter.target_layers], axis=1)
    context = norm("context.norm.weight")(torch.from_numpy(features @ values["context.fc"].T))[-drafter.window :]
    residual = torch.from_numpy(target.embed([11, *[drafter.mask_id] * drafter.gamma]))
    first = len(IDS) - len(context)
    places = torch.arange(first, len(IDS) + len(residual))[None]
    cos_sin = qwen3.Qwen3RotaryEmbedding(config)(residual, places)
    for index in range(len(dims.layer_kinds)):
        label = f"layers.{index}"
        own = {name: values[f"{label}.attn.{name}"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        own |= {name: values[f"{label}.attn.{name}"] for name in ("q_norm", "k_norm")}
        attention = loaded(
            qwen3.Qwen3Attention(config, index), {f"{name}.weight": value for name, value in own.items()}
        )
        ffn = {f"{name}.weight": values[f"{label}.ffn.{name}"] for name in ("gate_proj", "up_proj", "down_proj")}
        seen = torch.cat([context, norm(f"{label}.attn.input_norm")(residual)])[None]
        with torch.no_grad():  # every row sees all rows; those of the context are not used
            mixed = attention(seen, position_embeddings=cos_sin, attention_mask=None)[0][0, len(context) :]
            residual = residual + mixed
            normed = norm(f"{label}.attn.post_norm")(residual)
            residual = residual + loaded(qwen3.Qwen3MLP(config), ffn)(normed)
    expected = target.head(norm("final_norm.weight")(residual)[1:].detach().numpy())
    assert np.abs(expected - exact).max() <= AGREES * np.abs(exact).max()
