"""Launchers of norms, the short convolution and the delta rule: the owners of rows and heads."""

import numpy as np
import pytest
from kernel_muster.plugins import causal_conv1d, gated_delta_rule, norm
from kernel_muster.plugins.causal_conv1d import launch as conv_launch
from kernel_muster.plugins.gated_delta_rule import launch as delta_launch
from kernel_muster.plugins.norm import launch as norm_launch
from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.contract.contracts import Case
from kernel_muster.registry.contract.signature import ScalarParam
from kernel_muster.registry.errors import ContractError

CONTRACTS = {c.name: c for family in (causal_conv1d, gated_delta_rule, norm) for c in family.muster_contracts()}


def bound(contract, dims, **scalars):
    contract = CONTRACTS[contract]
    ones = {p.name: 1 for p in contract.signature.params if isinstance(p, ScalarParam) and p.name not in dims}
    arguments = contract.arguments(Case("here", dims, {**ones, **scalars}), np.random.default_rng(3))
    return contract.signature.bind("test", (), {name: arguments[name] for name in contract.signature.names})


def entry(cluster):
    return EntryResources(1, 0, 0, 256, cluster and (cluster, 1, 1), (), 3)


def norm_plan(name, rows, columns, cluster=4):
    backend = {"rms_norm": norm_launch.RMS_NORM, "rms_norm_residual": norm_launch.RMS_NORM_RESIDUAL}[name]
    entries = {f"{name}_cluster_w8": entry(cluster), **{f"{name}_{form}_w8": entry(None) for form in ("vec1", "vec2")}}
    (plan,) = backend.plan(bound(name, {"M": rows, "H": columns}), entries)
    return plan.entry.removeprefix(f"{name}_"), plan.grid[0], plan.block


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_residual"])
@pytest.mark.parametrize(("rows", "columns", "form", "blocks", "threads"), [
    (9, 1024, "warp_w8", 3, None), (1, 33, "warp_w1", 1, None), (3, 1030, "block_w1", 3, None),
    (1, 1032, "cluster_w8", 4, 64), (1, 5120, "cluster_w8", 4, 160), (4, 8192, "cluster_w8", 16, 256),
    (16, 2048, "cluster_w8", 64, 64), (17, 1032, "vec1_w8", 17, 160), (17, 2048, "vec1_w8", 17, 256),
    (256, 5120, "vec1_w8", 256, 640), (257, 5120, "vec2_w8", 257, 320), (257, 1032, "vec2_w8", 257, 96),
    (600, 8192, "vec2_w8", 600, 512), (1, 8200, "block_w8", 1, None),
])  # fmt: skip
def test_norm_by_rows_and_their_length(name, rows, columns, form, blocks, threads):
    assert norm_plan(name, rows, columns) == (form, blocks, threads and (threads, 1, 1))


def test_norm_of_few_rows_without_clusters_is_one_block_a_row():
    assert norm_plan("rms_norm_residual", 2, 5120, cluster=None) == ("cluster_w8", 2, (640, 1, 1))


def test_gated_norm_of_long_rows_is_a_block_a_row():
    (plan,) = norm_launch.RMS_NORM_GATED.plan(bound("rms_norm_gated", {"M": 2, "H": 2048}), {})
    assert (plan.entry, plan.grid, plan.block) == ("rms_norm_gated_f32_block_w1", (2, 1, 1), None)


@pytest.mark.parametrize(("sequences", "form", "cluster", "blocks"), [
    (1, "small_m", 4, 4), (3, "small_m", 4, 4), (4, "large_m", 2, 2), (1, "small_m", None, 1), (4, "large_m", None, 1),
])  # fmt: skip
def test_rule_with_norm_by_its_heads(sequences, form, cluster, blocks):
    dims = {"S": sequences, "R": sequences, "key_heads": 16, "key_dim": 128, "value_heads": 32, "value_dim": 128}
    (plan,) = delta_launch.DECODE_NORM.plan(
        bound("gated_delta_rule_decode_norm_strided", dims, eps=1e-6), {f"delta_rule_norm_{form}_128": entry(cluster)}
    )
    assert (plan.entry, plan.grid) == (f"delta_rule_norm_{form}_128", (blocks, 32, sequences))


def test_rule_of_more_heads_or_sequences_than_a_grid_has_is_refused(monkeypatch):
    monkeypatch.setattr(delta_launch, "_MAX_BLOCKS", 3)
    dims = {"S": 4, "R": 4, "key_heads": 1, "key_dim": 128, "value_heads": 2, "value_dim": 32}
    with pytest.raises(ContractError, match="gated_delta_rule: 2 heads of 4 sequences, expected at most 3 of each"):
        delta_launch.DELTA_RULE.plan(bound("gated_delta_rule_decode_strided", dims), {})


@pytest.mark.parametrize(("channels", "taps", "form", "blocks"), [
    (8192, 4, "decode", 96), (72, 4, "decode", 3), (65, 4, "w1", 6), (8192, 3, "w1", 384),
])  # fmt: skip
def test_convolution_of_single_rows_by_channels_and_taps(channels, taps, form, blocks):
    dims = {"S": 3, "R": 3, "C": channels, "W": taps}
    (plan,) = conv_launch.UPDATE.plan(bound("causal_conv1d_update", dims), {})
    assert (plan.entry, plan.grid) == (f"causal_conv1d_{form}", (blocks, 1, 1))
