"""Which built-in values are assumed: their figures are of another device, or of other kernels than those that serve."""

from collections.abc import Callable

from kernel_muster.registry.contract.digests import Digests
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.levers import Setting
from kernel_muster.registry.selection.select import Selector


def assumption(
    target: Target | None,
    selector: Selector | None,
    source_of: Callable[[Registered], str] = lambda one: Digests().of(one).source,
) -> Callable[[Setting], bool]:
    """Return whether a lever's value is assumed on a target; the host has no thresholds.

    ``source_of`` gives the digest of a kernel's source.
    """
    if target is None or selector is None or target.is_cpu:
        return lambda setting: False
    device = "" if target.device is None else target.device.name

    def digest_of(key: str) -> str:
        chosen = selector.decide(parse_key(key)).chosen
        return "" if chosen is None else source_of(chosen)

    return lambda setting: setting.is_assumed(device, digest_of)
