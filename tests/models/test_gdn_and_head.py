from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_muster.models.dims import GdnDims, ModelDims
from kernel_muster.models.heads.embedding import Embedding
from kernel_muster.models.heads.lm_head import LmHead
from kernel_muster.models.layers.context import LayerContext
from kernel_muster.models.layers.gdn import Gdn
from kernel_muster.models.memory.batch import Batch
from kernel_muster.models.memory.state import Recurrent
from kernel_muster.models.policy.gdn import CHUNKED_PREFILL_ROWS
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.source import SyntheticWeights, WeightSpec
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.errors import ContractError, UsageError
from kernel_muster.registry.hardware.target import CPU_TARGET
from kernel_muster.registry.launch.tape import Tape
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

Make = Callable[..., LayerContext]
ROWS = [*range(1, 21), 33]
H, GDN = 48, GdnDims(key_heads=2, key_dim=8, value_heads=4, value_dim=16, conv_width=4)


def gdn(ctx: LayerContext, quant: Any = "nvfp4", dims: GdnDims = GDN) -> Gdn:
    return Gdn(ctx, ModelDims("tiny", H, 32, ("gdn",), "none", quant, 1e-6, 1.0, None, dims, 0, None, 0), dims)


def parts(rows: Any) -> tuple[Any, Any]:
    """Take the grouped rows apart, one key head and one part at a time."""
    q, k, v, z = [], [], [], []
    for head in np.split(rows, GDN.key_heads, axis=1):
        pieces = np.split(head, [8, 16, 48], axis=1)
        for into, piece in zip((q, k, v, z), pieces, strict=True):
            into.append(piece)
    return np.concatenate([*q, *k, *v], axis=1), np.concatenate(z, axis=1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
def test_gdn_projections_match_float64(make_context: Make, exact: Any, rows: int, quant: str) -> None:
    layer = gdn(make_context(), quant)
    x = exact.rows(rows, H)
    found = layer.project(x, "decode")
    value, bound = (parts(a) for a in exact.project(x, exact.weight(layer.qkvz)))
    exact.assert_close(found.qkv, value[0], bound[0])
    exact.assert_close(found.z, value[1], bound[1])
    exact.assert_close(found.ba, *exact.project(x, exact.weight(layer.ba)))


def test_gdn_rows_are_bit_identical_to_the_fused_launch_of_one(make_context: Make, exact: Any) -> None:
    layer = gdn(make_context())
    x = exact.rows(5, H)
    many, ones = layer.project(x, "decode"), [layer.project(x[m : m + 1], "decode") for m in range(5)]
    for name in ("qkv", "z", "ba"):
        assert getattr(many, name).tobytes() == np.concatenate([getattr(one, name) for one in ones]).tobytes()
    assert layer.qkvz.used == {"gemv5": 1}
    assert layer.used == {"qkvz": 5}


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_gdn_output_matches_float64(make_context: Make, exact: Any, rows: int) -> None:
    layer = gdn(make_context())
    mixed, z = exact.rows(rows, GDN.z_dim), exact.rows(rows, GDN.z_dim, 1)
    weight = SyntheticWeights(3).find(WeightSpec("layers.0.test.norm", (16,), "array")).astype(np.float64)
    heads, gate = (a.astype(np.float64).reshape(rows, 4, 16) for a in (mixed, z))
    normed = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 1e-6) * weight * gate / (1 + np.exp(-gate))
    normed = normed.reshape(rows, -1)
    expected = exact.project(normed, exact.weight(layer.out), 2.0**-8 * np.abs(normed) + 1e-6)
    exact.assert_close(layer.output(mixed, z, "decode"), *expected)


class Watched:
    """A second stream: it notes at its end whether the convolution's state and the rule's have moved on by then."""

    stream = None

    def __init__(self, states: Recurrent) -> None:
        self._states, self._before = states, self._bytes(states)
        self.moved: list[tuple[bool, ...]] = []

    @staticmethod
    def _bytes(states: Recurrent) -> tuple[bytes, bytes]:
        return states.conv.tobytes(), states.ssm.tobytes()

    def fork(self, stream: object | None) -> None:
        self._before = self._bytes(self._states)

    def join(self, stream: object | None) -> None:
        self.moved.append(tuple(now != old for now, old in zip(self._bytes(self._states), self._before, strict=True)))


@pytest.mark.parametrize("phase", ["decode", "prefill", "verify"])
def test_gates_are_joined_behind_the_convolution_and_before_the_rule(
    make_context: Make, exact: Any, phase: Any
) -> None:
    layer, states = gdn(make_context(without=("w4a16_gemv::w4a16_gemv_gdn_in",))), Recurrent(GDN, 2)
    index = np.arange(2, dtype=np.int32)
    batch = Batch(phase, index, index, np.arange(3, dtype=np.int32), index, index[:, None], index + 1, index)
    watched = Watched(states)
    with Tape(side_stream=watched) as tape:
        layer.forward(exact.rows(2, H), batch, states)
    tape()
    assert watched.moved == [(True, False)]


def decode_of(*slots: int) -> Batch:
    """Return a decode step of sequences with these slots."""
    count = len(slots)
    zero, starts = np.zeros(count, np.int32), np.arange(count + 1, dtype=np.int32)
    return Batch("decode", zero, zero, starts, zero, zero[:, None], zero + 1, np.array(slots, np.int32))


@pytest.mark.parametrize("taps", [4, 3])
def test_gdn_decode_of_one_row_in_one_launch_has_the_bits_of_four(make_context: Make, exact: Any, taps: int) -> None:
    dims = replace(GDN, conv_width=taps)
    without = ("w4a16_gemv::w4a16_gemv_gdn_in",)
    fused, apart = (gdn(make_context(without=names), dims=dims) for names in ((), without))
    pools = [Recurrent(dims, 3) for _ in (fused, apart)]
    for step in range(6):
        x, slot = exact.rows(1, H, step), step % 2
        layers = zip((fused, apart), pools, strict=True)
        one, other = (layer.forward(x, decode_of(slot), pool).tobytes() for layer, pool in layers)
        assert one == other
    assert pools[0].conv.tobytes() == pools[1].conv.tobytes()
    assert pools[0].ssm.tobytes() == pools[1].ssm.tobytes()
    assert fused.used == ({"gdn_in": 6} if taps == 4 else {"qkvz": 6})
    assert apart.used == {"qkvz": 6}


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_gdn_decode_of_rows_in_one_launch_has_the_bits_of_parts(make_context: Make, exact: Any, rows: int) -> None:
    without = ("w4a16_gemv::w4a16_gemv_gdn_in",)
    fused, apart = (gdn(make_context(without=names)) for names in ((), without))
    pools = [Recurrent(GDN, rows + 1) for _ in (fused, apart)]
    for step in range(5):
        x, slots = exact.rows(rows, H, step), [(step + row) % (rows + 1) for row in range(rows - 1)]
        layers = zip((fused, apart), pools, strict=True)
        one, other = (layer.forward(x, decode_of(*slots, -1), pool).tobytes() for layer, pool in layers)
        assert one == other
    assert pools[0].conv.tobytes() == pools[1].conv.tobytes()
    assert pools[0].ssm.tobytes() == pools[1].ssm.tobytes()
    assert (fused.used, apart.used) == ({"gdn_in": 5}, {})


@pytest.mark.parametrize(("phase", "rows"), [("verify", 1), ("prefill", 1), ("decode", 9)])
def test_gdn_in_one_launch_is_for_a_decode_step_of_few_sequences(
    make_context: Make, exact: Any, phase: Any, rows: int
) -> None:
    layer, pool = gdn(make_context()), Recurrent(GDN, 9)
    found = layer.project(exact.rows(rows, H), phase, pool, np.arange(rows, dtype=np.int32))
    assert found.convolved is None
    assert "gdn_in" not in layer.used
    assert not pool.conv.any()


def test_gdn_in_one_launch_reads_beta_and_alpha_as_they_are_whatever_their_gemv_reads(
    make_context: Make, catalog: Catalog, exact: Any
) -> None:
    def tiled(row: Registered) -> Registered:
        spec = replace(row.spec, weight_layout="tiles", prepare=lambda weight: replace(weight, layout="tiles"))
        return replace(row, spec=spec) if row.spec.key == "gemv::dense_gemv_bf16" else row

    plain = make_context()
    session = LookupSession(replace(catalog, kernels=tuple(map(tiled, catalog.kernels))), CPU_TARGET, plain.levers)
    planner = WeightPlanner(session.layouts, plain.planner.source)
    layers = gdn(replace(plain, kernels=Lookups(session).for_layer(plain.label), planner=planner)), gdn(make_context())
    x, pools = exact.rows(1, H), [Recurrent(GDN, 1) for _ in layers]
    one, other = (layer.forward(x, decode_of(0), pool) for layer, pool in zip(layers, pools, strict=True))
    assert one.tobytes() == other.tobytes()
    assert [layer.used for layer in layers] == [{"gdn_in": 1}] * 2
    copies = {copy.layout: copy for copy in session.layouts.copies if copy.weight.endswith("ba_proj")}
    assert set(map(str, copies["tiles"].readers)) == {"gemv::dense_gemv_bf16"}
    assert "w4a16_gemv::w4a16_gemv_gdn_in" in set(map(str, copies["bf16_row_major"].readers))
    assert session.layouts.missing == ()


CHUNKED = "gated_delta_rule::gated_delta_rule_prefill_chunked"
MANY = CHUNKED_PREFILL_ROWS.value + 1


@pytest.mark.parametrize(("key_dim", "rows", "more", "arm"), [
    (128, MANY, {}, "prefill_chunked"), (128, MANY - 1, {}, "prefill"), (8, MANY, {}, "prefill"),
    (128, MANY, {"NO_CHUNKED_PREFILL": True}, "prefill"), (128, MANY, {"without": (CHUNKED,)}, "prefill"),
])  # fmt: skip
def test_prompts_go_in_chunks_where_there_are_any_and_else_row_by_row(
    make_context: Make, exact: Any, key_dim: int, rows: int, more: dict[str, Any], arm: str
) -> None:
    dims = replace(GDN, key_heads=1, key_dim=key_dim, value_heads=2, value_dim=32)
    layer, states = gdn(make_context(max_rows=rows, **more), "bf16", dims), Recurrent(dims, 2)
    at, none = np.arange(rows, dtype=np.int32), np.zeros(1, np.int32)
    ends = np.array([0, rows], np.int32)
    mixed = layer.forward(exact.rows(rows, H), Batch("prefill", at, at, ends, at, none[None], ends[1:], none), states)
    assert layer.rule.used == {arm: 1}
    assert np.isfinite(mixed.astype(np.float32)).all()
    assert states.ssm[0].any()
    assert not states.ssm[1].any()


@pytest.mark.parametrize("rows", [*ROWS, 40])
@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
def test_lm_head_matches_float64_in_chunks_or_by_one_gemm(
    make_context: Make, exact: Any, rows: int, quant: str
) -> None:
    head = LmHead(make_context(), 50, H, quant)
    x = exact.rows(rows, H)
    logits = head.forward(x)
    exact.assert_close(logits, *exact.project(x, exact.weight(head.linear)))
    assert head.greedy(logits).tolist() == np.argmax(logits.astype(np.float64), axis=1).tolist()
    if rows == 40:
        assert head.linear.used == ({"gemv16": 2, "gemv8": 1} if quant == "nvfp4" else {"gemm": 1})


def test_lm_head_without_batch_tiers_goes_row_by_row(make_context: Make, exact: Any) -> None:
    missing = tuple(f"w4a16_gemv::w4a16_gemv_batch{n}" for n in (2, 3, 4, 5, 6, 7, 8, 16))
    head = LmHead(make_context(without=missing), 50, H, "nvfp4")
    x = exact.rows(4, H)
    exact.assert_close(head.forward(x), *exact.project(x, exact.weight(head.linear)))
    assert head.linear.used == {"gemv1": 4}


def test_lm_head_bf16_without_batchm_takes_the_gemm(make_context: Make, exact: Any) -> None:
    head = LmHead(make_context(without=("gemv::dense_gemv_bf16_batchm",)), 50, H, "bf16")
    x = exact.rows(4, H)
    exact.assert_close(head.forward(x), *exact.project(x, exact.weight(head.linear)))
    assert head.linear.used == {"gemm": 1}


def test_embedding_gathers_rows_and_refuses_foreign_ids(make_context: Make) -> None:
    embedding = Embedding(make_context(), 32, H)
    ids = np.array([31, 0, 7], np.int32)
    assert embedding.forward(ids).tobytes() == embedding.table[ids].tobytes()
    with pytest.raises(ContractError, match="32"):
        embedding.forward(np.array([32], np.int32))
    with pytest.raises(UsageError, match="planned without weights"):
        Embedding(make_context(None), 32, H).forward(ids)
