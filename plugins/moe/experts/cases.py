"""Cases and inputs of the experts' contracts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from kernel_muster.plugins._contracts import (
    Dims,
)
from kernel_muster.plugins.moe.experts.tolerances import DEEPEST
from kernel_muster.plugins.moe.router.contracts import exact_sort, exact_work, random_ids
from kernel_muster.registry.contract.contracts import Arguments, Case, Tolerance
from kernel_muster.registry.contract.dtypes import numpy_dtype


def cases_of(rows: tuple[int, ...], bound: Callable[[int], Tolerance], depth: str) -> tuple[Case, ...]:
    """Return cases for some rows. ``depth`` names the dimension of the sums, on which the bound depends.

    Deep cases have few features: they cover every split of K, not many tiles.
    """
    most = max(rows)
    sizes = (
        ("one_group", (most, 4, 2, 16, 16)),
        ("many_experts", (most, 16, 4, 32, 48)),
        ("one_expert", (most, 1, 1, 48, 16)),
        ("all_experts", (most, 3, 3, 80, 64)),
        ("deep_k", (1, 4, 2, DEEPEST, DEEPEST)),
    )
    cases = [Case(name, dims_of(*size)) for name, size in sizes]
    cases += [Case(f"rows_{m}", dims_of(m, 8, 2, 48, 32)) for m in rows if m != most]
    hard = (("all_on_one", (most, 5, 1, 48, 32)), ("one_each", (most, most, 1, 48, 32)))
    cases += [Case(name, {**dims_of(*size), name: 1}) for name, size in (*hard, ("some_absent", (most, 8, 4, 48, 32)))]
    few = min(most, 9)
    deep = (
        ("depth_512_one_token", (1, 12, 8), 512, 144),
        ("depth_512", (few, 6, 4), 512, 144),  # more than eight rows of one expert, where there are nine tokens
        ("depth_2048_one_token", (1, 12, 8), 2048, 48),
        ("depth_2048", (few, 6, 4), 2048, 48),
        ("four_supertiles", (min(few, 5), 3, 2), 784, 80),
        ("nine_supertiles", (min(few, 3), 3, 2), 2064, 32),
        ("model_35b", (min(few, 2), 3, 2), *((2048, 512) if depth == "H" else (512, 2048))),
    )
    for name, routing, size, features in deep:
        dims = dims_of(*routing, *((size, features) if depth == "H" else (features, size)))
        cases.append(Case(name, dims, tolerance=bound(size)))
    if most > few:  # many rows of an expert
        size = 2048 if depth == "H" else 512
        dims = dims_of(41, 5, 2, *((size, 152) if depth == "H" else (152, size)))
        cases.append(Case("many_rows", dims, tolerance=bound(size)))
        cases.append(Case("many_rows_some_absent", {**dims, "some_absent": 1}, tolerance=bound(size)))
    return tuple(cases)


def dims_of(tokens: int, experts: int, choices: int, hidden: int, intermediate: int) -> dict[str, int]:
    """Return the dimensions of a case of grouped or pairwise experts."""
    return {"M": tokens, "E": experts, "T": choices, "top_k": choices, "H": hidden, "I": intermediate}


GROUPED_ROWS = (0, 1, 2, 17, 64, 128)


def slot_cases(bound: Callable[[int], Tolerance]) -> tuple[Case, ...]:
    """Return the grouped cases of a kernel that goes from I to H."""
    cases = cases_of(GROUPED_ROWS, bound, "I")
    return tuple(replace(case, dims={**case.dims, "S": case.dims["M"] * case.dims["T"]}) for case in cases)


def scaled(rng: "np.random.Generator", *shape: int) -> Any:
    """Return BF16 Gaussians scaled so that their dot products with unit Gaussian rows are unit Gaussians."""
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(numpy_dtype("bf16"))


def random_routing(dims: Dims, rng: "np.random.Generator") -> Arguments:
    """Return ids, their order by expert, and weights that sum to 1."""
    ids = random_ids(dims, rng)
    slots, offsets = exact_sort(ids, dims["E"])
    weights = rng.random(ids.shape) + 0.1
    return {
        "ids": ids,
        "slots": slots.astype(np.int32),
        "offsets": offsets.astype(np.int32),
        "work": exact_work(offsets).astype(np.int32),
        "weights": (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32),
    }


def inputs_of(name: str, shape: tuple[str, ...], *routing: str) -> Any:
    """Return an ``inputs`` function: one scaled tensor, and the named parts of a routing."""

    def make(dims: Dims, rng: "np.random.Generator") -> Arguments:
        parts = random_routing(dims, rng)
        sizes = {**dims, "S": dims["M"] * dims["T"]}
        return {name: scaled(rng, *(sizes[dim] for dim in shape)), **{part: parts[part] for part in routing}}

    return make
