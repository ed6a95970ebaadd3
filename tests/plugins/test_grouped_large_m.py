"""Launches of grouped experts with many rows each: their condition, their parts, and their shared memory."""

import pytest
from kernel_muster.plugins.moe.grouped import launch
from kernel_muster.registry.backends.cubin.limits import LIMITS
from kernel_muster.registry.errors import ContractError
from kernel_muster.registry.hardware.arch import parse_arch


@pytest.mark.parametrize(
    ("form", "depth", "experts", "slots", "expected"),
    [("gate_up", 2048, 256, 2048, True), ("gate_up", 2048, 256, 2047, False), ("gate_up", 512, 256, 8192, False),
     ("down", 512, 8, 64, True), ("down", 2048, 8, 128, False), ("down", 768, 8, 128, False)],
)  # fmt: skip
def test_many_rows_begin_at_eight_an_expert_where_the_depth_has_a_form(form, depth, experts, slots, expected):
    assert launch.is_large_m(form, depth, experts, slots) is expected


@pytest.mark.parametrize(
    ("form", "features", "slots", "grid"),
    [("gate_up", 512, 4096, (2, 128 + 256, 1)), ("gate_up", 512, 16384, (1, 512 + 256, 1)),
     ("gate_up", 512, 2048, (2, 64 + 256, 1)), ("down", 2048, 2049, (4, 64 + 256, 1)),
     ("down", 2048, 63, (8, 1 + 63, 1)), ("down", 40, 2048, (1, 64 + 256, 1)), ("down", 300, 63, (1, 1 + 63, 1)),
     ("down", 512, 63, (2, 1 + 63, 1))],
)  # fmt: skip
def test_few_parts_are_cut_into_slices_of_whole_warps_until_the_device_has_four_waves(form, features, slots, grid):
    assert launch.large_m_grid(form, features, 256, slots, 32, 132) == grid


def test_more_slots_than_a_grid_has_parts_are_refused():
    most = (65535 - 256) * 32 + 31
    assert launch.large_m_grid("down", 2048, 256, most, 32, 132)[1] == 65535
    with pytest.raises(ContractError, match="2088960 choices make 65536 row tiles, expected at most 65535"):
        launch.large_m_grid("down", 2048, 256, most + 1, 32, 132)


@pytest.mark.parametrize(
    ("arch", "rows"), [("sm_80", 32), ("sm_90a", 32), ("sm_100a", 32), ("sm_89", 16), ("sm_121a", 16)]
)
def test_rows_of_a_block_fit_the_shared_memory_of_the_architecture(arch, rows):
    parsed = parse_arch(arch)
    assert launch.large_m_rows(parsed.capability) == rows
    entries = {entry.name: entry for entry in launch.GROUPED_DOWN.request(parsed).entries}
    sizes = {name: entry.dynamic_shared_bytes for name, entry in entries.items() if entry.dynamic_shared_bytes}
    assert sizes == {
        "grouped_many_gate_up_k2048": rows * (2 * 2048 + 16), "grouped_many_down_k512": rows * (2 * 512 + 16),
    }  # fmt: skip
    assert max(sizes.values()) <= LIMITS[parsed.capability].shared_bytes_per_block
