"""The compiled code of attention: it fits every target, including those without a suffix."""

import pytest
from kernel_muster.plugins.paged_decode import launch
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.hardware.arch import parse_arch

# Shared memory of a multiprocessor, of which each block takes 1 KB more than requested.
MULTIPROCESSOR = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100a": 228 * 1024, "sm_121a": 100 * 1024}


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_attention_spills_nothing_and_two_blocks_fit_a_multiprocessor(arch, build_cache):
    request = launch.ROWS.request(parse_arch(arch))
    built = Builder(build_cache).build(request)
    for entry in request.entries:
        needs = built.entries[entry.name]
        assert (needs.spill_store_bytes, needs.registers <= 255) == (0, True)
        shared = needs.static_shared_bytes + entry.dynamic_shared_bytes + 1024
        assert 2 * shared <= MULTIPROCESSOR[arch]


@pytest.mark.parametrize(("arch", "blocks"), [("sm_80", 2), ("sm_90", 2), ("sm_100a", 2), ("sm_121a", 1)])
def test_attention_asks_for_what_its_target_has(arch, blocks):
    entries = launch.ROWS.request(parse_arch(arch)).entries
    assert all(blocks * (entry.dynamic_shared_bytes + 1024) <= MULTIPROCESSOR[arch] for entry in entries)
