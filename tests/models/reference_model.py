"""The published architecture in float64 NumPy, whole sequences at a time, without cache, tiles or batches.

It shares only the decoding of weights with the layers. ``Reference(...).logits(ids)`` is exact.
``Reference(..., jitter=rng)`` moves every value that the layers round to BF16 at random, by at most one rounding, 2^-8
of it. The spread of such runs is the joint effect of all roundings on a result.

Sources: the model cards and code of Qwen3-Next and Qwen3.5 (gated attention, gated delta net, zero-centred norms,
routing), DeepSeek-V3 for the multi-token-prediction head, z-lab's DFlash for the drafter, YaRN for its positions.
"""

from typing import Any

import numpy as np
from kernel_muster.models.dims import AttentionDims, ModelDims, RopeDims
from kernel_muster.models.weights.source import WeightSpec
from kernel_muster.registry.contract import nvfp4

ROUNDING = 2.0**-8
# FP32 sums and functions inside a kernel, before it rounds: far below a BF16 rounding.
SMALL = 2.0**-18


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


class Reference:
    def __init__(self, dims: ModelDims, source: Any, jitter: np.random.Generator | None = None) -> None:
        self.dims, self.source, self.rng = dims, source, jitter
        self.outputs: list[Any] = []  # of each layer, on the residual
        self.hidden: Any = None  # after the last norm
        self._values: dict[str, Any] = {}

    def rounded(self, x: Any) -> Any:
        """Where a layer rounds to BF16."""
        if self.rng is None:
            return x
        return x * (1 + self.rng.uniform(-ROUNDING - SMALL, ROUNDING + SMALL, x.shape))

    def array(self, name: str, *shape: int) -> Any:
        return self._find(WeightSpec(name, shape, "array"))

    def weight(self, name: str, shape: tuple[int, ...], quant: str | None = None) -> Any:
        return self._find(WeightSpec(name, shape, quant or self.dims.quant))

    def _find(self, spec: WeightSpec) -> Any:
        if spec.name not in self._values:
            found = self.source.find(spec)
            if spec.quant == "nvfp4":
                self._values[spec.name] = nvfp4.dequantize(found)
            else:
                self._values[spec.name] = np.asarray(getattr(found, "values", found)).astype(np.float64)
        return self._values[spec.name]

    def norm(self, x: Any, weight: Any, offset: float | None = None) -> Any:
        offset = self.dims.norm_weight_offset if offset is None else offset
        root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.dims.rms_eps)
        return self.rounded(x / root * (offset + weight))

    def linear(self, x: Any, name: str, n: int, quant: str | None = None) -> Any:
        return self.rounded(x @ self.weight(name, (n, x.shape[-1]), quant).T)

    # ---- positions -------------------------------------------------------------------------------------------

    def rotate(self, heads: Any, rope: RopeDims, positions: Any) -> Any:
        """Turn ``[T, H, D]`` by positions ``[T]`` or ``[3, T]``."""
        half = rope.rotary_dim // 2
        grid = np.broadcast_to(positions, (3, len(heads))) if np.ndim(positions) == 1 else positions
        axis = [1 if i % 3 == 1 and i < 3 * h else 2 if i % 3 == 2 and i < 3 * w else 0
                for h, w in [rope.sections[1:] if rope.is_interleaved else (0, 0)] for i in range(half)]  # fmt: skip
        frequencies = np.array([float(rope.theta) ** (-2 * i / rope.rotary_dim) for i in range(half)])
        scale = 1.0
        if rope.yarn is not None:
            frequencies, scale = self._stretched(frequencies, rope)
        angles = np.stack([grid[axis[i]] * frequencies[i] for i in range(half)], axis=-1)[:, None]
        cos, sin = scale * np.cos(angles), scale * np.sin(angles)
        one, two = heads[..., :half], heads[..., half : 2 * half]
        turned = [one * cos - two * sin, two * cos + one * sin, heads[..., 2 * half :]]
        return self.rounded(np.concatenate(turned, axis=-1))

    @staticmethod
    def _stretched(frequencies: Any, rope: RopeDims) -> tuple[Any, float]:
        yarn = rope.yarn
        assert yarn is not None

        def index_of(turns: float) -> float:
            return rope.rotary_dim * np.log(yarn.original_context / (turns * 2 * np.pi)) / (2 * np.log(rope.theta))

        low, high = max(np.floor(index_of(32)), 0), min(np.ceil(index_of(1)), rope.rotary_dim - 1)
        keep = 1 - np.clip((np.arange(len(frequencies)) - low) / max(high - low, 0.001), 0, 1)
        return frequencies * keep + frequencies / yarn.factor * (1 - keep), 1 + 0.1 * np.log(yarn.factor)

    # ---- mixers ----------------------------------------------------------------------------------------------

    def attention(self, label: str, x: Any, dims: AttentionDims, positions: Any, quant: str | None = None) -> Any:
        quant = quant or dims.quant
        time, size = len(x), dims.head_dim
        q = self.linear(x, f"{label}.q_proj", dims.q_rows, quant)
        gate = None
        if dims.gated:
            both = q.reshape(time, dims.q_heads, 2, size)
            q, gate = both[:, :, 0], both[:, :, 1].reshape(time, -1)
        q = q.reshape(time, dims.q_heads, size)
        k = self.linear(x, f"{label}.k_proj", dims.kv_dim, quant).reshape(time, dims.kv_heads, size)
        v = self.linear(x, f"{label}.v_proj", dims.kv_dim, quant).reshape(time, dims.kv_heads, size)
        q, k = self.placed(label, q, k, dims, positions, positions)
        mask = np.tril(np.ones((time, time), bool))
        attended = self.attend(q, k, v, mask).reshape(time, -1)
        if gate is not None:
            attended = self.rounded(attended * sigmoid(gate))
        return self.linear(attended, f"{label}.o_proj", self.dims.hidden, quant)

    def placed(self, label: str, q: Any, k: Any, dims: AttentionDims, q_at: Any, k_at: Any) -> tuple[Any, Any]:
        """Normalise and turn queries and keys."""
        if dims.qk_norm:
            q = self.norm(q, self.array(f"{label}.q_norm", dims.head_dim))
            k = self.norm(k, self.array(f"{label}.k_norm", dims.head_dim))
        assert dims.rope is not None
        return self.rotate(q, dims.rope, q_at), self.rotate(k, dims.rope, k_at)

    def attend(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        out = np.empty((q.shape[0], q.shape[1], v.shape[2]))
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
            scores = np.where(mask, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group]
        return self.rounded(out)

    def delta_net(self, label: str, x: Any) -> Any:
        dims = self.dims.gdn
        assert dims is not None
        each, ratio = dims.value_dim, dims.value_heads // dims.key_heads
        fused = self.linear(x, f"{label}.qkvz_proj", dims.qkvz_rows)
        sizes = np.cumsum([dims.key_dim, dims.key_dim, ratio * each])
        parts = [np.split(group, sizes, axis=1) for group in np.split(fused, dims.key_heads, axis=1)]
        q, k, v, z = (np.concatenate([part[at] for part in parts], axis=1) for at in range(4))
        ba = self.linear(x, f"{label}.ba_proj", dims.ba_rows, "bf16")
        beta, alpha = sigmoid(ba[:, : dims.value_heads]), ba[:, dims.value_heads :]
        rate = np.exp(self.array(f"{label}.a_log", dims.value_heads))
        decay = np.exp(-rate * np.log1p(np.exp(alpha + self.array(f"{label}.dt_bias", dims.value_heads))))
        mixed = self.convolved(
            np.concatenate([q, k, v], axis=1), self.array(f"{label}.conv1d", dims.qkv_dim, dims.conv_width)
        )
        keys = dims.key_heads * dims.key_dim
        q, k = (self.unit(mixed[:, at : at + keys].reshape(len(x), dims.key_heads, -1)) for at in (0, keys))
        v = mixed[:, 2 * keys :].reshape(len(x), dims.value_heads, each)
        state = np.zeros((dims.value_heads, dims.key_dim, each))
        rows = np.empty_like(v)
        for t in range(len(x)):
            for head in range(dims.value_heads):
                key, query = k[t, head // ratio], q[t, head // ratio] / np.sqrt(dims.key_dim)
                state[head] *= decay[t, head]
                state[head] += np.outer(key, beta[t, head] * (v[t, head] - key @ state[head]))
                rows[t, head] = query @ state[head]
        normed = self.norm_gated(self.rounded(rows), z.reshape(rows.shape), self.array(f"{label}.norm", each))
        return self.linear(normed.reshape(len(x), -1), f"{label}.out_proj", self.dims.hidden)

    def norm_gated(self, x: Any, gate: Any, weight: Any) -> Any:
        root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.dims.rms_eps)
        return self.rounded(x / root * weight * silu(gate))

    def convolved(self, x: Any, weight: Any) -> Any:
        width = weight.shape[1]
        padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
        return self.rounded(silu(sum(padded[w : w + len(x)] * weight[:, w] for w in range(width))))

    @staticmethod
    def unit(x: Any) -> Any:
        return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)

    # ---- FFN -------------------------------------------------------------------------------------------------

    def swiglu(self, x: Any, gate: Any, up: Any, down: Any) -> Any:
        gate, up = self.rounded(x @ gate.T), self.rounded(x @ up.T)
        return self.rounded(self.rounded(silu(gate) * up) @ down.T)

    def ffn(self, label: str, x: Any, quant: str | None = None) -> Any:
        if self.dims.moe is not None:
            return self.experts(f"{label}.moe", x)
        shape = (self.dims.intermediate, self.dims.hidden)
        gate, up = (self.weight(f"{label}.ffn.{n}_proj", shape, quant) for n in ("gate", "up"))
        return self.swiglu(x, gate, up, self.weight(f"{label}.ffn.down_proj", shape[::-1], quant))

    def experts(self, label: str, x: Any) -> Any:
        moe, hidden = self.dims.moe, self.dims.hidden
        assert moe is not None
        logits = self.linear(x, f"{label}.router", moe.experts, "bf16")
        shape = (moe.experts, moe.intermediate, hidden)
        gate, up = (self.weight(f"{label}.experts.{n}_proj", shape, "nvfp4") for n in ("gate", "up"))
        down = self.weight(f"{label}.experts.down_proj", (moe.experts, hidden, moe.intermediate), "nvfp4")
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        out = np.zeros_like(x)
        for row in range(len(x)):
            chosen = np.argsort(-powers[row], kind="stable")[: moe.top_k]
            for expert in chosen:
                share = powers[row, expert] / powers[row, chosen].sum()
                out[row] += share * self.swiglu(x[row : row + 1], gate[expert], up[expert], down[expert])[0]
        out = self.rounded(out)
        shape = (moe.shared_intermediate, hidden)
        parts = [self.weight(f"{label}.shared_expert.{n}_proj", shape, "nvfp4") for n in ("gate", "up")]
        shared = self.swiglu(x, *parts, self.weight(f"{label}.shared_expert.down_proj", shape[::-1], "nvfp4"))
        opened = sigmoid(x @ self.array(f"{label}.shared_expert_gate", hidden))
        return self.rounded(out + opened[:, None] * shared)

    # ---- whole models ----------------------------------------------------------------------------------------

    def embed(self, ids: Any) -> Any:
        return self.array("embedding.table", self.dims.vocab, self.dims.hidden)[np.asarray(ids)]

    def block(self, label: str, residual: Any, mixed: Any, mixer: str, quant: str | None = None) -> Any:
        residual = self.rounded(residual + mixed)
        if self.dims.ffn == "none":
            return residual
        x = self.norm(residual, self.array(f"{label}.{mixer}.post_norm", self.dims.hidden))
        return self.rounded(residual + self.ffn(label, x, quant))

    def logits(self, ids: Any, positions: Any = None) -> Any:
        dims = self.dims
        positions = np.arange(len(ids)) if positions is None else np.asarray(positions)
        residual, self.outputs = self.embed(ids), []
        for index, kind in enumerate(dims.layer_kinds):
            label = f"layers.{index}"
            x = self.norm(residual, self.array(f"{label}.{kind}.input_norm", dims.hidden))
            if kind == "attn":
                assert dims.attention is not None
                mixed = self.attention(f"{label}.attn", x, dims.attention, positions)
            else:
                mixed = self.delta_net(f"{label}.gdn", x)
            residual = self.block(label, residual, mixed, kind)
            self.outputs.append(residual)
        self.hidden = self.norm(residual, self.array("final_norm.weight", dims.hidden))
        return self.head(self.hidden)

    def head(self, hidden: Any) -> Any:
        if self.dims.is_tied:
            return self.rounded(hidden @ self.array("embedding.table", self.dims.vocab, self.dims.hidden).T)
        return self.linear(hidden, "lm_head.weight", self.dims.vocab)

    def mtp_logits(self, ids: Any, drafts: Any = ()) -> Any:
        """Return the head's logits at each position but the last: of the token after the next one.

        Each draft goes on behind them: its row stands on the head's own last row.
        """
        self.logits(ids)
        hidden, tokens = self.hidden[:-1], list(ids[1:])
        rows = self._mtp_rows(tokens, hidden)
        for draft in drafts:
            tokens.append(draft)
            hidden = np.concatenate([hidden, rows[-1:]])
            rows = np.concatenate([rows, self._mtp_rows(tokens, hidden)[-1:]])
        return self.head(rows)

    def _mtp_rows(self, tokens: Any, hidden: Any) -> Any:
        dims = self.dims
        one = self.norm(self.embed(tokens), self.array("mtp.embedding_norm", dims.hidden))
        two = self.norm(hidden, self.array("mtp.hidden_norm", dims.hidden))
        residual = self.linear(np.concatenate([one, two], axis=1), "mtp.fc", dims.hidden, dims.mtp_quant)
        x = self.norm(residual, self.array("mtp.0.attn.input_norm", dims.hidden))
        assert dims.attention is not None
        mixed = self.attention("mtp.0.attn", x, dims.attention, np.arange(len(x)), dims.mtp_quant)
        residual = self.block("mtp.0", residual, mixed, "attn", dims.mtp_quant)
        return self.norm(residual, self.array("mtp.norm.weight", dims.hidden))


class DrafterReference(Reference):
    """The block-diffusion drafter, with the embedding and the head of its target."""

    def block_logits(self, target: Reference, ids: Any, last: int) -> Any:
        """Return logits of the masks behind ``last``, which follows ``ids``."""
        dims, drafter = self.dims, self.dims.drafter
        assert drafter is not None
        assert dims.attention is not None
        own = dims.attention
        target.logits(ids)
        features = np.concatenate([target.outputs[layer] for layer in drafter.target_layers], axis=1)
        fused = self.linear(features, "context.fc", dims.hidden)
        context = self.norm(fused, self.array("context.norm.weight", dims.hidden))[-drafter.window :]
        residual = target.embed([last, *[drafter.mask_id] * drafter.gamma])
        before = np.arange(len(ids))[-drafter.window :]
        behind = len(ids) + np.arange(len(residual))
        for index in range(len(dims.layer_kinds)):
            label = f"layers.{index}"
            x = self.norm(residual, self.array(f"{label}.attn.input_norm", dims.hidden))
            seen = np.concatenate([context, x])
            q = self.linear(x, f"{label}.attn.q_proj", own.q_dim, own.quant).reshape(len(x), own.q_heads, -1)
            k = self.linear(seen, f"{label}.attn.k_proj", own.kv_dim, own.quant).reshape(len(seen), own.kv_heads, -1)
            v = self.linear(seen, f"{label}.attn.v_proj", own.kv_dim, own.quant).reshape(len(seen), own.kv_heads, -1)
            q, k = self.placed(f"{label}.attn", q, k, own, behind, np.concatenate([before, behind]))
            attended = self.attend(q, k, v, np.ones((len(x), len(seen)), bool)).reshape(len(x), -1)
            mixed = self.linear(attended, f"{label}.attn.o_proj", dims.hidden, own.quant)
            residual = self.block(label, residual, mixed, "attn")
        hidden = self.norm(residual, self.array("final_norm.weight", dims.hidden))
        return target.head(hidden[1:])
