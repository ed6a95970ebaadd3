"""Decisions of launchers before a launch: layouts, splits, and unsupported sizes."""

import numpy as np
import pytest
from kernel_muster.plugins import gated_delta_rule, moe, paged_decode, prefill_paged, rope
from kernel_muster.plugins._cuda.nvfp4_layout import LAYOUT, to_mma_layout
from kernel_muster.plugins.gated_delta_rule import launch as delta_launch
from kernel_muster.plugins.moe.combine import launch as combine_launch
from kernel_muster.plugins.moe.experts import splits
from kernel_muster.plugins.moe.grouped import launch as grouped_launch
from kernel_muster.plugins.moe.pairwise import fused_launch
from kernel_muster.plugins.nvfp4_gemv import launch as gemv_launch
from kernel_muster.plugins.paged_decode import launch as paged_launch
from kernel_muster.plugins.prefill_paged import launch as prefill_launch
from kernel_muster.plugins.rope import launch as rope_launch
from kernel_muster.registry.contract.contracts import Case, random_weight
from kernel_muster.registry.contract.nvfp4 import transpose
from kernel_muster.registry.contract.signature import ScalarParam, WeightParam
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.launch.workspace import Counters, Scratch

CONTRACTS = {
    c.name: c
    for family in (paged_decode, prefill_paged, gated_delta_rule, moe, rope)
    for c in family.muster_contracts()
}


def bound(contract, dims, **changes):
    """Bind the arguments of a case, some of them replaced."""
    contract = CONTRACTS[contract]
    ones = {p.name: 1 for p in contract.signature.params if isinstance(p, ScalarParam) and p.name not in dims}
    arguments = contract.arguments(Case("here", dims, ones), np.random.default_rng(3))
    arguments = {name: value for name, value in arguments.items() if name in contract.signature.names}
    return contract.signature.bind("test", (), {**arguments, **changes})


def attention(**sizes):
    dims = {"S": 2, "Hq": 8, "Hk": 2, "D": 128, "P": 4, "B": 8, "L": 2, "longest": 9, **sizes}
    return bound("paged_decode_attn", dims)


def experts(count=3, rows=21, columns=272):
    dims = {"E": count, "N": rows, "K": columns}
    return random_weight(WeightParam("w", "nvfp4", ("E", "N", "K")), dims, np.random.default_rng(5))


# Weights of experts


def test_layout_of_experts_is_each_expert_laid_out_alone_with_its_scale():
    weight = experts()
    laid_out = to_mma_layout(weight)
    alone = [to_mma_layout(weight[expert]) for expert in range(3)]
    assert laid_out.data.tobytes() == b"".join(one.data.tobytes() for one in alone)
    assert laid_out.global_scale_decode.dtype == np.float32
    assert laid_out.global_scale_decode.tolist() == [one.global_scale_decode for one in alone]
    assert (laid_out.shape, laid_out.layout, laid_out.quant) == ((3, 21, 272), LAYOUT, "nvfp4")


def test_layout_of_experts_is_the_same_from_the_transposed_copy():
    weight = experts()
    assert to_mma_layout(transpose(weight)).data.tobytes() == to_mma_layout(weight).data.tobytes()


def test_layout_of_experts_with_a_negative_scale_is_refused():
    weight = experts()
    weight.block_scale[2, 20, 16] = 0xB8
    with pytest.raises(ContractError, match="a block scale is NaN or negative"):
        to_mma_layout(weight)


# Splits


@pytest.mark.parametrize(
    ("form", "depth", "split", "teams"),
    [
        ("down", 16, "to_512", 4), ("down", 512, "k512", 4), ("down", 528, "to_1024", 2), ("down", 1040, "any", 1),
        ("down", 2048, "any", 1), ("gate_up", 2048, "k2048", 1), ("gate_up", 512, "any", 1),
        ("gate_up", 7168, "any", 1),
    ],
)  # fmt: skip
def test_split_of_experts_depends_on_depth(form, depth, split, teams):
    found = splits.split_of(form, depth)
    assert (found.name, found.teams(4)) == (split, teams)


def test_few_rows_come_back_in_small_blocks():
    def dims(tokens):
        return {"M": tokens, "E": 16, "T": 8, "H": 2048, "I": 16, "top_k": 8}

    contract = "moe_unpermute_reduce_indexed"
    plans = [combine_launch.UNPERMUTE.plan(bound(contract, dims(m)), {})[0] for m in (8, 9)]
    assert [(plan.grid, plan.block) for plan in plans] == [((8, 4, 1), (64, 1, 1)), ((9, 1, 1), (256, 1, 1))]


@pytest.mark.parametrize(
    ("features", "depth", "is_dual", "order"),
    [
        (1024, 2048, True, (8, 1)), (2048, 512, False, (8, 1)), (1056, 2048, True, (4, 1)), (64, 2048, False, (8, 1)),
        (1040, 2048, False, (4, 1)), (64, 4096, False, (8, 1)), (96, 5120, True, (20, 2)), (1056, 5120, True, (4, 1)),
        (64, 6144, False, (8, 2)), (64, 6144, True, (8, 1)), (64, 17408, False, (8, 2)), (48, 80, True, (8, 1)),
    ],
)  # fmt: skip
def test_shared_expert_is_summed_in_the_order_of_its_gemv(features, depth, is_dual, order):
    assert fused_launch.gemv_order(features, depth, is_dual) == order


def test_every_split_of_the_gemv_has_an_order():
    splits = {gemv_launch.split_of(n, k) for n in (16, 4096) for k in (256, 2048, 4096, 5120, 6144, 17408)}
    assert splits == set(fused_launch._ORDERS)


@pytest.mark.parametrize(
    ("tokens", "repeats", "shared", "blocks"),
    [(1, 1, 32, 8 * 32), (2, 2, 8, 16 * 16), (3, 3, 32, 24 * 11), (4, 4, 8, 32 * 8)],
)
def test_step_of_experts_has_few_blocks_of_the_shared_one_beside_the_chosen(tokens, repeats, shared, blocks):
    dims = {"M": tokens, "E": 256, "T": 8, "H": 2048, "I": 512, "J": 512}
    shares = fused_launch.schedule_of(dims, 132)
    assert (shares.repeats, shares.shared_blocks, shares.grid) == (repeats, shared, (shared + blocks, 1, 1))
    assert fused_launch.schedule_of({**dims, "J": 16}, 132).shared_blocks == 1


def test_few_slots_share_tiles_out_among_the_blocks_that_fit():
    def grid(slots):
        return grouped_launch.schedule_of("gate_up", 512, 2048, 256, slots, 132).grid

    assert grid(8) == (8 * 32, 1, 1)  # no more blocks than tiles
    assert grid(64) == grid(1024) == (2 * 132, 1, 1)


def test_many_slots_have_blocks_for_every_expert():
    shares = grouped_launch.schedule_of("down", 2048, 512, 256, 1025, 132)
    assert (shares.repeats, shares.grid) == (4, (128 // 4 // 4, 256, 1))
    with pytest.raises(ContractError, match="70000 experts may have rows, expected at most 65535"):
        grouped_launch.schedule_of("down", 2048, 512, 70000, 70000, 132)


def test_atomic_down_clears_and_rounds_sums_that_its_launches_share(monkeypatch):
    monkeypatch.setattr(grouped_launch, "multiprocessors_of", lambda device: 132)
    dims = {"M": 3, "E": 4, "T": 2, "top_k": 2, "S": 6, "H": 48, "I": 16}
    contract = "moe_w4a16_grouped_down_atomic_c4"
    weight = to_mma_layout(bound(contract, dims).arguments["w_down"])
    plans = grouped_launch.GROUPED_DOWN_ATOMIC.plan(bound(contract, dims, w_down=weight), {})
    assert [plan.entry for plan in plans] == ["clear_sums", "grouped_down_atomic_to_512", "round_sums"]
    assert all(Scratch(4 * 3 * 48, "sums") in plan.arguments for plan in plans)
    assert plans[1].grid == (3, 1, 1)  # three tiles of four experts, four teams a block


# Attention


def test_attention_of_few_rows_has_a_block_for_every_split_and_blocks_that_combine_them():
    (plan,) = paged_launch.ROWS.plan(attention(Hq=24, L=100, P=200), {})
    assert (plan.entry, plan.grid) == (
        "paged_decode_split_kv_d128",
        (2, 2 * 2, 13 + 4),
    )  # 800 tokens; 8 columns 2 warps


def test_attention_over_one_split_is_the_work_of_one_block():
    (plan,) = paged_launch.ROWS.plan(attention(Hq=24), {})
    assert (plan.entry, plan.grid) == ("paged_decode_d128", (2, 2 * 2, 1))


@pytest.mark.parametrize(
    ("heads", "longest", "is_split_kv", "blocks"),
    [
        (2, 64, False, 1), (2, 65, True, 2), (2, 4096, True, 64), (2, 1 << 20, True, 64), (4, 4096, True, 64),
        (5, 4096, False, 8), (32, 1 << 20, False, 8), (128, 1 << 20, False, 5), (528, 1 << 20, False, 1),
        (600, 1 << 20, False, 1), (32, 512, True, 8), (33, 512, False, 1), (256, 100, False, 1), (2, 0, False, 1),
        (4, 128, True, 2), (5, 128, False, 1), (10, 192, True, 3), (11, 192, False, 1), (32, 256, True, 4),
        (33, 256, False, 1),
    ],
)  # fmt: skip
def test_attention_of_few_rows_shares_contexts_among_blocks(heads, longest, is_split_kv, blocks):
    assert paged_launch.split_plan(heads, longest, 64) == paged_launch.SplitPlan(is_split_kv, blocks)


@pytest.mark.parametrize(("heads_per_row", "most"), [(1, 64), (2, 64), (4, 32), (64, 2), (1000, 1)])
def test_attention_splits_a_context_by_the_heads_alone(heads_per_row, most):
    assert paged_launch.max_splits(heads_per_row) == most


def test_rows_of_prompts_are_launched_like_those_of_decode():
    prompt = bound(
        "prefill_paged_attn", {"M": 3, "S": 2, "before": 3, "Hq": 24, "Hk": 2, "D": 128, "P": 200, "B": 8, "L": 100}
    )
    (plan,) = paged_launch.ROWS.plan(prompt, {})
    assert (plan.entry, plan.grid) == ("paged_decode_split_kv_d128", (3, 2 * 2, 13 + 4))
    (decode,) = paged_launch.ROWS.plan(attention(Hq=24, L=100, P=200), {})
    assert plan.arguments[4] is prompt.views["cu_rows"]
    assert (decode.arguments[4], len(decode.arguments)) == (0, len(plan.arguments))


def test_attention_of_few_rows_has_partials_for_every_split():
    (plan,) = paged_launch.ROWS.plan(attention(Hq=24, L=1125, P=1125, longest=9000), {})
    (partials,) = (value for value in plan.arguments if isinstance(value, Counters))
    heads, splits = 2 * 2 * 2, 32
    assert plan.grid == (2, 2 * 2, splits + 8)  # 8 columns four warps
    columns = 4 * (8 * 128 + 128 // 8 * 2 * 8)  # FP32 of 8 heads, and statistics with 8 columns
    assert partials.size_bytes == heads * splits * columns


@pytest.mark.parametrize(("head_dim", "splits", "blocks"), [
    (256, 2, 4), (256, 8, 4), (256, 9, 8), (256, 16, 8), (256, 17, 16), (256, 32, 16), (256, 33, 32), (256, 64, 32),
    (128, 8, 2), (128, 64, 16), (64, 2, 2), (64, 16, 2), (64, 17, 4), (64, 64, 8),
])  # fmt: skip
def test_attention_has_a_warp_for_every_eight_or_sixteen_splits_of_eight_columns(head_dim, splits, blocks):
    assert paged_launch.combining_blocks(head_dim, splits) == blocks


def test_attention_of_many_rows_has_scratch_for_every_group_and_counts_them():
    (plan,) = paged_launch.ROWS.plan(attention(S=20, L=125, P=125, longest=900), {})
    (partials,) = (value for value in plan.arguments if isinstance(value, Scratch))
    (counts,) = (value for value in plan.arguments if isinstance(value, Counters))
    heads, groups = 20 * 2, 64 // 8
    assert (plan.entry, plan.grid) == ("paged_decode_d128", (20, 2, 2))  # 16 splits
    assert partials.size_bytes == heads * groups * 4 * 8 * (128 + 2)
    assert counts.size_bytes == 4 * heads


def test_attention_over_a_cache_whose_vectors_have_no_32_bit_number_is_refused(monkeypatch):
    monkeypatch.setattr(paged_launch, "_MAX_VECTORS", 4 * 8 * 2 * 128 // 8 - 1)
    with pytest.raises(ContractError, match="attention: the cache has 1024 x 16 bytes, expected at most 1023"):
        paged_launch.ROWS.plan(attention(), {})


@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 24, 1000, 2**30 + 1, 2**31 - 1])
def test_tokens_are_divided_by_the_page_size_exactly(page_size):
    factor, shift = paged_launch.division_by(page_size)
    assert factor < 2**32
    for quotient in (0, 1, 5, (2**31 - 1) // page_size):
        for token in (quotient * page_size - 1, quotient * page_size, quotient * page_size + page_size - 1):
            if 0 <= token < 2**31:
                assert token * factor >> shift == token // page_size


def test_attention_with_an_uncommon_head_size_takes_the_kernel_for_any():
    (plan,) = paged_launch.ROWS.plan(attention(D=96), {})
    assert (plan.entry, plan.grid, plan.arguments[-1]) == ("paged_decode_any", (16, 1, 1), 96)


def test_attention_with_a_head_size_that_no_kernel_takes_is_refused():
    with pytest.raises(ContractError, match="attention: head_dim is 1025, expected at most 1024"):
        paged_launch.ROWS.plan(attention(D=1025, P=1, B=1, L=1, longest=1), {})


def prompts(**sizes):
    dims = {"M": 21, "S": 2, "before": 3, "Hq": 12, "Hk": 2, "D": 256, "P": 4, "B": 16, "L": 2, **sizes}
    return bound("prefill_paged_attn_mma", dims)


@pytest.mark.parametrize(("sizes", "blocks"), [
    ({}, (21 * 6 // 64 + 2) * 2), ({"M": 1, "S": 1}, 2), ({"M": 0}, 0), ({"M": 0, "S": 0}, 0),
])  # fmt: skip
def test_prompts_have_blocks_for_any_division_of_their_rows(sizes, blocks):
    for kernel, name in ((prefill_launch.PREFILL_MMA, "mma"), (prefill_launch.PREFILL_HOPPER, "hopper")):
        (plan,) = kernel.plan(prompts(**sizes), {})
        assert (plan.entry, plan.grid) == (f"prefill_{name}_d256", (blocks, 1, 1))


@pytest.mark.parametrize(("tiles", "longest", "wave_blocks", "splits", "max_whole"), [
    (16, 8192, 264, 16, 5), (18, 8192, 264, 14, 5), (64, 8192, 264, 4, 9), (128, 4096, 264, 2, 14),
    (88, 8192, 264, 3, 10), (89, 8192, 264, 5, 14), (105, 8192, 264, 5, 14), (106, 8192, 264, 2, 14),
    (96, 64 * 64, 264, 2, 14), (96, 64 * 64 + 1, 264, 5, 14),
    (133, 8192, 264, 3, 64), (176, 8192, 264, 3, 64), (177, 8192, 264, 1, 64), (265, 8192, 264, 1, 64),
    (2, 100_000, 264, 32, 4), (2, 1024, 264, 8, 4), (2, 257, 264, 3, 4), (2, 256, 264, 1, 4),
    (128, 14 * 64, 264, 1, 14), (133, 64 * 64, 264, 1, 64), (2, 0, 264, 1, 4), (0, 8192, 264, 1, 4),
])  # fmt: skip
def test_contexts_have_as_many_splits_as_keep_a_device_busy(tiles, longest, wave_blocks, splits, max_whole):
    kv = prefill_launch.kv_splits(tiles, longest, wave_blocks)
    assert (kv.splits, kv.max_whole) == (splits, max_whole)


def test_prompts_behind_many_tokens_are_shared_out_and_put_together():
    sizes = {"M": 64, "S": 1, "Hq": 16, "L": 512, "P": 512, "before": 8128}
    for kernel, name in ((prefill_launch.PREFILL_MMA, "mma"), (prefill_launch.PREFILL_HOPPER, "hopper")):
        attend, combine = kernel.plan(prompts(**sizes), {})
        form = f"{name}_split_kv" if name == "hopper" else name
        assert (attend.entry, attend.grid) == (f"prefill_{form}_d256", (16, 16, 1))
        assert (combine.entry, combine.grid) == (f"prefill_{name}_combine", (16, 256 // 32, 1))
        (partials,) = {part for plan in (attend, combine) for part in plan.arguments if isinstance(part, Scratch)}
        assert partials.size_bytes == 16 * 16 * 64 * (256 + 2) * 4


def test_splits_of_prompts_are_no_more_blocks_than_run_in_two_waves():
    blocks = [tiles * prefill_launch.kv_splits(tiles, 2**20, 264).splits for tiles in range(1, 265)]
    assert max(blocks) == 2 * 264


def test_prompts_with_a_head_size_without_tiles_are_refused():
    with pytest.raises(ContractError, match="prefill_mma: head_dim is 64, expected 128 or 256"):
        prefill_launch.PREFILL_MMA.plan(prompts(D=64), {})


def fresh(**sizes):
    dims = {"S": 2, "Hq": 8, "Hk": 2, "D": 128, "P": 4, "B": 8, "L": 2, "longest": 9, "rotary_dim": 64, **sizes}
    return bound("paged_decode_attn_fresh", dims)


def test_attention_from_projections_is_shared_out_like_attention():
    (plan,) = paged_launch.DECODE_FRESH.plan(fresh(Hq=24, L=100, P=200), {})
    assert (plan.entry, plan.grid) == ("paged_decode_fresh_split_kv_d128", (2, 2 * 2, 13 + 4))
    (plan,) = paged_launch.DECODE_FRESH.plan(fresh(Hq=24), {})
    assert (plan.entry, plan.grid) == ("paged_decode_fresh_d128", (2, 2 * 2, 1))


def test_attention_from_projections_with_an_uncommon_head_size_is_refused():
    with pytest.raises(ContractError, match=r"paged_decode_fresh: head_dim is 96, expected one of \(64, 128, 256\)"):
        paged_launch.DECODE_FRESH.plan(fresh(D=96), {})
    with pytest.raises(ContractError, match="Hk"):
        fresh(Hq=0)


def test_attention_of_no_rows_launches_nothing():
    assert paged_launch.DECODE_FRESH.plan(fresh(S=0), {}) == ()
    assert paged_launch.ROWS.plan(attention(S=0), {}) == ()


@pytest.mark.parametrize(("rows", "heads", "width", "entry", "blocks"), [
    (1, (16, 2), 256, "small_d", 5), (3, (24, 4), 256, "small_d", 7), (2, (5, 3), 33, "w1", 2),
    (2, (5, 3), 264, "w8", 2), (0, (4, 2), 64, "", 0),
])  # fmt: skip
def test_norm_turn_append_has_a_warp_for_every_head(rows, heads, width, entry, blocks):
    dims = {"M": rows, "Hq": heads[0], "Hk": heads[1], "D": width, "rotary_dim": 16, "P": 9, "B": 4}
    plans = rope_launch.QK_NORM_ROPE_APPEND.plan(bound("qk_norm_rope_append", dims), {})
    expected = [(f"qk_norm_rope_append_{entry}", (rows, blocks, 1), (5 * 32, 1, 1))] if rows else []
    assert [(plan.entry, plan.grid, plan.block) for plan in plans] == expected


def test_norm_turn_append_of_pairs_that_no_vector_holds_goes_value_by_value():
    dims = {"M": 1, "Hq": 2, "Hk": 1, "D": 48, "rotary_dim": 22, "P": 9, "B": 4}
    (plan,) = rope_launch.QK_NORM_ROPE_APPEND.plan(bound("qk_norm_rope_append", dims), {})
    assert plan.entry == "qk_norm_rope_append_w8"


# The delta rule


@pytest.mark.parametrize("form", ["decode", "decode_strided", "decode_norm_strided"])
def test_delta_rule_without_sequences_launches_nothing(form):
    dims = {"S": 0, "R": 2, "key_heads": 1, "key_dim": 128, "value_heads": 2, "value_dim": 128}
    backend = delta_launch.DECODE_NORM if "norm" in form else delta_launch.DELTA_RULE
    assert backend.plan(bound(f"gated_delta_rule_{form}", dims), {}) == ()


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "size"), [(128, 96, "decode_128"), (128, 40, "any"), (64, 128, "any")]
)
def test_delta_rule_of_uncommon_sizes_takes_the_kernel_for_any(key_dim, value_dim, size):
    dims = {"S": 1, "R": 2, "key_heads": 1, "key_dim": key_dim, "value_heads": 2, "value_dim": value_dim}
    (plan,) = delta_launch.DELTA_RULE.plan(bound("gated_delta_rule_decode", dims), {})
    assert plan.entry == f"delta_rule_{size}"


@pytest.mark.parametrize("form", ["prefill", "verify_n", "chunk2"])
def test_delta_rule_of_several_rows_takes_the_kernel_that_looks_ahead(form):
    dims = {"M": 2, "S": 1, "R": 2, "key_heads": 1, "key_dim": 128, "value_heads": 2, "value_dim": 128}
    if form == "chunk2":
        del dims["S"]
    (plan,) = delta_launch.DELTA_RULE.plan(bound(f"gated_delta_rule_{form}", dims), {})
    assert plan.entry == "delta_rule_rows_128"


def chunked_plans(rows, sequences, heads, key_dim=128, value_dim=64):
    sizes = {"key_heads": 1, "key_dim": key_dim, "value_heads": heads, "value_dim": value_dim}
    dims = {"M": rows, "S": sequences, "R": sequences, **sizes}
    return delta_launch.CHUNKED.plan(bound("gated_delta_rule_prefill_chunked", dims), {})


@pytest.mark.parametrize(("rows", "sequences", "heads", "blocks"), [
    (1, 1, 2, [2, 4]), (64, 1, 2, [4, 4]), (200, 3, 1, [6, 6]), (0, 2, 2, []), (5, 0, 1, []),
    (64 * 64, 1, 1, [64, 2, 1, 2]),
])  # fmt: skip
def test_delta_rule_in_chunks_has_a_place_for_every_chunk_of_any_division(rows, sequences, heads, blocks):
    plans = chunked_plans(rows, sequences, heads)
    assert [plan.grid[0] for plan in plans] == blocks


def test_delta_rule_in_chunks_hands_all_places_on_through_one_scratch():
    plans = chunked_plans(20_000, 2, 2)
    spans = [(plan.arguments[8], plan.arguments[9]) for plan in plans[1::2]]
    assert [first for first, _ in spans] == [0, *(last for _, last in spans[:-1])]
    assert spans[-1][1] == 20_000 // 64 + 2
    assert [plan.arguments[8] for plan in plans[::2]] == [first for first, _ in spans]
    scratch = {part for plan in plans for part in plan.arguments if isinstance(part, Scratch)}
    most = max(last - first for first, last in spans)
    assert {part.name: part.size_bytes for part in scratch} == {"chunks": most * 2 * 21760, "tiles": most * 32768}


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 48), (256, 64)])
def test_delta_rule_in_chunks_of_uncommon_sizes_is_refused(key_dim, value_dim):
    with pytest.raises(ContractError, match="expected 128 and a multiple of 32"):
        chunked_plans(70, 1, 1, key_dim, value_dim)
