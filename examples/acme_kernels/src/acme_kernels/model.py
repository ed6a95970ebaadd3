"""A small model: embedding, gated FFN layers, LM head, capped logits. It shows where lookups belong.

Every kernel is looked up here, while the model is built, and kept. Decoding looks nothing up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kernel_muster as km
import numpy as np


class Weights:
    """Weights by name as ``layers.0.gate``: given ones, those of muster's sources, or none for a plan."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def find(self, name: str, shape: tuple[int, ...], quant: str) -> Any:
        """Return one: ``bf16`` for a projection ``(N, K)``, ``array`` for BF16 values of any shape."""
        if self._given is None:
            return None
        if isinstance(self._given, Mapping):
            return self._given[name]
        return self._given.find(km.WeightSpec(name, shape, quant))  # a source of muster boot or muster ab


class Projection:
    """``out = x w^T`` for few rows: x BF16 ``(M, K)``, w BF16 ``(N, K)``, out BF16 ``(M, N)``."""

    def __init__(self, kernels: km.Lookups, name: str, shape: tuple[int, int], weights: Weights) -> None:
        self._one_row = kernels.kernel("gemv", "dense_gemv_bf16")
        self._rows = kernels.try_kernel("gemv", "dense_gemv_bf16_batchm")  # optional: the audit wants it or a waiver
        self._features, self._weight = shape[0], weights.find(f"{kernels.layer}.{name}", shape, "bf16")
        for handle in (self._one_row, self._rows):
            kernels.layouts.want(f"{kernels.layer}.{name}", handle.weight_layout, handle.key)
        kernels.layouts.build(f"{kernels.layer}.{name}", "bf16_row_major", 2 * shape[0] * shape[1], "as loaded")

    def forward(self, x: Any) -> Any:
        """Project all rows at once if there is a kernel for that, else one by one."""
        out = np.empty_like(x, shape=(x.shape[0], self._features))
        if self._rows:
            self._rows(x=x, w=self._weight, out=out)
            return out
        for row in range(x.shape[0]):
            self._one_row(x=x[row : row + 1], w=self._weight, out=out[row : row + 1])
        return out


class Layer:
    """Norm, gated FFN, residual; h BF16 ``(M, H)`` is changed in place."""

    def __init__(self, kernels: km.Lookups, hidden: int, intermediate: int, eps: float, weights: Weights) -> None:
        self._norm = kernels.kernel("norm", "rms_norm")
        self._silu_mul = kernels.kernel("silu", "silu_mul")
        self._add = kernels.kernel("residual_add", "bf16_residual_add")
        self._gate = Projection(kernels, "gate", (intermediate, hidden), weights)
        self._up = Projection(kernels, "up", (intermediate, hidden), weights)
        self._down = Projection(kernels, "down", (hidden, intermediate), weights)
        self._norm_weight, self._eps = weights.find(f"{kernels.layer}.norm", (hidden,), "array"), eps

    def forward(self, h: Any) -> None:
        """Add this layer's FFN to h."""
        x = np.empty_like(h)
        self._norm(x=h, weight=self._norm_weight, eps=self._eps, weight_offset=0.0, out=x)
        gate, up = self._gate.forward(x), self._up.forward(x)
        activated = np.empty_like(gate)
        self._silu_mul(gate=gate, up=up, out=activated)
        self._add(x=self._down.forward(activated), residual=h)


class Head:
    """Logits BF16 ``(M, V)``, capped, and the greedy choice."""

    def __init__(self, kernels: km.Lookups, vocab: int, hidden: int, cap: float, weights: Weights) -> None:
        self._logits = Projection(kernels, "weight", (vocab, hidden), weights)
        self._cap = cap
        # A kill switch suppresses the lookup: a key without a lookup is no finding.
        is_off = kernels.levers.flag("MUSTER_ACME_NO_SOFTCAP")
        self._softcap = None if is_off else kernels.kernel("acme_softcap", "softcap")
        self._argmax = kernels.kernel("argmax", "argmax_bf16")

    def forward(self, h: Any) -> tuple[Any, Any]:
        """Return the next token of each row, i32 ``(M,)``, and the logits, BF16 ``(M, V)``."""
        logits = self._logits.forward(h)
        if self._softcap is not None:
            self._softcap(x=logits.copy(), cap=self._cap, out=logits)
        ids = np.empty(h.shape[0], np.int32)
        self._argmax(logits=logits, out=ids)
        return ids, logits


@dataclass(frozen=True)
class AcmeMlp:
    """The whole model. Built without weights it is a plan that cannot decode."""

    gather: km.Handle | km.NullHandle
    table: Any
    layers: tuple[Layer, ...]
    head: Head

    def decode(self, ids: Any) -> Any:
        """Return the next token of each of M sequences, i32 ``(M,)``, from the last ones."""
        return self._step(ids)[0]

    def decode_greedily(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[Any, Any]:
        """Return the new tokens of each prompt with their logits, for muster boot and muster ab.

        A model without attention sees the last token alone.
        """
        ids = np.array([prompt[-1] for prompt in prompts], np.int32)
        tokens: list[list[int]] = [[] for _ in prompts]
        rows: list[list[Any]] = [[] for _ in prompts]
        for _ in range(new_tokens):
            ids, logits = self._step(ids)
            for at, (token, row) in enumerate(zip(ids.tolist(), logits, strict=True)):
                tokens[at].append(token)
                rows[at].append(row)
        return tokens, rows

    def _step(self, ids: Any) -> tuple[Any, Any]:
        h = np.empty_like(self.table, shape=(len(ids), self.table.shape[1]))
        self.gather(table=self.table, ids=ids, out=h)
        for layer in self.layers:
            layer.forward(h)
        return self.head.forward(h)


def build(manifest: Any, kernels: km.Lookups, weights: Any = None) -> AcmeMlp:
    """Look every kernel up and return the model. ``weights`` are a mapping or a source. None plans only."""
    dims, given = manifest.model, Weights(weights)
    layers = tuple(
        Layer(kernels.for_layer(f"layers.{i}"), dims.hidden_size, dims.intermediate_size, dims.rms_norm_eps, given)
        for i in range(dims.num_layers)
    )
    cap = manifest.extensions["x-acme"]["logits_cap"]
    head = Head(kernels.for_layer("lm_head"), dims.vocab_size, dims.hidden_size, cap, given)
    gather = kernels.for_layer("embedding").kernel("embedding", "gather")
    return AcmeMlp(gather, given.find("embedding.table", (dims.vocab_size, dims.hidden_size), "array"), layers, head)
