"""The compiled code of the delta rule with its norm, and in chunks: no spills, and it fits every target."""

import pytest
from kernel_muster.plugins.gated_delta_rule import launch
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.hardware.arch import parse_arch

# The most shared memory of a block on every target from sm_80 on, of 99 KiB on some.
MOST = 99 * 1024


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_121a"])
@pytest.mark.parametrize("form", ["DECODE_NORM", "CHUNKED"])
def test_delta_rule_spills_nothing_and_its_memory_fits(form, arch, build_cache):
    request = getattr(launch, form).request(parse_arch(arch))
    built = Builder(build_cache).build(request)
    for entry in request.entries:
        needs = built.entries[entry.name]
        assert (entry.name, needs.spill_store_bytes) == (entry.name, 0)
        assert needs.static_shared_bytes + entry.dynamic_shared_bytes <= MOST
