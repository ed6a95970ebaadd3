"""Which runner serves a target, as far as a stage asks for it and this machine can go."""

from pathlib import Path

from kernel_muster.registry.contract.specs import Stage
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.launch.runners import HostRunner, NoRunner, Runner


def choose_runner(target: Target, stage: Stage | None, cache_dir: str | None) -> Runner:
    """Return the runner that reaches ``stage``; None asks for the highest that this machine reaches.

    An architecture alone is compiled where there is a compiler; without one nothing is built unless a stage asks, and
    then each build says what is missing. A device is always loaded: serving needs that much.
    """
    if target.arch is None:
        return HostRunner()
    # What builds is imported only where something is built: an audit on the host must start fast.
    from kernel_muster.registry.backends.builder import Builder
    from kernel_muster.registry.backends.cache import BuildCache
    from kernel_muster.registry.launch.device import BuildRunner, DeviceRunner

    if stage == "registered" or (target.device is None and stage is None and not has_toolkit()):
        return NoRunner()
    builder = Builder(BuildCache(Path(cache_dir) if cache_dir else None))
    if target.device is None or stage == "compiled":
        return BuildRunner(target.arch, builder)
    return DeviceRunner(target.device, target.arch, builder)


def has_toolkit() -> bool:
    """Whether a compiler is installed."""
    from kernel_muster.registry.backends.nvrtc.headers import find_toolkit
    from kernel_muster.registry.backends.request import BuildFailure

    try:
        find_toolkit()
    except BuildFailure:
        return False
    return True
