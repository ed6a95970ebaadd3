"""What each compute capability allows, and whether an entry point keeps within it.

Source: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per Compute Capability";
the same numbers stand in ``cuda/__device/arch_traits.h`` of the CCCL wheel, which a test compares. Common to all:
255 registers a thread, 65536 a block, allocated to a warp in units of 256; 1024 threads a block.

Static arrays count as dynamic ones do, with no limit of their own at 48 KiB: before 9.0 the assembler enforces that one
itself, from 9.0 on it is gone (kernels with 49156 and 232448 static bytes run on an H200 without an opt-in, driver 580,
CUDA 13.5). A cluster of 16 blocks fails there with CUDA_ERROR_INVALID_CLUSTER_SIZE unless the attribute is set.
"""

from collections.abc import Iterator

from kernel_muster.registry.backends.request import BuildFailure, EntryPoint, EntryResources
from kernel_muster.registry.hardware.arch import Arch
from kernel_muster.registry.values import frozen

KIB = 1024
#: What to do about a kernel of which no block could run.
SMALLER = "make the tile smaller for this architecture, or do not declare it in archs"


@frozen
class Limits:
    """The limits of one compute capability, in bytes, registers, threads and blocks."""

    shared_bytes_per_block: int
    registers_per_thread: int = 255
    registers_per_block: int = 64 * KIB
    threads_per_block: int = 1024
    # 16 work on some parts, behind an attribute that makes the kernel non-portable.
    blocks_per_cluster: int = 1


# Shared memory that a block can have after the opt-in: that of the multiprocessor less 1 KiB a block from 8.0 on.
_SHARED_KIB = {
    (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 8): 99, (8, 9): 99,
    (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99,
}  # fmt: skip
LIMITS = {
    capability: Limits(kib * KIB, blocks_per_cluster=8 if capability >= (9, 0) else 1)
    for capability, kib in _SHARED_KIB.items()
}
_WARP, _REGISTER_UNIT = 32, 8


def check_limits(entry: EntryPoint, needs: EntryResources, arch: Arch) -> None:
    """Raise BuildFailure OVER_LIMIT, with everything that is over, if no block of this kernel could run."""
    over = list(_over(entry, needs, LIMITS[arch.capability]))
    if over:
        raise BuildFailure(
            "OVER_LIMIT",
            f"{entry.name}: for {arch}: {'; '.join(over)}",
            remedies=(SMALLER,),
        )


def _over(entry: EntryPoint, needs: EntryResources, limits: Limits) -> Iterator[str]:
    if needs.registers > limits.registers_per_thread:
        yield f"{needs.registers} registers a thread, at most {limits.registers_per_thread}"
    shared = needs.static_shared_bytes + entry.dynamic_shared_bytes
    if shared > limits.shared_bytes_per_block:
        yield (
            f"{shared} bytes of shared memory a block ({needs.static_shared_bytes} static, "
            f"{entry.dynamic_shared_bytes} dynamic), at most {limits.shared_bytes_per_block}"
        )
    bound = needs.max_threads or limits.threads_per_block
    if max(entry.threads, needs.max_threads or 0) > limits.threads_per_block:
        yield f"{max(entry.threads, bound)} threads a block, at most {limits.threads_per_block}"
    elif entry.threads > bound:
        yield f"launched with {entry.threads} threads a block, its __launch_bounds__ allow {bound}"
    # Without a stated block size or bound any number may be launched: then nothing is claimed.
    threads = entry.threads or needs.max_threads or 0
    registers = -(-needs.registers // _REGISTER_UNIT) * _REGISTER_UNIT * (-(-threads // _WARP) * _WARP)
    if registers > limits.registers_per_block:
        yield f"{registers} registers a block ({needs.registers} x {threads}), at most {limits.registers_per_block}"
    blocks = needs.cluster[0] * needs.cluster[1] * needs.cluster[2] if needs.cluster else 1
    if blocks > limits.blocks_per_cluster:
        yield f"a cluster of {blocks} blocks, at most {limits.blocks_per_cluster}"
