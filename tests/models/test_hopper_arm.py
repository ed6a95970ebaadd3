"""The Hopper GEMM: its lookups, the copies that it saves, and the launched kernel under each lever."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from kernel_muster.models.heads.lm_head import LmHead
from kernel_muster.models.layers.context import LayerContext, new_rows
from kernel_muster.models.layers.families import batch_tiers, exact_tiers
from kernel_muster.models.layers.linear import Nvfp4Linear
from kernel_muster.models.layers.projection import projection
from kernel_muster.models.layers.tiles import tile_kernels
from kernel_muster.models.memory.scratch import Scratch, ScratchPlan
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.source import PlanOnly
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.specs import KernelSpec, Provider, PythonKernel, Registered
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.launch.runners import HostRunner
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.handles import Handle
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

Make = Callable[..., Any]
KEY = "w4a16_hopper::w4a16_hopper_gemm"
LAYOUT = "nvfp4_of_a_test"
RAN: Counter[str] = Counter()


@dataclass(frozen=True)
class Relaid:
    """A weight in a layout that only the stand-in reads."""

    held: Any
    layout: str = LAYOUT
    quant: str = "nvfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)


def hopper_gemm(x: Any, w: Any, out: Any) -> None:
    RAN[KEY] += 1
    out[...] = (x.astype("f8") @ nvfp4.dequantize(w.held).T).astype(out.dtype)


SPEC = KernelSpec(
    key=KEY, contract="w4a16_gemm", archs=("sm_90a",), backend=PythonKernel(hopper_gemm), weight_layout=LAYOUT,
    prepare=Relaid,
)  # fmt: skip


@pytest.fixture
def planned(catalog: Catalog, make_levers: Callable[..., Levers]) -> Make:
    """Return a maker of plans: one projection (N, K) on a target; the Hopper GEMM is the stand-in."""

    def make(target: str = "sm_90a", shape: tuple[int, int] = (14336, 5120), **levers: object) -> Any:
        others = tuple(row for row in catalog.kernels if row.spec.key != KEY)
        stand_in = Registered(SPEC, Provider("w4a16_hopper", "kernel-muster", "1"))
        arch = CPU_TARGET if target == "cpu" else Target(target, parse_arch(target))
        session = LookupSession(replace(catalog, kernels=(*others, stand_in)), arch, make_levers(**levers))
        kernels = Lookups(session)
        ctx = LayerContext(kernels, WeightPlanner(kernels.layouts, PlanOnly()), Scratch(ScratchPlan()), 40)
        return ctx, projection(ctx.for_layer("layers.0.ffn"), "w", shape, "nvfp4")

    return make


def asked_keys(ctx: LayerContext) -> set[str]:
    return {str(key) for entry in ctx.kernels._session.entries("boot") for key in entry.members}


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_100a", "sm_121a"])
def test_hopper_gemm_is_not_looked_up_on_any_other_target(planned: Make, target: str) -> None:
    ctx, linear = planned(target)
    assert KEY not in asked_keys(ctx)
    assert set(linear.tiles) >= {"t", "m128"}
    assert ctx.kernels._session.requests == ()


def test_hopper_gemm_serves_from_its_edge_and_saves_the_copies_of_tiles(planned: Make) -> None:
    ctx, _ = planned()
    assert KEY in asked_keys(ctx)
    assert {"w4a16::w4a16_gemm", "w4a16::w4a16_gemm_t_m128"} <= asked_keys(ctx)  # asked for all the same
    copies = {copy.layout: copy for copy in ctx.kernels.layouts.copies}
    assert copies[LAYOUT].reason == "Hopper GEMM"
    assert nvfp4.TRANSPOSED not in copies
    assert nvfp4.ROW_MAJOR not in copies
    assert len(copies) == 2
    assert copies[LAYOUT].shape == (14336, 5120)
    assert ctx.kernels.layouts.missing == ()


@pytest.mark.parametrize(("target", "levers", "tiles"), [
    ("sm_90a", {}, {"hopper"}), ("sm_90a", {"NO_W4A16_HOPPER": "1"}, set()), ("sm_100a", {}, set()), ("cpu", {}, set()),
])  # fmt: skip
def test_lm_head_has_the_hopper_gemm_or_chunks_of_16_and_no_tiles(
    planned: Make, target: str, levers: dict[str, str], tiles: set[str]
) -> None:
    linear = LmHead(planned(target, **levers)[0].for_layer("lm_head"), 248320, 2048, "nvfp4").linear
    assert set(linear.tiles) == tiles
    assert 256 not in linear.tiers
    assert [linear.prefers_gemv(rows, "decode") for rows in (1, 16, 17, 32)] == [True, True, not tiles, not tiles]


def test_tiny_weights_keep_the_copy_of_tiles_and_get_none_of_the_hopper_gemm(planned: Make) -> None:
    ctx, linear = planned(shape=(512, 2048), W4A16_HOPPER_TINY_MI=1)
    assert LAYOUT not in {copy.layout for copy in ctx.kernels.layouts.copies}
    assert nvfp4.TRANSPOSED in {copy.layout for copy in ctx.kernels.layouts.copies}
    assert KEY not in asked_keys(ctx)  # no number of rows reaches it
    assert "hopper" not in linear.tiles


@pytest.mark.parametrize("levers", [{"NO_W4A16_HOPPER": "1"}, {"W4A16_ARM": "tile"}])
def test_hopper_gemm_switched_off_is_not_looked_up_and_tiles_get_their_copy(
    planned: Make, levers: dict[str, str]
) -> None:
    ctx, linear = planned(**levers)
    assert KEY not in asked_keys(ctx)
    assert nvfp4.TRANSPOSED in {copy.layout for copy in ctx.kernels.layouts.copies}
    assert "hopper" not in linear.tiles
    assert ctx.kernels._session.requests == ()


def test_kill_switch_of_zero_keeps_the_hopper_gemm(planned: Make) -> None:
    assert "hopper" in planned(NO_W4A16_HOPPER="0")[1].tiles


@pytest.mark.parametrize(
    ("target", "levers", "why"),
    [
        ("sm_121a", {}, "the target is sm_121a, expected sm_90a"),
        ("cpu", {}, "the target is cpu, expected sm_90a"),
        ("sm_90a", {"NO_W4A16_HOPPER": "1"}, "MUSTER_NO_W4A16_HOPPER switches it off"),
    ],
)
def test_hopper_gemm_forced_where_it_cannot_be_is_a_failed_request(
    planned: Make, target: str, levers: dict[str, str], why: str
) -> None:
    ctx, _ = planned(target, W4A16_ARM="hopper", **levers)
    (request,) = ctx.kernels._session.requests
    assert (request.lever, request.why) == ("MUSTER_W4A16_ARM", f"the Hopper GEMM cannot serve: {why}")
    assert "projection.py" in request.site or "test_hopper_arm.py" in request.site


# The launched kernel


@pytest.fixture
def computing(make_context: Make) -> Make:
    """Return a maker of projections that compute on the host, the Hopper GEMM's stand-in among their kernels."""

    def make(n: int = 40, k: int = 64, hopper: bool = True, **levers: object) -> Nvfp4Linear:
        # No weight of a test is large: none shall count as small or tiny unless the test sets it.
        ctx = make_context(**{"W4A16_HOPPER_SMALL_MI": 0, "W4A16_HOPPER_TINY_MI": 0, **levers})
        kernels = ctx.kernels
        tiles = dict(tile_kernels(kernels, [(n, k)]))
        if hopper:
            contract = kernels.catalog.contracts["w4a16_gemm"]
            spec = replace(SPEC, archs=("cpu",))
            tiles["hopper"] = Handle(spec.kernel_key, spec, contract, Provider("t", "t", "1"), HostRunner())
        tiers = {**exact_tiers(kernels), **batch_tiers(kernels)}
        RAN.clear()
        return Nvfp4Linear(ctx, ctx.spec("w", n, k, "nvfp4"), tiers, tiles)

    return make


def run(linear: Nvfp4Linear, exact: Any, rows: int, phase: str = "decode") -> dict[str, int]:
    x = exact.rows(rows, 64)
    out = new_rows(x, 40)
    linear.forward(x, out, phase)  # type: ignore[arg-type]
    exact.assert_close(out, *exact.project(x, exact.weight(linear)))
    assert RAN[KEY] == linear.used["hopper"]
    return dict(linear.used)


@pytest.mark.parametrize(("levers", "rows", "phase", "used"), [
    ({}, 16, "decode", {"gemv16": 1}), ({}, 17, "decode", {"hopper": 1}), ({}, 17, "verify", {"hopper": 1}),
    ({}, 40, "prefill", {"hopper": 1}), ({"W4A16_HOPPER_FROM": 33}, 32, "verify", {"gemv256": 1}),
    ({"W4A16_HOPPER_FROM": 33}, 33, "verify", {"hopper": 1}), ({"W4A16_HOPPER_FROM": 4}, 4, "decode", {"hopper": 1}),
    ({"W4A16_ARM": "hopper"}, 1, "decode", {"hopper": 1}),
    ({"W4A16_ARM": "gemv"}, 33, "prefill", {"gemv256": 1}),
    ({"W4A16_GEMV_MI": 1}, 4, "decode", {"gemv4": 1}), ({"W4A16_GEMV_MI": 1}, 256, "prefill", {"gemv256": 1}),
    ({"W4A16_GEMV_MI": 1}, 257, "prefill", {"hopper": 1}),
    ({"W4A16_GEMV_MI": 1, "W4A16_ARM": "hopper"}, 33, "prefill", {"hopper": 1}),
])  # fmt: skip
def test_the_arm_that_ran_is_the_one_that_policy_and_levers_name(
    computing: Make, exact: Any, levers: dict[str, object], rows: int, phase: str, used: dict[str, int]
) -> None:
    assert run(computing(**{"W4A16_GEMV_MI": 0, "W4A16_HOPPER_SMALL_MI": 0} | levers), exact, rows, phase) == used


@pytest.mark.parametrize(("levers", "rows", "used"), [
    ({}, 33, {"t": 1}), ({"W4A16_CHUNKED_ROWS": 48}, 33, {"gemv256": 1}),
    ({"W4A16_CHUNKED_ROWS": 16}, 17, {"t": 1}), ({"W4A16_ARM": "tile"}, 1, {"t": 1}),
    ({"W4A16_M128_ABOVE": 16}, 33, {"m128": 1}), ({"W4A16_K64_MIN_K": 64, "W4A16_NARROW_BLOCKS": 0}, 33, {"k64": 1}),
    ({"W4A16_K64_MIN_K": 64, "W4A16_NARROW_BLOCKS": 1}, 33, {"k64_n64": 1}),
])  # fmt: skip
def test_every_edge_of_tiles_is_followed_by_the_kernel_that_ran(
    computing: Make, exact: Any, levers: dict[str, object], rows: int, used: dict[str, int]
) -> None:
    assert run(computing(hopper=False, **levers), exact, rows) == used


@pytest.mark.parametrize(("levers", "tile", "key"), [
    ({}, "t", "w4a16_gemm_t_p3"), ({"NO_TGEMM_PIPELINE3": "1"}, "t", "w4a16_gemm_t"),
    ({"NO_TGEMM_PIPELINE3": "0"}, "t", "w4a16_gemm_t_p3"),
    ({"W4A16_K64_MIN_K": 64, "NO_K64_N64": "1"}, "k64", "w4a16_gemm_t_k64_p3"),
    ({"W4A16_K64_MIN_K": 64, "NO_K64_N64": "1", "NO_K64_PIPELINE3": "1"}, "k64", "w4a16_gemm_t_k64"),
    ({"W4A16_K64_MIN_K": 64}, "k64_n64", "w4a16_gemm_t_k64_n64_p3"),
])  # fmt: skip
def test_twins_that_ran_are_those_that_their_kill_switches_leave(
    computing: Make, exact: Any, levers: dict[str, object], tile: str, key: str
) -> None:
    linear = computing(hopper=False, **levers)
    called: list[str] = []

    class Recording:
        """A handle that says when it is called."""

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def __call__(self, **arguments: Any) -> None:
            called.append(str(self.handle.key))
            self.handle(**arguments)

    linear.tiles = {name: Recording(handle) for name, handle in linear.tiles.items()}
    assert run(linear, exact, 33) == {tile: 1}
    assert called == [f"w4a16::{key}"]
