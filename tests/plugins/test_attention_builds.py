"""What the compiler makes of attention: it fits every target, those without a suffix too."""

import pytest
from kernel_muster.plugins.paged_decode import launch
from kernel_muster.registry.arch import parse_arch
from kernel_muster.registry.backends.builder import Builder

# What a block has without asking for more, and the most that every target from sm_80 on gives.
PLAIN, MOST = 48 * 1024, 99 * 1024


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_attention_spills_nothing_and_its_memory_fits(arch):
    request = launch.DECODE.request(parse_arch(arch))
    built = Builder(None).build(request)
    for entry in request.entries:
        needs = built.entries[entry.name]
        shared = needs.static_shared_bytes + entry.dynamic_shared_bytes
        assert (needs.spill_store_bytes, needs.registers <= 255) == (0, True)
        assert shared <= (MOST if entry.dynamic_shared_bytes > PLAIN else PLAIN)
