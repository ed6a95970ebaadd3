"""Data for routed experts: weights, and routings that repeat no expert while it is still in L2."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from kernel_muster.bench.contestants import as_cupy
from kernel_muster.bench.data.nvfp4 import make_dense_data, relative_l2
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.dtypes import numpy_dtype
from kernel_muster.registry.contract.nvfp4 import Nvfp4Weight

#: Least number of launches, each with its own routing; even, so two copies of the weights alternate.
LEAST_ROUTINGS = 8
MOST_ROWS = 128


@dataclass(frozen=True)
class Routing:
    """The routing of one launch, on the device, and its number of distinct experts.

    ``ids`` i32 and ``weights`` f32 ``[M, T]``, weights descending; ``logits`` f32 ``[M, E]`` that give them in a
    softmax router; ``slots``, ``offsets`` and ``work`` in the order of experts.
    """

    ids: Any
    weights: Any
    logits: Any
    slots: Any
    offsets: Any
    work: Any
    distinct: int


@dataclass(frozen=True)
class MoeData:
    """Experts of one layer: logical weights gate, up ``(E, I, H)`` and down ``(E, H, I)``, activations ``[128, H]``."""

    experts: int
    choices: int
    hidden: int
    intermediate: int
    weights: Mapping[str, Nvfp4Weight]
    x: Any

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in the stored format."""
        elements = 3 * self.hidden * self.intermediate
        return elements // 2 + elements // nvfp4.GROUP

    def routings(self, rows: int) -> tuple[Routing, ...]:
        """Return random routings for this number of rows.

        With few experts in each launch, no expert repeats before all others came. Otherwise each token draws alone,
        and two copies of the weights must alternate.
        """
        rng = np.random.default_rng(rows)
        need = rows * self.choices
        is_disjoint = 4 * need <= self.experts
        count = max(LEAST_ROUTINGS, self.experts // need if is_disjoint else 0)
        pool: list[int] = []
        drawn = []
        for _ in range(count + count % 2):
            if is_disjoint:
                pool = pool if len(pool) >= need else rng.permutation(self.experts).tolist()
                ids, pool = np.array(pool[:need]).reshape(rows, self.choices), pool[need:]
            else:
                ids = rng.random((rows, self.experts)).argsort(axis=1)[:, : self.choices]
            drawn.append(_routing(ids.astype(np.int32), self.experts, rng))
        return tuple(drawn)

    def expected(self, routing: Routing) -> Any:
        """Return the float64 result ``[M, H]`` of a routing, on the host, without intermediate rounding."""
        import cupy

        ids, weights = cupy.asnumpy(routing.ids), cupy.asnumpy(routing.weights)
        x = self.x[: len(ids)].astype(cupy.float32).astype(cupy.float64)
        out = cupy.zeros((len(ids), self.hidden), cupy.float64)
        for expert in np.unique(ids):
            rows, choices = np.nonzero(ids == expert)
            gate, up, down = (self._dequantized(name, int(expert)) for name in ("gate", "up", "down"))
            own = x[rows]
            act = own @ gate.T
            act = act / (1 + cupy.exp(-act)) * (own @ up.T)
            out[rows] += (act @ down.T) * cupy.asarray(weights[rows, choices], cupy.float64)[:, None]
        return cupy.asnumpy(out)

    def error(self, out: Any, expected: Any) -> float:
        """Return the relative L2 error of ``out [M, H]`` on the device."""
        import cupy

        result = as_cupy(out)[: len(expected)].astype(cupy.float32)
        return relative_l2(cupy.asnumpy(result), expected)

    @cached_property
    def _tables(self) -> tuple[Any, Any]:
        import cupy

        codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scales = np.arange(256, dtype=np.uint8).view(numpy_dtype("e4m3")).astype(np.float64)
        return cupy.asarray(np.concatenate([codes, -codes])), cupy.asarray(scales)

    def _dequantized(self, name: str, expert: int) -> Any:
        import cupy

        codes, scales = self._tables
        packed, steps = self.weights[name].packed[expert], self.weights[name].block_scale[expert]
        values = codes[cupy.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)]
        decode = float(self.weights[name].global_scale_decode[expert])
        return values * cupy.repeat(scales[steps], nvfp4.GROUP, axis=1) * decode


def _routing(ids: Any, experts: int, rng: "np.random.Generator") -> Routing:
    import cupy

    weights = -np.sort(-rng.dirichlet(np.ones(ids.shape[1]), len(ids)), axis=1).astype(np.float32)
    logits = np.full((len(ids), experts), -60, np.float32)
    np.put_along_axis(logits, ids, np.log(np.maximum(weights, 1e-6)), axis=1)
    flat = ids.ravel()
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))]).astype(np.int32)
    slots = np.argsort(flat, kind="stable").astype(np.int32)
    owners = np.unique(flat)
    work = np.zeros((experts, 4), np.int32)
    work[:, 0], work[:, 3] = -1, len(owners)
    work[: len(owners), :3] = np.stack([owners, offsets[owners], offsets[owners + 1]], axis=1)
    ids, weights, logits, slots, offsets, work = map(cupy.asarray, (ids, weights, logits, slots, offsets, work))
    return Routing(ids, weights, logits, slots, offsets, work, len(owners))


def make_moe_data(experts: int, choices: int, hidden: int, intermediate: int) -> MoeData:
    """Make the weights of a layer on the current device, from fixed seeds.

    Global scales keep gate, up and an expert's result near unit Gaussians.
    """
    import cupy

    weights = {}
    for seed, (name, rows, depth) in enumerate(
        (("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate))
    ):
        made = make_dense_data(experts * rows, depth, 1, seed).weight
        typical = 2.0**-4 / np.sqrt(depth)  # codes times block scales have a spread of about 2^4
        weights[name] = Nvfp4Weight(
            made.packed.reshape(experts, rows, -1),
            made.block_scale.reshape(experts, rows, -1),
            np.full(experts, typical, np.float32),
        )
    values = np.random.default_rng(9).standard_normal((MOST_ROWS, hidden)).astype(numpy_dtype("bf16"))
    x = cupy.asarray(values.view(np.uint16)).view(numpy_dtype("bf16"))
    return MoeData(experts, choices, hidden, intermediate, weights, x)
