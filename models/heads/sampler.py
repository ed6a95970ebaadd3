"""Sampling beyond the greedy choice, and counting of accepted drafts."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.registry.errors import UsageError


class Sampler:
    """Handles of the sampling helpers. Everything is deterministic: randomness is an argument."""

    def __init__(self, ctx: LayerContext) -> None:
        kernels = ctx.kernels
        self._memory = ctx.memory
        self._sample = kernels.try_kernel("sampling", "sample_top_k_top_p", reached_by="sampling")
        self._verify = kernels.try_kernel("sampling", "verify_greedy", reached_by="greedy choices of a verify pass")

    def sample(self, logits: Any, temperature: Any, top_k: Any, top_p: Any, uniform: Any) -> Any:
        """Return one id i32 ``(M,)`` a row of logits BF16 ``(M, V)``. ``uniform`` f32 ``(M,)`` decides."""
        ids = np.empty_like(logits, dtype=np.int32, shape=(logits.shape[0],))
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "uniform": uniform}
        self.choose(logits, how, ids)
        return ids

    @property
    def can_sample(self) -> bool:
        """Whether a kernel samples here."""
        return bool(self._sample)

    def choose(self, logits: Any, how: Mapping[str, Any], ids: Any) -> None:
        """Write one id for each row to ids i32 ``(M,)``. ``how`` holds the arguments of :meth:`sample` by name."""
        if not self._sample:
            raise UsageError("no kernel samples tokens here: decode greedily")
        self._sample(logits=logits, **how, out=ids)

    def accepted(self, draft_ids: Any, target_ids: Any) -> list[int]:
        """Return how many drafts i32 ``(S, n)`` equal the target's choices i32 ``(S, n + 1)`` before one does not.

        Both are the host's, as proposers and greedy choices come.
        """
        if self._verify:
            drafts, targets = self._memory.put(draft_ids), self._memory.put(target_ids)
            counts = np.empty_like(drafts, shape=(drafts.shape[0],))
            self._verify(draft_ids=drafts, target_ids=targets, out_accepted=counts)
            return [int(count) for count in counts.tolist()]
        holds = draft_ids == target_ids[:, : draft_ids.shape[1]]
        return [int(count) for count in np.cumprod(holds, axis=1).sum(axis=1).tolist()]
