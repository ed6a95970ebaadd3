"""The parts of ``muster ab``: distances, rounding, coherence, sizes, prompts."""

from typing import Any

import kernel_muster as km
import ml_dtypes
import numpy as np
import pytest
from kernel_muster.ab.decoding.prompts import longest_prompt, made_prompts
from kernel_muster.ab.decoding.sizes import DEVICE, HOST, reduced, size_text, with_layers
from kernel_muster.ab.measure.coherence import coherence, loop_at_end
from kernel_muster.ab.measure.logits import distance, is_near_tie, top_k_kl, unrelated_kl
from kernel_muster.ab.measure.metering import KernelUse, differing_kernels
from kernel_muster.ab.nudge import nudge_plugin
from kernel_muster.ab.nudge.nudging import nudged, row_outputs
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.models.policy.attention import PREFILL_MMA_ROWS
from kernel_muster.models.policy.gdn import CHUNKED_PREFILL_ROWS
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import parse_arch

BF16 = ml_dtypes.bfloat16
MANIFESTS = Catalogue.from_folders([manifest_folder()]).manifests
MODELS = [manifest for manifest in MANIFESTS if not manifest.dflash]


def rows(count: int, vocab: int = 50, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, vocab)).astype(BF16)


def test_kl_over_the_whole_vocabulary_is_the_textbooks() -> None:
    one, other = rows(2)
    p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum() for x in (one, other))
    assert top_k_kl(one, other, 50) == pytest.approx(float((p * np.log(p / q)).sum()))
    assert 0 < top_k_kl(one, other, 5) < top_k_kl(one, other, 50)  # tokens in one bin cannot differ any more
    assert top_k_kl(one, one) == 0


def test_kl_of_a_small_distance_is_half_its_variance() -> None:
    one = rows(1, 4000)[0].astype(np.float64)
    moved = one + 1e-3 * np.random.default_rng(1).standard_normal(4000)
    assert top_k_kl(one, moved, 4000) == pytest.approx(0.5e-6, rel=0.2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_kl_of_logits_that_are_not_finite_is_infinite(bad: float) -> None:
    one = rows(1)[0]
    other = one.copy()
    other[3] = bad
    assert top_k_kl(one, other) == top_k_kl(other, one) == float("inf")


def test_distance_compares_only_what_has_one_context() -> None:
    a = [rows(4, seed=1), rows(4, seed=2)]
    b = [a[0].copy(), a[1].copy()]
    b[1][1:] = rows(3, seed=3)  # the second sequence parts at its second token
    tokens = ([1, 2, 3, 4], [5, 6, 7, 8])
    found = distance(a, b, tokens, ([1, 2, 3, 4], [5, 9, 7, 8]))
    assert (found.positions, found.same_bits) == (4 + 2, False)
    assert (found.divergence, found.diverged) == (1, 1)
    assert found.largest == pytest.approx(top_k_kl(a[1][1], b[1][1]))
    assert found.worst == 0  # the sequence that parts has two positions, too few for a median
    same = distance(a, a, tokens, tokens)
    assert (same.same_bits, same.worst, same.divergence) == (True, 0, None)


def test_worst_is_the_largest_median_of_a_sequence_that_has_positions_enough() -> None:
    a, b = [rows(4, seed=1), rows(4, seed=2)], [rows(4, seed=3), rows(4, seed=4)]
    tokens = ([1, 2, 3, 4], [5, 6, 7, 8])
    found = distance(a, b, tokens, tokens)
    medians = [
        float(np.median([top_k_kl(p, q) for p, q in zip(*pair, strict=True)])) for pair in zip(a, b, strict=True)
    ]
    assert (found.worst, found.worst_sequence) == (max(medians), medians.index(max(medians)))
    early = distance(a, b, tokens, ([1, 2, 9, 4], [5, 6, 7, 8]))
    assert (early.worst, early.worst_sequence) == (medians[1], 1)


def test_near_tie_is_two_units_in_the_last_place() -> None:
    assert is_near_tie(np.array([0.0, 8.0, 8.0625], BF16), 1)
    assert not is_near_tie(np.array([0.0, 7.5, 8.0], BF16), 1)
    assert not is_near_tie(np.array([0.0, 8.0, 8.0625], BF16), 0)  # a tie of two others


def test_distance_names_the_furthest_position_and_where_texts_part() -> None:
    a = [rows(6, seed=1), rows(6, seed=2)]
    b = [a[0].copy(), a[1].copy()]
    b[1][4] = rows(1, seed=3)[0]
    mine = [[int(row.argmax()) for row in sequence.astype(float)] for sequence in a]
    other = [[int(row.argmax()) for row in sequence.astype(float)] for sequence in b]
    found = distance(a, b, mine, other)
    assert (found.worst, found.largest_at, found.parted, found.is_tie) == (0, (1, 4), (1, 4), False)
    assert found.largest == pytest.approx(top_k_kl(a[1][4], b[1][4]))
    assert found.gap == pytest.approx(float(a[1][4].astype(float).max() - a[1][4].astype(float)[other[1][4]]))
    assert found.reach > found.gap / 2


def test_unrelated_is_how_far_neighbours_are() -> None:
    found = [rows(3, seed=1)]
    between = [top_k_kl(found[0][0], found[0][1]), top_k_kl(found[0][1], found[0][2])]
    assert unrelated_kl(found) == pytest.approx(sum(between) / 2)
    assert unrelated_kl([rows(1)]) == 0


@pytest.mark.parametrize("shape", [(1, 1), (3, 515), (2, 4, 64)])
def test_nudge_moves_half_of_bf16_by_one_unit(shape: tuple[int, ...]) -> None:
    values = (np.random.default_rng(0).standard_normal(shape) * 100).astype(BF16)
    moved = nudged(values, 7)
    steps = moved.view(np.uint16).astype(int) - values.view(np.uint16)
    assert {*np.unique(steps)} <= {-1, 0, 1}
    if values.size > 100:
        assert 0.4 < np.mean(steps != 0) < 0.6
        assert 0.4 < np.mean(steps[steps != 0] > 0) < 0.6
    assert np.array_equal(nudged(values, 7).view(np.uint16), moved.view(np.uint16))
    if values.size > 100:
        assert not np.array_equal(nudged(values, 8).view(np.uint16), moved.view(np.uint16))


def test_nudge_leaves_zero_and_what_is_not_finite() -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan] * 40, BF16)
    assert np.array_equal(nudged(values, 3).view(np.uint16), values.view(np.uint16))
    largest = np.full(64, 3.3895e38, BF16)
    assert np.isfinite(nudged(largest, 3).astype(np.float32)).all()


def test_nudge_moves_half_of_fp32_by_its_step() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    ratio = nudged(values, 5).astype(np.float64) / values - 1
    moved = np.abs(ratio) > 2.0**-20
    assert 0.4 < moved.mean() < 0.6
    assert np.abs(np.abs(ratio[moved]) - 2.0**-16).max() < 2.0**-22


def test_rounding_reaches_rows_and_never_states_or_caches() -> None:
    names = {name: [p.name for p in row_outputs(one)] for name, one in discover().contracts.items()}
    assert names["rms_norm_residual"] == ["out"]
    assert names["bf16_residual_add"] == ["residual"]
    assert names["rope_forward"] == ["q", "k"]
    assert names["kv_cache_append"] == []
    assert names["gated_delta_rule_decode_strided"] == ["out"]
    assert names["moe_topk_softmax"] == ["out_weights"]
    assert names["argmax_bf16"] == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_121a"])
def test_nudges_compile_without_spills(arch: str) -> None:
    one, other = nudge_plugin.muster_kernels()
    built = Builder().build(one.backend.request(parse_arch(arch)))
    assert {*built.entries} == {"nudge_bf16", "nudge_f32"}
    assert all(entry.spill_store_bytes == 0 for entry in built.entries.values())
    assert other.backend.request(parse_arch(arch)) == one.backend.request(parse_arch(arch))


def test_contracts_of_nudges_are_the_hosts_form() -> None:
    for contract in nudge_plugin.muster_contracts():
        assert contract.problems() == []
        given = contract.arguments(contract.cases[1], np.random.default_rng(0))
        expected = contract.reference(given, {"R": 3, "C": 515})["values"]
        assert np.array_equal(expected, nudged(given["values"], given["seed"]))


def test_kernels_differ_by_code_or_by_how_often_they_run() -> None:
    a = {"m::same": KernelUse(3), "m::fewer": KernelUse(2), "m::other_code": KernelUse(1), "m::gone": KernelUse(1)}
    b = {"m::same": KernelUse(3), "m::fewer": KernelUse(1), "m::other_code": KernelUse(1), "m::new": KernelUse(1)}
    changed = frozenset({"m::other_code", "m::never_ran"})
    assert differing_kernels(a, b, changed) == {"m::fewer", "m::other_code", "m::gone", "m::new"}


@pytest.mark.parametrize(
    ("row", "loop"),
    [
        ([1, 2, 3, 4], 0),
        ([9, 1, 2, 1, 2, 1, 2], 6),
        ([5, 5, 5], 3),
        ([5, 5], 0),
        ([1, 2, 3, 1, 2, 3, 1, 2], 0),
        ([], 0),
    ],
)
def test_loop_at_an_end_is_one_piece_three_times(row: list[int], loop: int) -> None:
    assert loop_at_end(row) == loop


def test_coherence_counts_what_stood_there_before() -> None:
    assert coherence([[1, 2, 3, 4, 5, 6]]).repeated == 0
    assert coherence([[1, 2, 3, 4] * 4]).repeated == pytest.approx(1 - 4 / 13)
    assert coherence([]).repeated == 0


def keys_of(name: str, size: Any) -> set[str]:
    with km.boot(name, target="cpu", levers={}) as boot:
        km.build_model(size(boot.manifest), boot.kernels)
    return {row.served_by or row.key for row in boot.report.kernels}


@pytest.mark.parametrize("limits", [HOST, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("manifest", MODELS, ids=lambda manifest: manifest.name)
def test_reduced_model_asks_for_the_kernels_of_the_whole_one(manifest: Any, limits: Any) -> None:
    small, whole = (keys_of(manifest.name, size) for size in (lambda m: reduced(m, limits), lambda m: m))
    deep = {key for key in whole if "gemm_t_k64" in key}  # of a K larger than in any reduced model
    assert small == whole - deep
    assert "hidden_size" in size_text(manifest, reduced(manifest, limits))


def test_fewer_layers_keep_their_width_and_the_pattern() -> None:
    manifest = next(one for one in MODELS if one.name == "qwen3.6-27b")
    assert size_text(manifest, with_layers(manifest, 8)) == "num_layers 64 -> 8"
    assert size_text(manifest, manifest) == ""
    for layers in (0, 6, 68):
        with pytest.raises(UsageError, match="expected a multiple of 4 up to 64"):
            with_layers(manifest, layers)


def test_made_prompts_are_distinct_and_follow_the_seed() -> None:
    one = made_prompts(32, 256, 0)
    assert len({*one.prompts}) == 32
    assert one.prompts == made_prompts(32, 256, 0).prompts != made_prompts(32, 256, 1).prompts
    assert one.take(34)[32:] == one.prompts[:2]
    assert (one.origin, made_prompts(1, 256, 0).origin) == (
        "32 made from seed 0, 20 to 72 tokens", "1 made from seed 0, 72 tokens each",
    )  # fmt: skip


def test_made_prompts_reach_the_kernels_of_long_prefills() -> None:
    (alone,) = made_prompts(1, 256, 0).prompts
    assert len(alone) > 64 >= max(PREFILL_MMA_ROWS.value, CHUNKED_PREFILL_ROWS.value)
    assert longest_prompt(()) == max(map(len, made_prompts(4, 256, 0).prompts))
