import pytest
from kernel_muster.registry.backends.cubin.limits import LIMITS, check_limits
from kernel_muster.registry.backends.request import BuildFailure, EntryPoint, EntryResources
from kernel_muster.registry.hardware.arch import KNOWN_CAPABILITIES, parse_arch

NEEDS = {
    "registers": 32,
    "stack_bytes": 0,
    "static_shared_bytes": 0,
    "max_threads": None,
    "cluster": None,
    "parameters": (),
    "instructions": 9,
}


def _check(arch: str = "sm_90a", threads: int = 0, dynamic: int = 0, **needs: object) -> str:
    try:
        check_limits(EntryPoint("k", (), dynamic, threads), EntryResources(**{**NEEDS, **needs}), parse_arch(arch))
    except BuildFailure as failure:
        return f"{failure.code}: {failure.why}"
    return ""


def test_every_known_capability_has_limits():
    assert set(LIMITS) == set(KNOWN_CAPABILITIES)


def test_limits_are_those_that_cccl_has_for_each_architecture(builder, make_request):
    if builder.toolkit.major < 13:
        pytest.skip("needs CCCL 3, which knows every architecture")
    checks = [
        f"static_assert(cuda::arch_traits<cuda::arch_id::sm_{major}{minor}>().{field} == {value});"
        for (major, minor), limits in LIMITS.items()
        for field, value in (
            ("max_shared_memory_per_block_optin", limits.shared_bytes_per_block),
            ("max_registers_per_block", limits.registers_per_block),
            ("max_registers_per_thread", limits.registers_per_thread),
            ("max_threads_per_block", limits.threads_per_block),
            ("cluster_supported", str(limits.blocks_per_cluster > 1).lower()),
        )
    ]
    text = "#include <cuda/__device/arch_traits.h>\n" + "\n".join(checks)
    assert builder.build(make_request(text + '\nextern "C" __global__ void scale(float* o) { *o = 1; }', ("ptr",)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"static_shared_bytes": 232448}, ""),
        ({"static_shared_bytes": 232449}, "232449 bytes of shared memory a block (232449 static, 0 dynamic)"),
        ({"static_shared_bytes": 1024, "dynamic": 231425}, "(1024 static, 231425 dynamic), at most 232448"),
        ({"arch": "sm_80", "dynamic": 166912}, ""),
        ({"arch": "sm_80", "dynamic": 166913}, "at most 166912"),
        ({"arch": "sm_121a", "dynamic": 101376}, ""),
        ({"arch": "sm_121a", "dynamic": 101377}, "at most 101376"),
        ({"registers": 255}, ""),
        ({"registers": 256}, "256 registers a thread, at most 255"),
        ({"registers": 64, "threads": 1024}, ""),
        ({"registers": 65, "threads": 1024}, "73728 registers a block (65 x 1024), at most 65536"),
        ({"registers": 65, "max_threads": 1024}, "73728 registers a block"),
        ({"registers": 168, "max_threads": 384, "threads": 384}, ""),
        ({"max_threads": 128, "threads": 129}, "launched with 129 threads a block, its __launch_bounds__ allow 128"),
        ({"threads": 2048}, "2048 threads a block, at most 1024"),
        ({"cluster": (2, 2, 2)}, ""),
        ({"cluster": (3, 3, 1)}, "a cluster of 9 blocks, at most 8"),
    ],
)
def test_limits_are_checked_at_their_edges(arguments, expected):
    why = _check(**arguments)
    assert expected in why
    assert why.startswith("OVER_LIMIT: " if expected else "")
    assert bool(why) == bool(expected)


def test_everything_that_is_over_is_said_at_once():
    why = _check(registers=300, static_shared_bytes=1 << 20, cluster=(4, 4, 4))
    assert why.count(";") == 2
