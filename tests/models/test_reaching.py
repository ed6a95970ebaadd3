"""Some pass launches every kernel that a model asks for, and no other: no lookup is useless."""

from dataclasses import replace
from typing import Any

import pytest
from kernel_muster.registry.contract.specs import KernelSpec, Provider, PythonKernel, Registered
from kernel_muster.registry.selection.catalog import Catalog
from lookup_page import recorded_entries
from reaching import TARGETS, Reached, reach

MODELS = (
    "qwen3.6-35b-a3b", "qwen3.6-27b", "holo-3.1-35b-a3b", "ornith-1.0-35b", "qwen3.6-35b-a3b-dflash",
)  # fmt: skip
DENSE, MOE, DRAFTER = "qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.6-35b-a3b-dflash"


def in_vain(found: Reached) -> dict[str, set[str]]:
    """Return what was asked for and never launched, and the reverse."""
    return {"never launched": found.asked - found.launched.keys(), "not asked": found.launched.keys() - found.asked}


NOTHING: dict[str, set[str]] = {"never launched": set(), "not asked": set()}


@pytest.mark.parametrize("target", ["cpu", "sm_90a", "sm_121a"])
@pytest.mark.parametrize("name", MODELS)
def test_each_key_that_is_asked_for_is_launched_by_some_pass(catalog: Catalog, name: str, target: str) -> None:
    assert in_vain(reach(catalog, name, target)) == NOTHING


def test_targets_without_measurements_of_their_own_reach_what_the_others_do(catalog: Catalog) -> None:
    launched = [set(reach(catalog, DENSE, target, scales=[True]).launched) for target in TARGETS if target != "sm_90a"]
    assert len(launched) == 4
    assert all(one == launched[0] for one in launched)


LEVERS: tuple[tuple[str, str, dict[str, object]], ...] = (
    (DENSE, "cpu", {"NO_TGEMM_PIPELINE3": 1, "NO_K64_PIPELINE3": 1}),
    (DENSE, "cpu", {"NO_K64_N64": 1, "NO_PREFILL_MMA": 1, "NO_CHUNKED_PREFILL": 1}),
    (DENSE, "cpu", {"W4A16_VARIANT": "v2"}),
    (DENSE, "cpu", {"W4A16_NARROW_BLOCKS": 0, "W4A16_M128_ABOVE": 256}),
    (DENSE, "cpu", {"W4A16_CHUNKED_ROWS": 16}),
    (DENSE, "cpu", {"QKV_TIER_ROWS": 16}),
    (DENSE, "cpu", {"QKV_ARM": "wide"}),
    (DENSE, "cpu", {"QKV_ARM": "per_seq"}),
    (MOE, "cpu", {"W4A16_K64_MIN_K": 512}),
    (MOE, "cpu", {"FP32_ROUTING": 1}),
    (MOE, "cpu", {"NO_MOE_GROUPED_DECODE": 1}),
    (MOE, "cpu", {"MOE_GROUPED_DECODE": 1}),
    (MOE, "sm_90a", {"NO_W4A16_HOPPER": 1}),
    (MOE, "sm_90a", {"W4A16_HOPPER_TINY_MI": 1}),
    (MOE, "sm_90a", {"W4A16_HOPPER_SMALL_MI": 0, "W4A16_GEMV_MI": 0}),
    (DENSE, "sm_90a", {"W4A16_HOPPER_FROM": 33}),
    (DENSE, "sm_90a", {"W4A16_ARM": "tile"}),
    (DENSE, "sm_90a", {"W4A16_ARM": "gemv"}),
    ("ornith-1.0-35b", "cpu", {"FP4_PROJ_DECODE": 0}),
    (DRAFTER, "sm_90a", {"QKV_ARM": "tiled"}),
    (DRAFTER, "cpu", {"FFN_ARM": "batched"}),
)


@pytest.mark.parametrize(("name", "target", "levers"), LEVERS)
def test_levers_change_what_is_asked_for_as_they_change_what_is_launched(
    catalog: Catalog, name: str, target: str, levers: dict[str, object]
) -> None:
    found = reach(catalog, name, target, **levers)
    assert found.session.requests == ()
    assert in_vain(found) == NOTHING


@pytest.mark.parametrize(("target", "levers"), [
    ("sm_90a", {"W4A16_ARM": "hopper"}), ("cpu", {"FFN_ARM": "single"}), ("cpu", {"FFN_ARM": "prefill"}),
])  # fmt: skip
def test_forced_arm_takes_no_other_away(catalog: Catalog, target: str, levers: dict[str, object]) -> None:
    found = reach(catalog, DENSE, target, scales=[True], **levers)
    assert in_vain(found)["not asked"] == set()


@pytest.mark.parametrize("arm", ["token_major", "batched", "atomic_c4"])
def test_forced_arm_of_experts_is_launched_with_all_that_it_asks_for(catalog: Catalog, arm: str) -> None:
    usual, found = reach(catalog, MOE, "cpu", scales=[True]), reach(catalog, MOE, "cpu", scales=[True], FFN_ARM=arm)
    added = found.asked - usual.asked
    assert added
    assert added <= found.launched.keys()


@pytest.mark.parametrize(("name", "target"), [(DENSE, "cpu"), (MOE, "cpu"), (MOE, "sm_90a"), (DRAFTER, "sm_90a")])
def test_members_behind_a_chain_are_launched_where_the_first_are_absent(
    catalog: Catalog, name: str, target: str
) -> None:
    gone: set[str] = set()
    depth = 0
    while True:
        found = reach(catalog, name, target, gone, scales=[True])
        assert in_vain(found) == NOTHING, sorted(gone)
        # Each chain steps on to its next member, as long as it has one.
        firsts = {next(key for key in chain if key not in gone) for chain in found.chains if not gone >= set(chain)}
        lasts = {chain[-1] for chain in found.chains}
        if not firsts - lasts - gone:
            break
        gone |= firsts - lasts
        depth += 1
    assert depth >= 2


@pytest.mark.parametrize(("name", "key", "parts"), [
    (MOE, "moe_fused_shared::moe_fused_shared_down", {"moe_fused_batch2::moe_fused_batch2_gate_up"}),
    (MOE, "moe_fused_shared::moe_fused_shared_gate_up", {"moe_fused_batch3::moe_fused_batch3_down"}),
    (MOE, "moe_shared::moe_unpermute_shared_add", {"moe_shared::moe_shared_gate_add"}),
    (DENSE, "w4a16_gemv::w4a16_gemv_qgkv_batch2", {"w4a16_gemv::w4a16_gemv_qg_batch2"}),
    (DENSE, "rope::qk_norm_rope_append", {"rope::rope_forward"}),
    (DENSE, "paged_decode::paged_decode_attn_fresh", {"paged_decode::paged_decode_attn_gated"}),
])  # fmt: skip
def test_parts_serve_where_the_launch_of_several_steps_is_absent(
    catalog: Catalog, name: str, key: str, parts: set[str]
) -> None:
    found = reach(catalog, name, "cpu", [key], scales=[True])
    # Of two that serve together, the other one is present, and alone serves nothing.
    left = {one for one in found.asked if one.partition("::")[0] == "moe_fused_shared"}
    assert in_vain(found) == NOTHING | {"never launched": left if key.startswith("moe_fused") else set()}
    assert parts <= found.launched.keys()


def guest(catalog: Catalog, key: str, contract: str) -> Catalog:
    """Add a kernel of somebody else."""
    backend = PythonKernel(lambda x, w, out: None)
    spec = KernelSpec(key=key, contract=contract, archs=("cpu",), backend=backend, weight_layout="nvfp4_row_major")
    return replace(catalog, kernels=(*catalog.kernels, Registered(spec, Provider("acme", "acme", "1"))))


@pytest.mark.parametrize(("name", "key", "levers"), [
    (DENSE, "w4a4::w4a4_gemm_mfast", {}), (DENSE, "w4a4::w4a4_gemm", {}), (DRAFTER, "w4a4::w4a4_gemm_mfast", {}),
    (DENSE, "w4a16_v3::w4a16_gemm_t_m128_v3", {"W4A16_VARIANT": "v3"}),
])  # fmt: skip
def test_open_key_is_launched_by_prompts_where_somebody_provides_it(
    catalog: Catalog, name: str, key: str, levers: dict[str, Any]
) -> None:
    contract = {str(one): found.name for one, found in catalog.open_contracts.items()}[key]
    found = reach(guest(catalog, key, contract), name, "cpu", **levers)
    assert key in found.asked
    assert found.launched[key].startswith("commit" if name == DRAFTER else "prefill")
    assert in_vain(found) == NOTHING


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_key_that_a_shipped_model_asks_for_is_provided_or_open(catalog: Catalog, target: str) -> None:
    asked = {key for entry in recorded_entries(catalog, target=TARGETS[target]) for key in entry.members}
    assert len(asked) > 80
    assert {key for key in asked if key not in catalog.by_key} == catalog.open_contracts.keys()
