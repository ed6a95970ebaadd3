"""Fixtures of the model tests: the really installed families, a session a test, and a float64 reference."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layout import WeightPlanner
from kernel_muster.models.scratch import Scratch, ScratchPlan
from kernel_muster.models.weights import GivenWeights, PlanOnly, SyntheticWeights
from kernel_muster.registry import nvfp4
from kernel_muster.registry.catalog import Catalog
from kernel_muster.registry.discovery import discover
from kernel_muster.registry.levers import Levers, read_levers
from kernel_muster.registry.lookups import Lookups, LookupSession
from kernel_muster.registry.records import LookupRow, fold
from kernel_muster.registry.target import CPU_TARGET

ROUNDING = 2.0**-8  # of BF16, relative, twice the half ulp
F32 = 2.0**-24


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    found = discover()
    assert found.findings == ()
    return found


@pytest.fixture(scope="session")
def make_levers(catalog: Catalog) -> Callable[..., Levers]:
    def make(**values: object) -> Levers:
        levers, findings = read_levers(catalog.levers, [("given", {f"MUSTER_{k}": v for k, v in values.items()})])
        assert findings == []
        return levers

    return make


@pytest.fixture
def make_session(catalog: Catalog, make_levers: Callable[..., Levers]) -> Callable[..., LookupSession]:
    def make(without: tuple[str, ...] = (), **levers: object) -> LookupSession:
        kernels = tuple(row for row in catalog.kernels if row.spec.key not in without)
        smaller = Catalog(catalog.plugins, kernels, catalog.contracts, catalog.builders, catalog.levers)
        return LookupSession(smaller, CPU_TARGET, make_levers(**levers))

    return make


@pytest.fixture
def make_context(make_session: Callable[..., LookupSession]) -> Callable[..., LayerContext]:
    """Return a maker of contexts; ``session`` hangs on ``context.kernels._session``."""

    def make(
        source: Any = "synthetic", label: str = "layers.0.test", max_rows: int = 40, without: tuple[str, ...] = (),
        **levers: object,
    ) -> LayerContext:  # fmt: skip
        kernels = Lookups(make_session(without, **levers))
        if isinstance(source, Mapping):
            source = GivenWeights(source)
        elif isinstance(source, str):
            source = SyntheticWeights(3)
        planner = WeightPlanner(kernels.layouts, source or PlanOnly())
        return LayerContext(kernels, planner, Scratch(ScratchPlan()), max_rows).for_layer(label)

    return make


def session_rows(kernels: Lookups) -> dict[str, LookupRow]:
    """Return what was asked, by the members of each question and its kind."""
    rows = fold(kernels._session.entries("boot"))
    return {f"{row.kind[0]} {' > '.join(map(str, row.members))}": row for row in rows}


class Exact:
    """Float64 arithmetic that shares nothing with the layers but the decoding of weights, and derived error bounds."""

    @staticmethod
    def rows(count: int, columns: int, seed: int = 0) -> Any:
        values = np.random.default_rng([seed, count, columns]).standard_normal((count, columns))
        return values.astype(nvfp4.ml_dtypes.bfloat16)

    @staticmethod
    def weight(linear_or_spec: Any, source: Any = None) -> Any:
        spec = getattr(getattr(linear_or_spec, "weight", linear_or_spec), "spec", linear_or_spec)
        found = (source or SyntheticWeights(3)).find(spec)
        if spec.quant == "nvfp4":
            return nvfp4.dequantize(found)
        return np.asarray(getattr(found, "values", found)).astype(np.float64)

    @staticmethod
    def project(x: Any, w: Any, error: Any = 0.0) -> tuple[Any, Any]:
        """Return ``x w^T`` and its bound: one BF16 rounding, K FP32 additions, and the error of x carried through."""
        x = np.asarray(x).astype(np.float64)
        value = x @ w.T
        carried = (np.zeros_like(x) + error) @ np.abs(w).T
        return value, ROUNDING * (np.abs(value) + carried) + carried + x.shape[1] * F32 * (np.abs(x) @ np.abs(w).T)

    @classmethod
    def swiglu(cls, x: Any, w_gate: Any, w_up: Any, w_down: Any) -> tuple[Any, Any]:
        """Return the FFN and its bound: |silu'| < 1.1, and gate, up, their product and the result are rounded."""
        gate, gate_error = cls.project(x, w_gate)
        up, up_error = cls.project(x, w_up)
        silu = gate / (1 + np.exp(-gate))
        error = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * up_error
        error += ROUNDING * (np.abs(silu * up) + error)
        return cls.project(silu * up, w_down, error)

    @staticmethod
    def assert_close(got: Any, value: Any, bound: Any) -> None:
        distance = np.abs(np.asarray(got).astype(np.float64) - value)
        assert np.all(distance <= bound), float((distance / np.maximum(bound, 1e-300)).max())


@pytest.fixture(scope="session")
def exact() -> type[Exact]:
    return Exact


@pytest.fixture(scope="session")
def asked() -> Callable[[Lookups], dict[str, LookupRow]]:
    return session_rows
