"""Where a threshold comes from: a number is a fact with a device, never a guess that travels."""

from collections.abc import Mapping
from dataclasses import field

from kernel_muster.registry.values import frozen

#: The part that all inherited figures come from: 48 SMs, 229.6 GB/s measured, 24 MB L2.
GB10 = "sm_121a"
#: What the Hopper GEMM was measured on: 132 SMs, 4.6 TB/s, 60 MB L2. Another part of this architecture has other edges.
H200 = "sm_90a"
_DEVICES = {GB10: "GB10 (sm_121a, 48 SMs)", H200: "NVIDIA H200 (sm_90a, 132 SMs)"}


@frozen
class Evidence:
    """Measurements behind a decision: on which architecture, what was compared, the figures, what nobody measured."""

    arch: str
    figures: str
    unmeasured: str = ""

    def __str__(self) -> str:
        gap = f"; not measured: {self.unmeasured}" if self.unmeasured else ""
        return f"{_DEVICES.get(self.arch, self.arch)}: {self.figures}{gap}"

    def note(self, arch: str) -> str:
        """Say that the target is another chip than the measured one; empty where it is the same."""
        return (
            ""
            if arch == self.arch
            else f"measured on {_DEVICES.get(self.arch, self.arch)}, not on {arch}: measure again"
        )


@frozen
class Threshold:
    """A number that divides two arms. ``measured`` holds the edge of each further architecture that was measured."""

    name: str
    value: int
    evidence: Evidence
    measured: Mapping[str, tuple[int, Evidence]] = field(default_factory=dict)

    def at(self, arch: str) -> int:
        """Return the edge for an architecture: its own where one was measured, else the inherited one."""
        return self.measured[arch][0] if arch in self.measured else self.value

    def per_arch(self, unit: str) -> str:
        """Return the inherited edge and each that was measured elsewhere, for texts about no target in particular."""
        measured = [f"{value} on {_DEVICES.get(arch, arch)}" for arch, (value, _) in self.measured.items()]
        return "; ".join([f"{self.value} {unit}", *measured])

    def all_evidence(self) -> str:
        """Return the evidence of the inherited edge and of each that was measured, for texts about no target."""
        return "; ".join([str(self.evidence), *(str(evidence) for _, evidence in self.measured.values())])

    def note(self, arch: str) -> str:
        """Say where the edge for this architecture comes from, if it was measured elsewhere."""
        return "" if arch in self.measured else self.evidence.note(arch)
