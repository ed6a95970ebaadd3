"""``muster plugin check`` about keys: kernels of a plugin that selection cannot tell apart from others."""

from collections import Counter
from collections.abc import Iterable, Iterator

from kernel_muster.audit.rules.plugins import apart
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.levers import read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.select import Selector


def equal_kernels(catalog: Catalog, own: Iterable[Registered], targets: Iterable[Target]) -> Iterator[Finding]:
    """Yield keys that equal kernels offer: one finding for all targets on which they are the same ones."""
    levers, _ = read_levers(catalog.levers, [])
    keys = sorted({registered.spec.kernel_key for registered in own})
    clashes: dict[tuple[KernelKey, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for target in targets:
        selector = Selector(catalog, target, levers)
        for key in keys:
            decision = selector.decide(key)
            if decision.chosen is not None and decision.rivals:
                equal = (decision.chosen, *decision.rivals)
                places = tuple(sorted(f"{r.provider}, archs {' '.join(r.spec.archs)}" for r in equal))
                names = tuple(sorted(r.provider.distribution for r in equal))
                clashes.setdefault((key, places, names), []).append(str(target))
    for (key, places, names), on in clashes.items():
        why = f"{len(places)} equal kernels compete on {', '.join(on)}"
        between = ('say overrides="<distribution>" in the spec', "or give it a key of its own")
        remedies = between if len(set(names)) > 1 else apart(Counter(names))
        yield Finding("DUPLICATE_KERNEL", str(key), why, places, remedies)
