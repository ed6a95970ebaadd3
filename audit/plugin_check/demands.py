"""Which steps a check must have: the parent derives them from what the plugins register, and misses none in silence."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kernel_muster.audit.plugin_check.protocol.events import Kind, Listed, ListedKernel, StepHead
from kernel_muster.registry.discovery.entry_points import scan
from kernel_muster.registry.distributions import same_distribution
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.values import frozen
from kernel_muster.registry.wording import listed

_DEVICE = "a device"


@frozen
class Demand:
    """A step as the parent knows it: its kind, the contract or key that it is about, and where it runs."""

    kind: Kind
    about: str
    target: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.about}" + (f" on {self.target}" if self.target else "")


def missing_steps(listings: Iterable[Listed], steps: Iterable[StepHead], *, subject: str) -> Iterator[Finding]:
    """Yield a finding about steps that the listed kernels must have and that nobody reported."""
    demanded: Counter[Demand] = Counter()
    for listing in listings:
        demanded |= _demanded(listing.kernels)
    reported = Counter(demand for step in steps for demand in _met_by(step))
    if missing := sorted(map(str, demanded - reported)):
        why = message("unchecked.steps", steps=listed(missing))
        yield Finding("UNCHECKED", subject, why, remedies=(message("remedy.steps"),))


def missing_plugins(
    listings: Iterable[Listed], distribution: str, plugin: str | None, path: Sequence[str]
) -> Iterator[Finding]:
    """Yield a finding about plugins that the distribution's metadata names and that no listing has."""
    entries = (entry for entry in scan(path).entries if same_distribution(entry.distribution, distribution))
    names = {entry.name for entry in entries if plugin in (None, entry.name)}
    names -= {row.name for listing in listings for row in listing.plugins}
    if names:
        why = message("unchecked.plugins", plugins=listed(sorted(names)))
        yield Finding("UNCHECKED", distribution, why, remedies=(message("remedy.steps"),))


def _demanded(kernels: Iterable[ListedKernel]) -> Counter[Demand]:
    several: Counter[Demand] = Counter()
    once: set[Demand] = set()  # what several kernels share is checked once
    for kernel in kernels:
        once.add(Demand("contract", kernel.contract))
        once.update(Demand("compile", kernel.key, arch) for arch in kernel.builds)
        several.update(Demand("plan", kernel.key, arch) for arch in kernel.builds)
        several.update([Demand("prove", kernel.key, CPU)] if kernel.is_for_host else [])
        several.update([Demand("prove", kernel.key, _DEVICE)] if kernel.is_for_device else [])
    return several | Counter(once)


def _met_by(step: StepHead) -> Iterator[Demand]:
    if step.kind == "compile":
        yield from (Demand("compile", key, step.target) for key in step.keys)
    elif step.kind == "prove":
        yield Demand("prove", step.subject, step.target if step.target == CPU else _DEVICE)
    else:
        yield Demand(step.kind, step.subject, step.target)
