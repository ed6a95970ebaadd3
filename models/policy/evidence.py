"""The origin of a threshold: a number is a fact about a device and its kernels."""

from collections.abc import Mapping
from dataclasses import field

from kernel_muster.registry.levers import Measured
from kernel_muster.registry.values import frozen

#: The device of all inherited figures, taken with kernels of another engine: 48 SMs, 229.6 GB/s, 24 MB L2.
GB10 = "sm_121a"
#: The measured device of the Hopper GEMM: 132 SMs, 4.6 TB/s, 60 MB L2. Other parts of this architecture differ.
H200 = "sm_90a"
#: The measured part of each architecture: its name as the driver gives it, and in words.
_DEVICES = {
    GB10: ("NVIDIA GB10", "GB10 (sm_121a, 48 SMs)"),
    H200: ("NVIDIA H200", "NVIDIA H200 (sm_90a, 132 SMs)"),
}


@frozen
class Evidence:
    """Measurements behind a decision: the architecture, the comparison, the figures, and unmeasured ranges.

    ``kernels`` are those that were timed, with the digests of their sources. Without any, the figures are of others.
    """

    arch: str
    figures: str
    unmeasured: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        gap = f"; not measured: {self.unmeasured}" if self.unmeasured else ""
        return f"{_DEVICES[self.arch][1]}: {self.figures}{gap}"

    @property
    def measured(self) -> tuple[Measured, ...]:
        """The device and the kernels, for a lever."""
        return (Measured(_DEVICES[self.arch][0], self.kernels),)


@frozen
class Threshold:
    """A number that divides two arms. ``measured`` holds the edge of each further architecture with measurements.

    Other devices of that architecture use its edge too, the nearest known one: there it is assumed.
    """

    name: str
    value: int
    evidence: Evidence
    measured: Mapping[str, tuple[int, Evidence]] = field(default_factory=dict)

    def at(self, arch: str) -> int:
        """Return the edge for an architecture: that of its measured device if there is one, else the inherited one."""
        return self.measured[arch][0] if arch in self.measured else self.value

    def per_arch(self, unit: str) -> str:
        """Return the inherited edge and those of other architectures, for texts about no target in particular."""
        return "; ".join(
            [f"{self.value} {unit}", *(f"{value} on {arch}" for arch, (value, _) in self.measured.items())]
        )

    @property
    def all_evidence(self) -> tuple[Evidence, ...]:
        """The evidence of the inherited edge and of each measured one."""
        return (self.evidence, *(evidence for _, evidence in self.measured.values()))
