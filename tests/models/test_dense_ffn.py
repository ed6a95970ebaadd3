from collections.abc import Callable
from typing import Any

import pytest
from kernel_muster.models.ffn.dense_ffn import DenseFfn
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.ffn import NoneFfn
from kernel_muster.models.policy.ffn import DENSE_ARMS
from kernel_muster.registry.errors import UsageError

Make = Callable[..., LayerContext]
ROWS = [*range(1, 21), 33]
CHOSEN = {1: "single", 2: "k2", 3: "k3", **dict.fromkeys(range(4, 9), "km"), **dict.fromkeys(range(9, 17), "batched")}


def dense(ctx: LayerContext, quant: str = "nvfp4") -> DenseFfn:
    return DenseFfn(ctx, 64, 96, quant)


def reference(ffn: DenseFfn, exact: Any, x: Any) -> Any:
    glu = ffn.swiglu
    return exact.swiglu(x, *(exact.weight(linear) for linear in (glu.gate, glu.up, glu.down)))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("phase", ["decode", "verify", "prefill"])
def test_dense_by_policy_matches_float64_at_every_row_count(
    make_context: Make, exact: Any, rows: int, phase: str
) -> None:
    ffn = dense(make_context())
    x = exact.rows(rows, 64)
    exact.assert_close(ffn.forward(x, phase), *reference(ffn, exact, x))  # type: ignore[arg-type]
    expected = CHOSEN.get(rows, "prefill") if phase != "prefill" or rows <= 3 else "prefill"
    assert ffn.used == {expected: 1}


@pytest.mark.parametrize("rows", [1, 4, 7, 18])
@pytest.mark.parametrize("arm", DENSE_ARMS)
def test_dense_forced_arm_matches_float64(make_context: Make, exact: Any, arm: Any, rows: int) -> None:
    ffn = dense(make_context())
    x = exact.rows(rows, 64)
    exact.assert_close(ffn.forward(x, "decode", arm), *reference(ffn, exact, x))
    assert ffn.used == {"batched" if arm in ("token_major", "atomic_c4") else arm: 1}


@pytest.mark.parametrize(("arm", "launches"), [
    ("single", {"gemv1": 7}), ("k2", {"gemv2": 3, "gemv1": 1}), ("k3", {"gemv3": 2, "gemv1": 1}),
    ("km", {"gemv7": 1}), ("batched", {"gemv7": 1}), ("prefill", {"t": 1}),
])  # fmt: skip
def test_dense_arm_cuts_seven_rows_as_its_name_says(
    make_context: Make, exact: Any, arm: Any, launches: dict[str, int]
) -> None:
    ffn = dense(make_context())
    ffn.forward(exact.rows(7, 64), "decode", arm)
    assert ffn.swiglu.down.used == launches
    tiers = {name: "gemv8" if name == "gemv7" else name for name in launches if name != "t"}
    assert ffn.swiglu.used == {tier.replace("gemv", "dual_silu"): launches[name] for name, tier in tiers.items()}


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9])
def test_dense_without_fused_kernels_has_the_same_bits_from_two_launches(
    make_context: Make, exact: Any, rows: int
) -> None:
    without = tuple(f"w4a16_gemv::w4a16_gemv_dual_silu{tier}" for tier in ("", "_batch2", "_batch3", "_batch8"))
    fused, apart = dense(make_context()), dense(make_context(without=without))
    x = exact.rows(rows, 64)
    assert fused.forward(x, "decode").tobytes() == apart.forward(x, "decode").tobytes()
    assert fused.swiglu.used == ({f"dual_silu{rows if rows <= 3 else 8}": 1} if rows <= 8 else {})
    assert apart.swiglu.used == ({f"dual{rows}": 1} if rows <= 3 else {})


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize("arm", ["single", "k2", "k3", "prefill", "batched"])
def test_dense_bf16_matches_float64_and_has_no_km(make_context: Make, exact: Any, rows: int, arm: Any) -> None:
    ffn = dense(make_context(), "bf16")
    x = exact.rows(rows, 64)
    exact.assert_close(ffn.forward(x, "decode", arm), *reference(ffn, exact, x))
    assert "km" not in ffn.arms
    assert not any(ffn.can_forward_km(n) for n in range(20))


def test_dense_bf16_follows_the_edge_of_its_projections(make_context: Make) -> None:
    def arms(phase: Any, **levers: object) -> list[str]:
        ffn = dense(make_context(**levers), "bf16")
        return [ffn.arm(rows, phase) for rows in (3, 4, 9, 16, 17)]

    assert arms("decode") == arms("verify") == ["k3", *["batched"] * 3, "prefill"]
    assert arms("decode", BF16_GEMM_FROM=9) == ["k3", "batched", *["prefill"] * 3]
    assert arms("decode", without=("gemv::dense_gemv_bf16_batchm",)) == arms("prefill") == ["k3", *["prefill"] * 4]


def test_dense_km_is_known_before_and_gone_with_its_tier(make_context: Make) -> None:
    assert [n for n in range(20) if dense(make_context()).can_forward_km(n)] == [4, 5, 6, 7, 8]
    tiers = tuple(f"w4a16_gemv::w4a16_gemv_batch{n}" for n in (7, 8, 16))
    ffn = dense(make_context(without=tiers))
    assert [n for n in range(20) if ffn.can_forward_km(n)] == [4, 5, 6]
    assert (ffn.arm(6, "decode"), ffn.arm(7, "decode")) == ("km", "prefill")


def test_dense_rows_without_the_widest_tier_or_below_a_gemm_edge_take_one_gemm(make_context: Make) -> None:
    ffn = dense(make_context(without=("w4a16_gemv::w4a16_gemv_batch16",)))
    assert {ffn.arm(rows, "verify") for rows in range(9, 17)} == {"prefill"}
    ffn = dense(make_context(W4A16_ARM="tile"))
    assert {ffn.arm(rows, "verify") for rows in range(9, 17)} == {"prefill"}


def test_dense_lever_forces_its_arm_at_every_row_count(make_context: Make) -> None:
    ffn = dense(make_context(FFN_ARM="token_major"))
    assert {ffn.arm(rows, "decode") for rows in range(1, 40)} == {"batched"}


@pytest.mark.parametrize(("arm", "quant"), [("grouped", "nvfp4"), ("km", "bf16")])
def test_dense_lever_for_an_arm_it_lacks_is_a_failed_request(make_context: Make, arm: str, quant: str) -> None:
    ctx = make_context(FFN_ARM=arm)
    ffn = dense(ctx, quant)
    (request,) = ctx.kernels._session.requests
    assert (request.lever, request.layer) == ("MUSTER_FFN_ARM", "layers.0.test")
    assert f"no arm {arm}" in request.why
    assert ffn.arm(1, "decode") == "single"


def test_dense_answers_no_to_questions_about_experts(make_context: Make, exact: Any) -> None:
    ffn = dense(make_context())
    assert (ffn.is_dense, ffn.is_none, ffn.fp32_routing_active, ffn.moe_grouped_decode_ok(64)) == (True, *[False] * 3)
    with pytest.raises(UsageError, match="no arm 'grouped'"):
        ffn.forward(exact.rows(4, 64), "decode", "grouped")
    assert ffn.forward(exact.rows(0, 64), "decode").shape == (0, 64)


def test_none_returns_its_input_and_answers_no(exact: Any) -> None:
    ffn, x = NoneFfn(), exact.rows(3, 64)
    assert ffn.forward(x, "decode") is x
    answers = (ffn.is_none, ffn.is_dense, ffn.fp32_routing_active, ffn.moe_grouped_decode_ok(64), ffn.can_forward_km(4))
    assert answers == (True, False, False, False, False)


def test_dense_scratch_above_the_planned_rows_raises(make_context: Make, exact: Any) -> None:
    ffn = dense(make_context(max_rows=8))
    with pytest.raises(Exception, match=r"ffn\.act: swiglu needs \d+ bytes"):
        ffn.forward(exact.rows(9, 64), "prefill")


def test_dense_planned_without_weights_cannot_compute(make_context: Make, exact: Any) -> None:
    with pytest.raises(UsageError, match=r"gate_proj: the model was planned without weights"):
        dense(make_context(None)).forward(exact.rows(1, 64), "decode")


def test_dense_activation_is_a_parameter_and_an_unknown_one_is_refused(make_context: Make) -> None:
    assert DenseFfn(make_context(), 64, 96, "nvfp4", "silu").arms == dense(make_context()).arms
    with pytest.raises(UsageError, match="activation 'gelu': expected silu"):
        DenseFfn(make_context(), 64, 96, "bf16", "gelu")
