import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.dims import MoeDims
from kernel_muster.models.ffn.moe_ffn import MoeFfn
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.policy.ffn import MOE_ARMS
from kernel_muster.models.weights.source import SyntheticWeights, WeightSpec
from kernel_muster.registry.errors import NullKernelError, ScratchError, UsageError
from kernel_muster.registry.selection.records import fold

Make = Callable[..., LayerContext]
ROWS = [*range(1, 21), 33]
H, DIMS = 64, MoeDims(experts=6, top_k=2, intermediate=32, shared_intermediate=48, router="softmax")


def session_rows(ctx: LayerContext) -> Any:
    return fold(ctx.kernels._session.entries("boot"))


def forced(arm: str) -> dict[str, str]:
    """Return the levers that an arm needs: what no row count reaches is looked up where it is asked for."""
    return {"FFN_ARM": arm} if arm in ("token_major", "atomic_c4", "batched") else {}


def moe(ctx: LayerContext, dims: MoeDims = DIMS) -> MoeFfn:
    return MoeFfn(ctx, H, dims)


def route(ffn: MoeFfn, x: Any) -> tuple[Any, Any]:
    ids, weights = np.empty((len(x), DIMS.top_k), np.int32), np.empty((len(x), DIMS.top_k), np.float32)
    ffn.router.route(x, ids, weights)
    return ids, weights


def reference(ffn: MoeFfn, exact: Any, x: Any) -> tuple[Any, Any]:
    """Each token through its chosen experts (chosen by the layer's router, which has a test of its own)."""
    gate, up, down = (exact.weight(w) for w in (ffn.experts.gate, ffn.experts.up, ffn.experts.down))
    ids, weights = route(ffn, x)
    value, bound = np.zeros(x.shape), np.zeros(x.shape)
    for m in range(len(x)):
        for expert, weight in zip(ids[m], weights[m].astype(np.float64), strict=True):
            y, error = exact.swiglu(x[m : m + 1], gate[expert], up[expert], down[expert])
            value[m] += weight * y[0]
            bound[m] += weight * (error[0] + 2.0**-8 * np.abs(y[0]))  # each expert's result may be rounded to BF16
    bound += 2.0**-8 * (np.abs(value) + bound)
    if ffn.shared is None:
        return value, bound
    glu = ffn.shared.swiglu
    y, error = exact.swiglu(x, *(exact.weight(w) for w in (glu.gate, glu.up, glu.down)))
    vector = SyntheticWeights(3).find(WeightSpec("layers.0.test.shared_expert_gate", (H,), "array")).astype(np.float64)
    gated = 1 / (1 + np.exp(-(x.astype(np.float64) @ vector)))[:, None]
    value, bound = value + gated * y, bound + gated * error + 1e-4 * np.abs(y)
    return value, bound + 2.0**-8 * (np.abs(value) + bound)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_moe_by_policy_matches_float64_at_every_row_count(
    make_context: Make, exact: Any, rows: int, phase: Any
) -> None:
    ffn = moe(make_context())
    x = exact.rows(rows, H)
    exact.assert_close(ffn.forward(x, phase), *reference(ffn, exact, x))
    by_rows = {3: "k3", 4: "batched"}.get(rows, "k2" if rows % 2 == 0 else "single")
    assert ffn.used == {"prefill" if phase == "prefill" else "grouped" if rows >= 16 else by_rows: 1}


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 17])
@pytest.mark.parametrize("arm", MOE_ARMS)
def test_moe_forced_arm_matches_float64(make_context: Make, exact: Any, arm: Any, rows: int) -> None:
    ffn = moe(make_context(**forced(arm)))
    x = exact.rows(rows, H)
    exact.assert_close(ffn.forward(x, "decode", arm), *reference(ffn, exact, x))
    assert ffn.used == {arm: 1}


@pytest.mark.parametrize("arm", ["grouped", "prefill", "k2", "k3", "batched", "token_major"])
def test_moe_routed_arms_agree_bit_for_bit_with_single(make_context: Make, exact: Any, arm: Any) -> None:
    ffn = moe(make_context(), MoeDims(6, 2, 32, 0, "softmax"))
    x = exact.rows(7, H)
    assert ffn.forward(x, "decode", arm).tobytes() == ffn.forward(x, "decode", "single").tobytes()


PAIRS = {n: {f"moe_fused_batch{n}::moe_fused_batch{n}_{what}" for what in ("gate_up", "down")} for n in (2, 3)}
FUSED = tuple(f"moe_fused_shared::moe_fused_shared_{name}" for name in ("gate_up", "down"))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("missing", [(), FUSED[:1], FUSED[1:]])
def test_moe_of_few_rows_is_fused_with_the_bits_of_the_launches_one_by_one(
    make_context: Make, exact: Any, missing: Any, fp32: bool
) -> None:
    fused, apart = moe(make_context(FP32_ROUTING=fp32)), moe(make_context(FP32_ROUTING=fp32, without=FUSED))
    some = moe(make_context(FP32_ROUTING=fp32, without=missing))
    for rows in (1, 2, 3, 4, 5):
        x = exact.rows(rows, H)
        expected = apart.forward(x, "decode").tobytes()
        assert fused.forward(x, "decode").tobytes() == some.forward(x, "decode").tobytes() == expected
    counts = [sum(ffn.shared.swiglu.used.values()) for ffn in (fused, some, apart)]  # type: ignore[union-attr]
    assert counts == [0, 10 if missing else 0, 10]


@pytest.mark.parametrize("arm", ["grouped", "prefill"])
def test_moe_grouped_ends_in_one_launch_with_the_bits_of_two(make_context: Make, exact: Any, arm: Any) -> None:
    one, two = moe(make_context()), moe(make_context(without=("moe_shared::moe_unpermute_shared_add",)))
    x = exact.rows(7, H)
    assert one.forward(x, "decode", arm).tobytes() == two.forward(x, "decode", arm).tobytes()


@pytest.mark.parametrize("dims", [
    MoeDims(6, 2, 32, 0, "softmax"), MoeDims(6, 2, 32, 48, "sigmoid"), MoeDims(257, 2, 32, 48, "softmax"),
    MoeDims(40, 33, 32, 48, "softmax"),
])  # fmt: skip
def test_moe_that_no_fused_kernel_suits_asks_for_none(make_context: Make, dims: MoeDims) -> None:
    ctx = make_context(source=None)
    assert moe(ctx, dims).fused is None
    part = MoeFfn(ctx.for_layer("layers.1.test"), H, DIMS, range(4))
    assert part.fused is None
    assert not {str(row.key) for row in session_rows(ctx)} & set(FUSED)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("fp32", [False, True])
def test_router_takes_the_largest_scores_and_weighs_to_one(
    make_context: Make, exact: Any, router: Any, fp32: bool
) -> None:
    ffn = moe(make_context(FP32_ROUTING=fp32), MoeDims(6, 2, 32, 48, router))
    x = exact.rows(33, H)
    ids, weights = route(ffn, x)
    logits, bound = exact.project(x, exact.weight(ffn.router))
    error = (1e-4 if fp32 else bound.max()) + 1e-5
    scores = np.exp(logits) if router == "softmax" else 1 / (1 + np.exp(-logits))
    chosen = np.take_along_axis(scores, ids, axis=1)
    rest = np.where(np.isin(np.arange(6), ids[0]), -np.inf, logits[0])
    assert rest.max() <= logits[0][ids[0]].min() + 2 * error
    assert all(len(set(row)) == 2 for row in ids.tolist())
    expected = chosen / chosen.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, expected, atol=2 * error)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)
    assert ffn.fp32_routing_active is fp32


def test_moe_without_a_shared_expert_matches_float64(make_context: Make, exact: Any) -> None:
    ctx = make_context()
    ffn = moe(ctx, MoeDims(6, 2, 32, 0, "softmax"))
    x = exact.rows(5, H)
    exact.assert_close(ffn.forward(x, "decode"), *reference(ffn, exact, x))


@pytest.mark.parametrize(("levers", "rows", "arm"), [
    ({}, 15, "single"), ({}, 16, "grouped"), ({"MOE_GROUPED_DECODE": True}, 1, "grouped"),
    ({"NO_MOE_GROUPED_DECODE": True}, 64, "k2"),
    ({"NO_MOE_GROUPED_DECODE": True, "MOE_GROUPED_DECODE": True}, 17, "single"),
    ({"FFN_ARM": "atomic_c4"}, 64, "atomic_c4"),
])  # fmt: skip
def test_moe_arm_follows_the_levers_in_decode_and_verify(
    make_context: Make, levers: dict[str, Any], rows: int, arm: str
) -> None:
    ffn = moe(make_context(**levers))
    assert ffn.arm(rows, "decode") == ffn.arm(rows, "verify") == arm
    assert ffn.moe_grouped_decode_ok(rows) is (arm in ("grouped", "atomic_c4"))


ATOMIC = "moe_w4a16::moe_w4a16_grouped_down_atomic_c4"


def test_moe_without_the_atomic_kernel_lacks_its_arm(make_context: Make, exact: Any) -> None:
    ctx = make_context(without=(ATOMIC,), FFN_ARM="atomic_c4")
    ffn = moe(ctx)
    assert {str(row.key): row.requested_by for row in session_rows(ctx)}[ATOMIC] == "MUSTER_FFN_ARM"
    assert ffn.arm(2, "decode") == "k2"
    with pytest.raises(UsageError, match="no arm 'atomic_c4' here"):
        ffn.forward(exact.rows(2, H), "decode", "atomic_c4")


@pytest.mark.parametrize(("arm", "adds"), [
    ("single", set()), ("grouped", set()), ("atomic_c4", {ATOMIC, "moe_shared::moe_shared_gate_add"}),
    ("token_major", {*PAIRS[2], "moe_shared::moe_shared_gate_add"}),
    ("batched", {*PAIRS[2], *PAIRS[3], "moe_shared::moe_shared_gate_add"}),
])  # fmt: skip
def test_moe_asks_for_what_only_a_lever_reaches_where_it_is_set(make_context: Make, arm: str, adds: set[str]) -> None:
    def tried(**levers: str) -> set[str]:
        ctx = make_context(source=None, **levers)
        moe(ctx)
        return {str(row.key) for row in session_rows(ctx)}

    assert tried(FFN_ARM=arm) - tried() == adds


@pytest.mark.parametrize("arm", ["token_major", "batched"])
def test_moe_arm_that_was_not_looked_up_is_refused(make_context: Make, exact: Any, arm: Any) -> None:
    ffn = moe(make_context())
    with pytest.raises(UsageError, match=r"no arm 'token_major' here|MUSTER_FFN_ARM asks for them"):
        ffn.forward(exact.rows(5, H), "decode", arm)


def test_moe_answers_its_questions(make_context: Make, exact: Any) -> None:
    ffn = moe(make_context())
    assert (ffn.is_none, ffn.is_dense, ffn.can_forward_km(4), ffn.fp32_routing_active) == (False,) * 4
    assert ffn.forward(exact.rows(0, H), "decode").shape == (0, H)
    with pytest.raises(UsageError, match="no arm 'km' here"):
        ffn.forward(exact.rows(4, H), "decode", "km")


def test_moe_with_a_sigmoid_router_that_is_missing_never_falls_back(make_context: Make, exact: Any) -> None:
    ffn = moe(make_context(without=("moe::moe_topk_sigmoid",)), MoeDims(6, 2, 32, 48, "sigmoid"))
    with pytest.raises(NullKernelError, match="moe::moe_topk_sigmoid"):
        ffn.forward(exact.rows(2, H), "decode")


@pytest.mark.parametrize("arm", MOE_ARMS)
@pytest.mark.parametrize("bounds", [(0, 1, 6), (0, 2, 3, 6)])
def test_parts_of_the_experts_add_up_to_the_layer(make_context: Make, exact: Any, arm: Any, bounds: Any) -> None:
    whole = moe(make_context())
    x = exact.rows(7, H)
    value, bound = reference(whole, exact, x)
    total, rounding = np.zeros(x.shape), np.zeros(x.shape)
    for first, last in itertools.pairwise(bounds):
        part = MoeFfn(make_context(**forced(arm)), H, DIMS, range(first, last))
        assert (part.shared is None) == (first > 0)
        made = part.forward(x, "decode", arm).astype(np.float64)
        total += made
        rounding += 2.0**-8 * np.abs(made)
    assert (np.abs(total - value) <= bound + rounding).all()
    assert np.abs(total - value).mean() < 2.0**-7 * np.abs(value).mean()


def test_part_of_the_experts_plans_its_own_weights_and_no_more(make_context: Make) -> None:
    ctx = make_context(source=None)
    part = MoeFfn(ctx, H, DIMS, range(2, 4)).experts
    assert [w.spec.shape for w in (part.gate, part.up, part.down)] == [(2, 32, H), (2, 32, H), (2, H, 32)]
    assert "moe::moe_local_ids" in {str(row.key) for row in session_rows(ctx)}
    whole = make_context(source=None)
    moe(whole)
    assert "moe::moe_local_ids" not in {str(row.key) for row in session_rows(whole)}


@pytest.mark.parametrize("owned", [range(0), range(3, 3), range(5, 7), range(-1, 2), range(0, 6, 2), range(3, 0, -1)])
def test_experts_that_are_no_part_of_the_layer_are_refused(make_context: Make, owned: range) -> None:
    with pytest.raises(UsageError, match=r"expected a rising range that is not empty, within 0 to 6"):
        MoeFfn(make_context(), H, DIMS, owned)


def test_moe_takes_the_k64_twin_where_k_divides(make_context: Make) -> None:
    experts = moe(make_context()).experts
    assert (experts._gate_up.key.func, experts._down.key.func) == (
        "moe_w4a16_grouped_gate_up_k64",
        "moe_w4a16_grouped_down",
    )


def test_buffers_of_the_shared_expert_are_not_lent_to_what_runs_beside_it(make_context: Make, exact: Any) -> None:
    ctx = make_context()
    ffn = moe(ctx)
    x, out = exact.rows(5, H), exact.rows(5, H)
    assert ffn.shared is not None
    lent = ("ffn.act", "swiglu", (5, DIMS.shared_intermediate))
    refused = pytest.raises(ScratchError, match=r"ffn\.act: swiglu uses it on a second stream")
    with refused, ffn.shared.on_side_stream(x, out, "decode"), ctx.scratch.lease(*lent):
        pass
    with ctx.scratch.lease(*lent):  # a failed pass waits for nothing any more
        pass
