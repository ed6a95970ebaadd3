import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_muster import plugins
from kernel_muster.models.policy.attention import MMA_HEAD_DIMS, PREFILL_MMA_ROWS, prefill_arm, qkv_arm
from kernel_muster.models.policy.evidence import GB10, H200, Evidence, Threshold
from kernel_muster.models.policy.ffn import DENSE_ARMS, FFN_ARMS, MOE_ARMS, dense_alias, dense_arm, moe_arm
from kernel_muster.models.policy.moe import GROUPED_ROWS, moe_grouped_decode, takes_k64
from kernel_muster.models.policy.rows import CAPTURED_BATCH_SIZES, committed_rows, padded_rows, verify_rows
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.levers import Levers

Make = Callable[..., Levers]


@pytest.mark.parametrize(("rows", "phase", "asked", "arm"), [
    (0, "decode", "auto", "single"), (1, "decode", "auto", "single"), (1, "prefill", "wide", "single"),
    (2, "decode", "auto", "fused"), (3, "verify", "wide", "fused"), (3, "prefill", "auto", "fused"),
    (4, "decode", "auto", "tiled"), (4, "decode", "wide", "wide"), (4, "decode", "per_seq", "per_seq"),
    (4, "decode", "tiled", "tiled"), (128, "decode", "auto", "tiled"),
    (4, "verify", "auto", "tiers"), (8, "verify", "auto", "tiers"), (9, "verify", "auto", "tiled"),
    (4, "verify", "tiled", "tiled"), (16, "verify", "auto", "tiled"), (17, "verify", "auto", "tiled"),
    (17, "verify", "wide", "wide"),
    (4, "prefill", "auto", "wide"), (4, "prefill", "tiled", "wide"), (4, "prefill", "per_seq", "wide"),
])  # fmt: skip
def test_qkv_arm_at_every_edge(rows: int, phase: str, asked: str, arm: str) -> None:
    assert qkv_arm(rows, phase, asked, has_tiers=True) == arm  # type: ignore[arg-type]


def test_qkv_arm_of_a_verify_without_tiers_is_tiled() -> None:
    assert qkv_arm(4, "verify", "auto", has_tiers=False) == "tiled"


def test_qkv_arm_unknown_is_refused() -> None:
    with pytest.raises(UsageError, match="'fast': expected auto, tiled, wide, per_seq"):
        qkv_arm(4, "decode", "fast", has_tiers=True)


@pytest.mark.parametrize("head_dim", MMA_HEAD_DIMS)
def test_prefill_arm_is_tiles_from_its_edge_up(head_dim: int) -> None:
    edge = PREFILL_MMA_ROWS.value
    arms = [prefill_arm(rows, "prefill", head_dim, has_mma=True) for rows in (1, edge - 1, edge, 8192)]
    assert arms == ["rows", "rows", "mma", "mma"]


@pytest.mark.parametrize(("phase", "head_dim", "has_mma"), [
    ("verify", 256, True), ("decode", 256, True), ("prefill", 64, True), ("prefill", 256, False),
])  # fmt: skip
def test_prefill_arm_is_rows_where_bits_are_decode_s_or_tiles_are_not_there(
    phase: str, head_dim: int, has_mma: bool
) -> None:
    assert prefill_arm(8192, phase, head_dim, has_mma) == "rows"  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "levers", "grouped"), [
    (15, {}, False), (16, {}, True), (17, {}, True), (4, {}, False), (1, {}, False),
    (1, {"MOE_GROUPED_DECODE": "1"}, True), (15, {"MOE_GROUPED_DECODE": "0"}, False),
    (64, {"NO_MOE_GROUPED_DECODE": "1"}, False), (64, {"NO_MOE_GROUPED_DECODE": "0"}, True),
    (64, {"NO_MOE_GROUPED_DECODE": "1", "MOE_GROUPED_DECODE": "1"}, False),
])  # fmt: skip
def test_moe_grouped_decode_kill_beats_force_beats_edge(
    make_levers: Make, rows: int, levers: dict[str, str], grouped: bool
) -> None:
    assert moe_grouped_decode(rows, make_levers(**levers), GB10) is grouped
    assert not moe_grouped_decode(rows, make_levers(**levers), GB10, has_nvfp4_experts=False)


@pytest.mark.parametrize(("arch", "edge"), [(GB10, 16), (H200, 4), ("sm_80", 16), ("cpu", 16)])
def test_moe_grouped_decode_has_the_edge_of_the_measured_device(make_levers: Make, arch: str, edge: int) -> None:
    levers = make_levers()
    assert [moe_grouped_decode(rows, levers, arch) for rows in (1, edge - 1, edge, 128)] == [False, False, True, True]


@pytest.mark.parametrize(("arch", "edge"), [(GB10, 16), (H200, 5)])
def test_moe_grouped_decode_begins_above_the_rows_of_two_launches(make_levers: Make, arch: str, edge: int) -> None:
    levers, forced = make_levers(), make_levers(MOE_GROUPED_DECODE="1")
    decided = [moe_grouped_decode(rows, levers, arch, fused_rows=4) for rows in (1, edge - 1, edge)]
    assert decided == [False, False, True]
    assert moe_grouped_decode(1, forced, arch, fused_rows=4)


@pytest.mark.parametrize(("k", "there", "taken"), [(512, True, True), (2048, False, False), (96, True, False)])
def test_takes_k64_where_the_step_divides(k: int, there: bool, taken: bool) -> None:
    assert takes_k64(k, there) is taken


DENSE = {
    **{n: ("single", "k2", "k3")[n - 1] for n in (1, 2, 3)}, **dict.fromkeys(range(4, 9), "km"),
    **dict.fromkeys((9, 15, 16, 17, 33, 128), "prefill"), 0: "single",
}  # fmt: skip


@pytest.mark.parametrize(("rows", "arm"), DENSE.items())
@pytest.mark.parametrize("phase", ["decode", "verify"])
def test_dense_arm_by_rows(rows: int, arm: str, phase: str) -> None:
    assert dense_arm(rows, phase, has_km=rows in range(4, 9)) == arm  # type: ignore[arg-type]


def test_dense_arm_of_4_to_16_rows_follows_one_launch_a_projection() -> None:
    rows = range(4, 40)
    with_km = [n for n in rows if dense_arm(n, "decode", n in range(4, 9), has_batched=True) == "batched"]
    assert with_km == list(range(9, 17))
    assert [n for n in rows if dense_arm(n, "decode", False, has_batched=True) == "batched"] == list(range(4, 17))
    assert {dense_arm(n, "prefill", False, has_batched=True) for n in rows} == {"prefill"}


@pytest.mark.parametrize("rows", range(4, 9))
def test_dense_arm_without_km_takes_the_prefill_path(rows: int) -> None:
    assert dense_arm(rows, "decode", has_km=False) == "prefill"
    assert dense_arm(rows, "prefill", has_km=True) == "prefill"


@pytest.mark.parametrize(("rows", "grouped", "arm"), [
    (0, False, "single"), (1, False, "single"), (2, False, "k2"), (3, False, "k3"), (4, False, "k2"),
    (5, False, "single"), (14, False, "k2"), (15, False, "single"), (1, True, "grouped"), (17, True, "grouped"),
])  # fmt: skip
def test_moe_arm_by_rows(rows: int, grouped: bool, arm: str) -> None:
    assert moe_arm(rows, "decode", grouped) == moe_arm(rows, "verify", grouped) == arm
    assert moe_arm(rows, "prefill", grouped) == "prefill"


def test_moe_arm_of_the_rows_of_two_launches_is_one_batch() -> None:
    arms = [moe_arm(rows, "decode", False, fused_rows=4) for rows in range(1, 7)]
    assert arms == ["single", "k2", "k3", "batched", "single", "k2"]
    assert moe_arm(4, "decode", True, fused_rows=4) == "grouped"
    assert moe_arm(4, "prefill", False, fused_rows=4) == "prefill"


def test_arms_of_both_kinds_are_all_the_named_ones() -> None:
    assert set(DENSE_ARMS) | set(MOE_ARMS) == set(FFN_ARMS)
    assert dense_alias("token_major") == dense_alias("atomic_c4") == "batched"
    with pytest.raises(UsageError, match="no arm 'grouped'"):
        dense_alias("grouped")


@pytest.mark.parametrize(("rows", "size"), [
    (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 12), (12, 12), (13, 16), (17, 24), (25, 32), (33, 48), (49, 64),
    (65, 96), (97, 128), (128, 128),
])  # fmt: skip
def test_padded_rows_take_the_next_captured_size(rows: int, size: int) -> None:
    assert padded_rows(rows) == size


@pytest.mark.parametrize("rows", [-1, 0, 129])
def test_padded_rows_off_the_ladder_are_refused(rows: int) -> None:
    with pytest.raises(UsageError, match="expected 1 to 128"):
        padded_rows(rows)
    assert CAPTURED_BATCH_SIZES == (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def test_verify_rows_count_the_token_before_the_drafts() -> None:
    assert (verify_rows(3), verify_rows(16), committed_rows(0), committed_rows(5)) == (4, 17, 1, 6)
    with pytest.raises(UsageError, match="drafts is 0, expected at least 1"):
        verify_rows(0)
    with pytest.raises(UsageError, match="accepted is -1"):
        committed_rows(-1)


def test_threshold_takes_the_edge_of_its_own_architecture() -> None:
    here = Evidence("sm_90a", "measured")
    threshold = Threshold("rows", 16, Evidence(GB10, "x"), {"sm_90a": (8, here)})
    assert (threshold.at("sm_90a"), threshold.at(GB10), threshold.at("cpu")) == (8, 16, 16)
    assert threshold.all_evidence[1:] == (here,)


def test_edge_of_grouped_experts_names_the_kernels_of_its_record() -> None:
    record = json.loads((Path(plugins.__file__).parent / "moe/records/h200.json").read_text(encoding="utf-8"))
    measured = {
        digest
        for row in record["rows"]
        if row["contestant"] in ("grouped", "pairwise by 2", "pairwise by 3")
        for digest in row["source_sha256"].split()
    }
    (inherited,), (here,) = (evidence.measured for evidence in GROUPED_ROWS.all_evidence)
    assert (here.device, set(here.kernels.values())) == (record["device"], measured)
    assert inherited.kernels == {}  # of kernels of others
