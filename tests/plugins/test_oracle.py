"""Every case of the mixers against PyTorch in float64, and against the classes of transformers for these models.

Bounds are the contracts' own. FP32 computations of transformers may err by as much again.
"""

import importlib
import types

import ml_dtypes
import numpy as np
import pytest
from families import CONTRACTS, SPECS
from kernel_muster.registry.contract.specs import Provider
from kernel_muster.registry.launch.runners import HostRunner
from kernel_muster.registry.selection.handles import Handle

torch = pytest.importorskip("torch")
functional = torch.nn.functional

pytestmark = pytest.mark.oracle

BY_CONTRACT = {spec.contract: spec for spec in SPECS.values()}
HEADS = ("key_heads", "key_dim", "value_heads", "value_dim")


def wide(array):
    return torch.from_numpy(np.asarray(array).astype(np.float64))


def launched(name, arguments):
    """Run a kernel on copies of the arguments and return all of them."""
    contract, spec = CONTRACTS[name], BY_CONTRACT[name]
    mine = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in arguments.items()}
    Handle(spec.kernel_key, spec, contract, Provider("test", "test", "1"), HostRunner())(**mine)
    return mine


def proven(name, oracle, times=1):
    """Compare the kernel with ``oracle(arguments, dims)`` on every case, within its contract's bounds."""
    contract = CONTRACTS[name]
    for case in contract.cases:
        arguments = contract.arguments(case, np.random.default_rng(11))
        result, expected = launched(name, arguments), oracle(types.SimpleNamespace(**arguments), case.dims)
        assert sorted(expected) == sorted(param.name for param in contract.signature.outputs)
        for output, value in expected.items():
            got, bound = wide(result[output]), contract.tolerance_of(output, case)
            value = value.to(torch.float64).reshape(got.shape)
            allowed = times * (bound.absolute + bound.relative * value.abs())
            assert bool(((got - value).abs() <= allowed).all()), f"{output} of {case.name}"


# rope


def rotated(values, angles):
    """Rotate halves: ``values [M, H, D]``, ``angles [M, rotary_dim / 2]``."""
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    turning, rest = wide(values).split([angles.shape[-1], values.shape[-1] - angles.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([turned, rest], dim=-1)


def frequencies(theta, rotary_dim):
    return 1.0 / (float(np.float32(theta)) ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim))


def test_rope_forward_equals_torch():
    def oracle(a, dims):
        angles = torch.outer(wide(a.positions), frequencies(a.theta, dims["rotary_dim"]))
        return {"q": rotated(a.q, angles), "k": rotated(a.k, angles)}

    proven("rope_forward", oracle)


def test_rope_mrope_interleaved_equals_torch():
    def oracle(a, dims):
        every = wide(a.positions)[:, :, None] * frequencies(a.theta, dims["rotary_dim"])
        angles = every[0].clone()
        for axis, section in ((1, dims["section_h"]), (2, dims["section_w"])):
            angles[:, axis : 3 * section : 3] = every[axis][:, axis : 3 * section : 3]
        return {"q": rotated(a.q, angles), "k": rotated(a.k, angles)}

    proven("rope_mrope_interleaved", oracle)


# Attention


def test_kv_cache_append_equals_torch():
    def oracle(a, dims):
        kept = torch.from_numpy(a.slots.astype(np.int64))
        is_kept = kept >= 0
        outputs = {}
        for name in ("k", "v"):
            cache = wide(getattr(a, f"{name}_cache")).flatten(0, 1)
            outputs[f"{name}_cache"] = cache.index_copy(0, kept[is_kept], wide(getattr(a, name))[is_kept])
        return outputs

    proven("kv_cache_append", oracle)


def attention(a, sequence, q):
    """Return causal attention of the last rows ``q [M, Hq, D]`` of one sequence."""
    rows, length = len(q), int(a.context_lens[sequence])
    if length == 0 or rows == 0:
        return torch.zeros_like(q)
    page_size = a.k_cache.shape[1]
    pages = a.block_table[sequence, : -(-length // page_size)]
    keys, values = (wide(cache[pages]).flatten(0, 1)[:length].transpose(0, 1) for cache in (a.k_cache, a.v_cache))
    mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    scale = float(np.float32(a.scale))
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(0, 1)


def test_paged_decode_equals_torch():
    def oracle(a, dims):
        rows = [attention(a, s, wide(a.q)[s : s + 1]) for s in range(dims["S"])]
        return {"out": torch.cat([*rows, torch.zeros(0, *a.q.shape[1:], dtype=torch.float64)])}

    proven("paged_decode_attn", oracle)


@pytest.mark.parametrize("name", ["prefill_paged_attn", "prefill_paged_attn_mma"])
def test_prefill_paged_equals_torch(name):
    def oracle(a, dims):
        spans = zip(a.cu_rows[:-1], a.cu_rows[1:], strict=True)
        parts = [attention(a, s, wide(a.q)[start:stop]) for s, (start, stop) in enumerate(spans)]
        return {"out": torch.cat([*parts, torch.zeros(0, *a.q.shape[1:], dtype=torch.float64)])}

    proven(name, oracle)


# ssm_preprocess


def test_deinterleave_equals_torch():
    def query_and_gate(a, dims):
        by_head = wide(a.qg).view(dims["M"], dims["Q"] // dims["head_dim"], 2 * dims["head_dim"])
        q, gate = by_head.chunk(2, dim=-1)
        return {"out_q": q, "out_gate": gate}

    def query_key_value_z(a, dims):
        key_heads, key_dim, value_heads, value_dim = (dims[name] for name in HEADS)
        each = value_heads // key_heads * value_dim
        by_group = wide(a.qkvz).view(dims["M"], key_heads, 2 * key_dim + 2 * each)
        q, k, v, z = (part.flatten(1) for part in by_group.split([key_dim, key_dim, each, each], dim=-1))
        return {"out_qkv": torch.cat([q, k, v], dim=-1), "out_z": z}

    proven("deinterleave_qg", query_and_gate)
    proven("deinterleave_qkvz", query_key_value_z)


def test_gdn_gates_equal_torch():
    def oracle(a, dims):
        step = functional.softplus(wide(a.a) + wide(a.dt_bias))
        return {"out_decay": (-wide(a.a_log).exp() * step).exp(), "out_beta": wide(a.b).sigmoid()}

    proven("compute_gdn_gates", oracle)


# The recurrent mixers


def convolved(a, dims, cu_rows):
    """Return every output of the convolution, one ``conv1d`` a sequence."""
    state, channels, width = wide(a.state), dims["C"], dims["W"]
    out = torch.zeros(a.x.shape, dtype=torch.float64)
    states = torch.zeros(len(a.x), channels, width - 1, dtype=torch.float64)
    for slot, start, stop in zip(a.slots, cu_rows[:-1], cu_rows[1:], strict=True):
        if slot >= 0 and stop > start:
            history = torch.cat([state[slot], wide(a.x)[start:stop].T], dim=1)
            total = functional.conv1d(history[None], wide(a.weight)[:, None], groups=channels)[0]
            out[start:stop] = functional.silu(total).T
            windows = history.unfold(1, max(width - 1, 1), 1).transpose(0, 1)
            states[start:stop] = windows[1 : 1 + stop - start] if width > 1 else 0.0
            state[slot] = states[stop - 1]
    return {"out": out, "state": state, "out_states": states}


def picked(outputs, *names):
    return {name: outputs[name] for name in names}


def test_causal_conv1d_equals_torch():
    proven(
        "causal_conv1d_update",
        lambda a, dims: picked(convolved(a, dims, np.arange(dims["S"] + 1)), "out", "state"),
    )
    proven("causal_conv1d_update_prefill", lambda a, dims: picked(convolved(a, dims, a.cu_rows), "out", "state"))
    proven("causal_conv1d_verify_n", lambda a, dims: convolved(a, dims, a.cu_rows))


def mixed(a, dims, cu_rows):
    """Return every output of the gated delta rule as it was published, on states ``[value_dim, key_dim]``.

    Yang et al., Gated Delta Networks (2024), equation 10: ``S = S (a (I - b k k^T)) + b v k^T``, ``o = S q``.
    """
    key_heads, key_dim, value_heads, value_dim = (dims[name] for name in HEADS)
    keys = key_heads * key_dim
    state = wide(a.state).transpose(-1, -2).contiguous()
    qkv = wide(a.qkv)
    q, k = (qkv[:, at : at + keys].view(-1, key_heads, key_dim) for at in (0, keys))
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for x in (q, k))
    q, k = ((x.repeat_interleave(value_heads // key_heads, dim=1)) for x in (q * key_dim**-0.5, k))
    v = qkv[:, 2 * keys :].view(-1, value_heads, value_dim)
    out, states = torch.zeros_like(v), torch.zeros(len(qkv), *state.shape[1:], dtype=torch.float64)
    for slot, start, stop in zip(a.slots, cu_rows[:-1], cu_rows[1:], strict=True):
        for row in range(start, stop if slot >= 0 else start):
            for head in range(value_heads):
                decay, beta = float(a.decay[row, head]), float(a.beta[row, head])
                key = k[row, head]
                forget = decay * (torch.eye(key_dim, dtype=torch.float64) - beta * torch.outer(key, key))
                state[slot, head] = state[slot, head] @ forget + beta * torch.outer(v[row, head], key)
                out[row, head] = state[slot, head] @ q[row, head]
            states[row] = state[slot]
    return {"out": out, "state": state.transpose(-1, -2), "out_states": states.transpose(-1, -2)}


def one_row_each(a, dims):
    return picked(mixed(a, dims, np.arange(dims["S"] + 1)), "out", "state")


def normed(a, dims):
    outputs = one_row_each(a, dims)
    norm = functional.rms_norm(outputs["out"], (dims["value_dim"],), wide(a.norm_weight), eps=float(np.float32(a.eps)))
    return {**outputs, "out": norm * functional.silu(wide(a.gate)).view(norm.shape)}


def test_gated_delta_rule_of_one_row_equals_torch():
    proven("gated_delta_rule_decode", one_row_each)
    proven("gated_delta_rule_decode_strided", one_row_each)
    proven("gated_delta_rule_decode_norm_strided", normed)


def test_gated_delta_rule_of_many_rows_equals_torch():
    for form in ("prefill", "prefill_chunked"):
        proven(f"gated_delta_rule_{form}", lambda a, dims: picked(mixed(a, dims, a.cu_rows), "out", "state"))
    proven("gated_delta_rule_verify_n", lambda a, dims: mixed(a, dims, a.cu_rows))
    for rows in (2, 3):
        proven(f"gated_delta_rule_chunk{rows}", lambda a, dims: mixed(a, dims, [0, dims["M"]]))


# sampling


def test_topk_equals_torch():
    def oracle(a, dims):
        values, ids = wide(a.logits).sort(dim=-1, descending=True, stable=True)
        return {"out_values": values[:, : dims["k"]], "out_ids": ids[:, : dims["k"]]}

    proven("topk_bf16", oracle)


def test_verify_greedy_equals_torch():
    def oracle(a, dims):
        holds = torch.from_numpy(a.draft_ids) == torch.from_numpy(a.target_ids[:, : dims["n"]])
        return {"out_accepted": holds.long().cumprod(dim=1).sum(dim=1)}

    proven("verify_greedy", oracle)


# Against transformers: its own functions for these architectures


@pytest.fixture(params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def modeling(request):
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{request.param}.modeling_{request.param}")


@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_gated_delta_rule_equals_transformers(modeling, form, rows):
    """Its chunk of 64 adds in another order than the recurrence; both are FP32."""
    heads, rng = (2, 16, 4, 8), np.random.default_rng(rows)
    key_heads, key_dim, value_heads, value_dim = heads
    keys = key_heads * key_dim
    qkv = rng.standard_normal((rows, 2 * keys + value_heads * value_dim)).astype(ml_dtypes.bfloat16)
    decay = rng.uniform(0.3, 1.0, (rows, value_heads)).astype(np.float32)
    beta = rng.random((rows, value_heads), np.float32)
    state = rng.standard_normal((1, value_heads, key_dim, value_dim)).astype(np.float32)
    result = launched(
        "gated_delta_rule_prefill",
        {
            "qkv": qkv,
            "cu_rows": np.array([0, rows], np.int32),
            "decay": decay,
            "beta": beta,
            **dict(zip(HEADS, heads, strict=True)),
            "state": state,
            "slots": np.zeros(1, np.int32),
            "out": np.full((rows, value_heads * value_dim), np.nan, ml_dtypes.bfloat16),
        },
    )
    narrow = torch.from_numpy(qkv.astype(np.float32))
    q, k = (narrow[None, :, at : at + keys].view(1, rows, key_heads, key_dim) for at in (0, keys))
    v = narrow[None, :, 2 * keys :].view(1, rows, value_heads, value_dim)
    grouped = (x.repeat_interleave(value_heads // key_heads, dim=2) for x in (q, k))
    out, last = getattr(modeling, form)(
        *grouped,
        v,
        g=torch.from_numpy(np.log(decay))[None],
        beta=torch.from_numpy(beta)[None],
        initial_state=torch.from_numpy(state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    contract = CONTRACTS["gated_delta_rule_prefill"]
    for name, expected in (("out", out), ("state", last)):
        got, bound = wide(result[name]), contract.tolerance_of(name)
        expected = expected.to(torch.float64).reshape(got.shape)
        steps = 2 * max(rows / 37, 1)  # the contract's bound is for 37 steps; transformers may err as much
        assert bool(((got - expected).abs() <= steps * bound.absolute + bound.relative * expected.abs()).all())


def rotary_of(modeling, name, head_dim, rotary_dim, sections):
    config = types.SimpleNamespace(
        max_position_embeddings=4096,
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": rotary_dim / head_dim,
            "mrope_section": list(sections),
        },
    )
    return getattr(modeling, name)(config)


def test_rope_equals_transformers(modeling):
    """Its angles are FP32: below position 100 they err by 100 * 2^-23, times values below 6."""
    sections, rows = (11, 11, 10), 9
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((rows, heads, 256)).astype(ml_dtypes.bfloat16) for heads in (4, 2))
    is_grid = hasattr(modeling, "Qwen3_5TextRotaryEmbedding") or hasattr(modeling, "Qwen3_5MoeTextRotaryEmbedding")
    positions = rng.integers(0, 100, (3, rows) if is_grid else rows).astype(np.int32)
    name = next(n for n in dir(modeling) if n.endswith("RotaryEmbedding") and "Vision" not in n)
    place = torch.from_numpy(positions.astype(np.int64)).reshape((3, 1, rows) if is_grid else (1, rows))
    cosine, sine = rotary_of(modeling, name, 256, 64, sections)(torch.zeros(1), place)
    theirs = modeling.apply_rotary_pos_emb(
        *(torch.from_numpy(x.astype(np.float32))[None].transpose(1, 2) for x in (q, k)), cosine, sine
    )
    arguments = {"q": q, "k": k, "positions": positions, "rotary_dim": 64, "theta": 1e7}
    if is_grid:
        arguments |= dict(zip(("section_t", "section_h", "section_w"), sections, strict=True))
    ours = launched("rope_mrope_interleaved" if is_grid else "rope_forward", arguments)
    for name, value in zip(("q", "k"), theirs, strict=True):
        expected = value.transpose(1, 2)[0].to(torch.float64)
        allowed = 2.0**-8 * expected.abs() + 2 * 6 * 100 * 2.0**-23 + 2.0**-18
        assert bool(((wide(ours[name]) - expected).abs() <= allowed).all())


@pytest.mark.parametrize(("factor", "context", "theta"), [(64.0, 4096, 1e7), (4.0, 512, 1e4), (1.0, 4096, 1e7)])
def test_rope_yarn_equals_transformers(factor, context, theta):
    """Its frequencies are FP32, too: below position 100 angles err by 100 * 2^-23 and what the power adds."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
    parameters |= {"original_max_position_embeddings": context}
    config = types.SimpleNamespace(
        rope_parameters=parameters,
        hidden_size=64,
        num_attention_heads=1,
        head_dim=64,
        max_position_embeddings=int(factor * context),
        standardize_rope_params=lambda: None,
    )
    theirs, scale = utils.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rng = np.random.default_rng(6)
    q, k = (rng.standard_normal((9, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (4, 2))
    positions = rng.integers(0, 100, 9).astype(np.int32)
    arguments = {"q": q, "k": k, "positions": positions, "rotary_dim": 64, "theta": theta}
    ours = launched("rope_yarn", {**arguments, "factor": factor, "original_context": context})
    angles = torch.outer(wide(positions), theirs.to(torch.float64))
    for name, value in (("q", q), ("k", k)):
        expected = rotated(value, angles) * scale
        allowed = 2.0**-8 * expected.abs() + 2 * 6 * scale * 100 * 2.0**-22 + 2.0**-17
        assert bool(((wide(ours[name]) - expected).abs() <= allowed).all())


def test_qkvz_regrouping_equals_transformers():
    """Only Qwen3-Next fuses the projection by group; qwen3_5 has q|k|v and z apart."""
    pytest.importorskip("transformers")
    modeling = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    heads, rng = (2, 8, 6, 4), np.random.default_rng(4)
    sizes = dict(zip(("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim"), heads, strict=True))
    fused = rng.standard_normal((3, 2 * 16 + 2 * 24)).astype(ml_dtypes.bfloat16)
    outs = {"out_qkv": np.zeros((3, 56), fused.dtype), "out_z": np.zeros((3, 24), fused.dtype)}
    ours = launched("deinterleave_qkvz", {"qkvz": fused, **dict(zip(HEADS, heads, strict=True)), **outs})
    both = wide(fused)[None], torch.zeros(1, 3, 2 * sizes["num_v_heads"])
    q, k, v, z, *_ = modeling.Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(types.SimpleNamespace(**sizes), *both)
    assert torch.equal(wide(ours["out_qkv"]), torch.cat([x[0].flatten(1) for x in (q, k, v)], dim=-1))
    assert torch.equal(wide(ours["out_z"]), z[0].flatten(1))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 7, 1.0), (1.5, 0, 0.8), (1.3, 9, 0.6)]
)
def test_sample_draws_what_the_warpers_of_transformers_leave(temperature, top_k, top_p):
    """Frequencies over an even grid of uniform are the warped softmax, to the width of the grid."""
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    grid, width = 4000, 32
    logits = np.random.default_rng(5).permutation(np.arange(width)).astype(ml_dtypes.bfloat16)
    warped = torch.from_numpy(logits.astype(np.float64) * 0.25)[None]
    warped = logits_process.TemperatureLogitsWarper(temperature)(None, warped)
    if top_k:
        warped = logits_process.TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1.0:
        warped = logits_process.TopPLogitsWarper(top_p)(None, warped)
    probabilities = warped.softmax(dim=-1)[0].numpy()
    uniform = ((np.arange(grid) + 0.5) / grid).astype(np.float32)
    rows = {"temperature": np.float32(4 * temperature), "top_k": np.int32(top_k), "top_p": np.float32(top_p)}
    result = launched(
        "sample_top_k_top_p",
        {
            "logits": np.tile(logits, (grid, 1)),
            **{name: np.full(grid, value) for name, value in rows.items()},
            "uniform": uniform,
            "out": np.full(grid, -1, np.int32),
        },
    )
    counts = np.bincount(result["out"], minlength=width) / grid
    assert np.abs(counts - probabilities).max() <= 1.5 / grid
