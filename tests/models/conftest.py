"""Fixtures of the model tests: the really installed families, a session a test, and a float64 reference."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import reference_model
from engines import SIZES, Make
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.dims import AttentionDims, DrafterDims, GdnDims, ModelDims, MoeDims, RopeDims, YarnDims
from kernel_muster.models.drafter import Drafter, drafter_from_dims
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.memory.scratch import Scratch, ScratchPlan
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.model import Model
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.source import GivenWeights, PlanOnly, SyntheticWeights
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.weights import Bf16Weight
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.hardware.target import CPU_TARGET
from kernel_muster.registry.levers import Levers, read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups
from kernel_muster.registry.selection.records import LookupRow, fold

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


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """Return the float64 implementation of the architecture."""
    return reference_model


class DecisiveWeights(SyntheticWeights):
    """Synthetic weights that hide nothing: routers seldom meet a near tie, and norms that are not around zero are
    around one, as trained ones are, so that what stands behind them matters.
    """

    plain_norms: tuple[str, ...] = (".gdn.norm",)

    def find(self, spec: Any) -> Any:
        found = super().find(spec)
        if spec.name.endswith(".router"):
            return Bf16Weight(found.values * found.values.dtype.type(4))
        if spec.quant == "array" and spec.name.endswith(self.plain_norms):
            return (found.astype(np.float32) + 1).astype(found.dtype)
        return found


class DrafterWeights(DecisiveWeights):
    """The same for the drafter, none of whose norms is around zero."""

    plain_norms = ("norm", "norm.weight")


TINY_ATTENTION = AttentionDims(4, 2, 16, True, "nvfp4", True, RopeDims(1e7, 8, (2, 1, 1), True))
TINY_GDN = GdnDims(2, 16, 4, 16, 4)
TINY_MOE = MoeDims(8, 2, 32, 32, "softmax")
KINDS = ("gdn", "attn", "gdn", "attn")
TINY: dict[str, ModelDims] = {
    "dense": ModelDims(
        "tiny", 64, 96, KINDS, "dense", "nvfp4", 1e-6, 1.0, TINY_ATTENTION, TINY_GDN, 96, None, 1
    ),
    "moe": ModelDims("tiny", 64, 96, KINDS, "moe", "nvfp4", 1e-6, 1.0, TINY_ATTENTION, TINY_GDN, 0, TINY_MOE, 1),
}  # fmt: skip
TINY["bf16"] = replace(
    TINY["dense"], quant="bf16", mtp_quant="bf16", is_tied=True, attention=replace(TINY_ATTENTION, quant="bf16")
)
# No FFN, and positions in sections without interleaving, as in Holo.
TINY["alone"] = replace(
    TINY["dense"], ffn="none", intermediate=0, mtp_layers=0,
    attention=replace(TINY_ATTENTION, rope=RopeDims(1e7, 8, (2, 1, 1), False)),
)  # fmt: skip
TINY_DRAFTER = ModelDims(
    "draft", 64, 96, ("attn", "attn"), "dense", "nvfp4", 1e-6, 0.0,
    AttentionDims(4, 2, 16, False, "nvfp4", True, RopeDims(1e4, 16, yarn=YarnDims(8.0, 64))), None, 96, None, 0,
    drafter=DrafterDims("tiny", 4, 8, 95, (0, 2, 3)),
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_dims() -> dict[str, ModelDims]:
    return {**TINY, "drafter": TINY_DRAFTER}


@pytest.fixture(scope="session")
def tiny_weights() -> SyntheticWeights:
    return DecisiveWeights(3)


@pytest.fixture(scope="session")
def drafter_weights() -> SyntheticWeights:
    return DrafterWeights(5)


@pytest.fixture(scope="session")
def tiny(catalog: Catalog, make_levers: Callable[..., Levers], tiny_weights: SyntheticWeights) -> Callable[..., Model]:
    """Return a maker of computing models: ``tiny("dense", max_rows=64)``; the same arguments give the same model."""

    @cache
    def make(kind: str, max_rows: int = 64, without: tuple[str, ...] = (), **levers: object) -> Model:
        kernels = tuple(row for row in catalog.kernels if row.spec.key not in without)
        session = LookupSession(replace(catalog, kernels=kernels), CPU_TARGET, make_levers(**levers))
        return build_from_dims(TINY[kind], Lookups(session), tiny_weights, max_rows)

    return make


@pytest.fixture(scope="session")
def tiny_drafter(
    catalog: Catalog, make_levers: Callable[..., Levers], tiny: Callable[..., Model], drafter_weights: SyntheticWeights
) -> Callable[..., Drafter]:
    """Return a maker of drafters beside a model."""

    @cache
    def make(kind: str) -> Drafter:
        session = LookupSession(catalog, CPU_TARGET, make_levers())
        return drafter_from_dims(TINY_DRAFTER, Lookups(session), drafter_weights, tiny(kind), 64)

    return make


@pytest.fixture
def engine_of(tiny: Make) -> Iterator[Callable[..., DecodeEngine]]:
    made: list[DecodeEngine] = []

    def make(kind: str, sizes: StateSizes = SIZES, max_context: int | None = 64) -> DecodeEngine:
        made.append(DecodeEngine(tiny(kind), sizes, max_context))
        return made[-1]

    yield make
    for one in made:
        one.close()
