from collections.abc import Callable

import pytest
from kernel_muster.models.levers import MODEL_LEVERS
from kernel_muster.registry.levers import Levers, read_levers
from kernel_muster.registry.selection.catalog import Catalog

BY_NAME = {lever.name: lever for lever in MODEL_LEVERS}
CARRIED = {
    "MUSTER_W4A16_VARIANT",
    "MUSTER_W4A16_K64_MIN_K",
    "MUSTER_NO_W4A16_K64",
    "MUSTER_NO_TGEMM_PIPELINE3",
    "MUSTER_NO_K64_PIPELINE3",
    "MUSTER_NO_K64_N64",
    "MUSTER_NO_MOE_GROUPED_DECODE",
    "MUSTER_MOE_GROUPED_DECODE",
    "MUSTER_FP32_ROUTING",
    "MUSTER_FP4_PROJ_DECODE",
    "MUSTER_QKV_ARM",
    "MUSTER_MTP_GATE_FORCE",
    "MUSTER_DFLASH_COMMIT_CTX",
    "MUSTER_MTP_PREFILL",
    "MUSTER_NO_W4A16_HOPPER",
    "MUSTER_NO_PREFILL_MMA",
    "MUSTER_NO_CHUNKED_PREFILL",
}
EDGES = {
    "MUSTER_W4A16_K64_MIN_K": "same_bits",
    "MUSTER_W4A16_NARROW_BLOCKS": "same_bits",
    "MUSTER_W4A16_M128_ABOVE": "same_bits",
    "MUSTER_QKV_TIER_ROWS": "same_bits",
    "MUSTER_BF16_TIER_ROWS": "same_bits",
    "MUSTER_BF16_GEMM_FROM": "other_bits",
    "MUSTER_W4A16_CHUNKED_ROWS": "other_bits",
    "MUSTER_W4A16_HOPPER_FROM": "other_bits",
    "MUSTER_W4A16_HOPPER_FROM_SMALL": "other_bits",
    "MUSTER_W4A16_HOPPER_SMALL_MI": "other_bits",
    "MUSTER_W4A16_HOPPER_TINY_MI": "other_bits",
    "MUSTER_W4A16_GEMV_MI": "other_bits",
}  # fmt: skip
#: Edges without a measurement by muster tune.
UNTUNED = {"MUSTER_GDN_IN_LARGE_ROWS", "MUSTER_GDN_IN_LARGE_MI"}
KILLS = [
    "MUSTER_NO_TGEMM_PIPELINE3", "MUSTER_NO_K64_PIPELINE3", "MUSTER_NO_K64_N64", "MUSTER_NO_W4A16_K64",
    "MUSTER_NO_W4A16_HOPPER", "MUSTER_NO_PREFILL_MMA", "MUSTER_NO_CHUNKED_PREFILL",
]  # fmt: skip


def test_levers_are_all_there_and_two_force_an_arm() -> None:
    assert set(BY_NAME) == CARRIED | set(EDGES) | UNTUNED | {"MUSTER_FFN_ARM", "MUSTER_W4A16_ARM"}


def test_levers_that_a_table_may_move_say_whether_bits_change() -> None:
    assert {name: lever.tuning for name, lever in BY_NAME.items() if lever.tuning} == EDGES
    for name in EDGES:
        assert BY_NAME[name].default is not None


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_lever_is_well_formed_and_its_default_fits_its_grammar(name: str) -> None:
    lever = BY_NAME[name]
    assert lever.problems() == []
    assert lever.default is None or lever.parse(lever.default) == lever.default
    values = {"bool": (True, False), "enum": lever.choices}.get(lever.kind, ())
    assert set(lever.effects) <= set(values)
    if lever.kind == "bool":
        assert set(lever.effects) == {True, False}


@pytest.mark.parametrize("name", KILLS)
def test_kill_switch_off_says_that_the_kernel_is_kept(make_levers: Callable[..., Levers], name: str) -> None:
    short = name.removeprefix("MUSTER_")
    assert "kernel kept" in make_levers(**{short: "0"}).setting(name).effect
    assert "kernel kept" not in make_levers(**{short: "1"}).setting(name).effect


@pytest.mark.parametrize("name", [*EDGES, "MUSTER_QKV_ARM", *(n for n in BY_NAME if n.startswith("MUSTER_NO_"))])
def test_lever_over_a_threshold_names_the_measured_chip(name: str) -> None:
    chip = (
        "NVIDIA H200 (sm_90a" if any(one in name for one in ("HOPPER", "GEMV", "PREFILL", "BF16")) else "GB10 (sm_121a"
    )
    assert BY_NAME[name].evidence.startswith(chip)


def test_lever_with_evidence_names_the_measured_device() -> None:
    for lever in MODEL_LEVERS:
        assert bool(lever.measured) is bool(lever.evidence)
        assert {one.device for one in lever.measured} <= {"NVIDIA GB10", "NVIDIA H200"}


@pytest.mark.parametrize(
    "name",
    [
        "MUSTER_MOE_GROUPED_DECODE",
        "MUSTER_MTP_GATE_FORCE",
        "MUSTER_FFN_ARM",
        "MUSTER_W4A16_ARM",
    ],
)
def test_lever_that_forces_is_diagnostic(name: str) -> None:
    assert BY_NAME[name].diagnostic


@pytest.mark.parametrize(("name", "junk"), [
    ("MUSTER_W4A16_K64_MIN_K", "deep"), ("MUSTER_W4A16_K64_MIN_K", "0"), ("MUSTER_W4A16_VARIANT", "v4"),
    ("MUSTER_QKV_ARM", "Tiled"), ("MUSTER_NO_K64_N64", "yes"),
])  # fmt: skip
def test_lever_junk_is_refused(name: str, junk: str) -> None:
    _, findings = read_levers(MODEL_LEVERS, [("environment", {name: junk})])
    assert [(finding.code, finding.subject) for finding in findings] == [("BAD_LEVER", name)]


def test_plugin_offers_levers_builder_and_manifests(catalog: Catalog) -> None:
    assert set(BY_NAME) <= {lever.name for lever in catalog.levers}
    assert any({"qwen3_5", "qwen3_6_moe", "qwen3_5_moe"} <= set(b.model_types) for b in catalog.builders)
    assert any("dflash" in builder.model_types for builder in catalog.builders)
    assert {builder.name: builder.maturity_on("cpu") for builder in catalog.builders} == {
        "hybrid_decoder": "partial",
        "block_diffusion_drafter": "partial",
    }
    assert any((folder / "qwen3.6-27b" / "MODEL.toml").is_file() for folder in catalog.manifest_folders)
