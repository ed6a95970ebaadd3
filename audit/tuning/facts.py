"""What an audit must know of a table in force: plain data, which traces carry and rules judge."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from kernel_muster.audit.tuning.arms import decides_rows
from kernel_muster.audit.tuning.choose import Chosen
from kernel_muster.registry.contract.layouts import WeightCopy
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.select import Selector
from kernel_muster.registry.values import frozen


@frozen
class TuningFacts:
    """A table in force: the levers that it decides, why it is stale, and which shapes and rows it does not cover."""

    table: str
    levers: Mapping[str, int]
    stale: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    range: str = ""


def tuning_facts(
    chosen: Chosen,
    target: Target,
    levers: Levers,
    selector: Selector,
    copies: Iterable[WeightCopy],
    source_of: Callable[[Registered], str],
) -> TuningFacts:
    """Compare a table with the device, the kernels and the weights of a boot; ``source_of`` gives a source's digest."""
    table = chosen.table
    decided = {s.lever.name: int(s.value or 0) for s in levers.settings if s.origin == "table"}
    stale = (*_other_device(chosen, target), *_other_kernels(table.kernels, selector, source_of))
    covers = table.covers
    measured = f"N {covers.features.least} to {covers.features.most}, K {covers.depth.least} to {covers.depth.most}"
    uncovered = (*_uncovered_rows(decided, covers.rows.most), *_uncovered(chosen, copies))
    return TuningFacts(chosen.name, decided, stale, uncovered, measured)


def _other_device(chosen: Chosen, target: Target) -> Iterator[str]:
    measured = chosen.table.device
    if str(target.arch or target.name) != measured.arch:
        yield f"it was measured on {chosen.table.where}, the target is {target}"
    elif target.device is not None and target.device.name != measured.name:
        yield f"it was measured on {chosen.table.where}, the device is {target.device.name}"
    elif target.device is not None and target.device.multiprocessors != measured.multiprocessors:
        yield f"it was measured on {chosen.table.where}, the device has {target.device.multiprocessors} SMs"
    elif target.device is not None and _major(target.device.driver) != _major(measured.driver):
        yield f"it was measured with a driver for CUDA {measured.driver}, this one is for {target.device.driver}"


def _major(version: str) -> str:
    return version.partition(".")[0]


def _other_kernels(
    kernels: Mapping[str, str], selector: Selector, source_of: Callable[[Registered], str]
) -> Iterator[str]:
    for key, digest in sorted(kernels.items()):
        serving = selector.decide(parse_key(key)).chosen
        if serving is None:
            yield f"{key} was measured, and nobody provides it here"
        elif (now := source_of(serving)) != digest:
            yield f"{key} has other source than the one measured ({now[:12] or 'unreadable'}, not {digest[:12]})"


def _uncovered_rows(decided: Mapping[str, int], most: int) -> Iterator[str]:
    """Yield edges above the largest row count: between the two the table decides by what it did not measure.

    Which row counts a model will serve is not known here, so that of rows the edges alone can be judged.
    """
    for lever, value in sorted(decided.items()):
        if decides_rows(lever) and value > most + 1:
            yield f"{lever}={value} (M was measured to {most})"


def _uncovered(chosen: Chosen, copies: Iterable[WeightCopy]) -> Iterator[str]:
    """Yield shapes outside the measured range, of weights among whose kernels the table decides.

    A weight that measured kernels read in one layout alone has nothing to decide.
    """
    covers, compared = chosen.table.covers, set(chosen.table.kernels)
    layouts: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for copy in copies:
        if len(copy.shape) == 2 and compared & {str(key) for key in copy.readers}:
            layouts.setdefault((copy.weight, copy.shape), set()).add(copy.layout)
    outside: dict[tuple[int, int], set[str]] = {}
    for (weight, (features, depth)), read in layouts.items():
        if len(read) > 1 and (features not in covers.features or depth not in covers.depth):
            outside.setdefault((features, depth), set()).add(weight)
    for (features, depth), weights in sorted(outside.items()):
        first, *rest = sorted(weights)
        yield f"{features} x {depth} ({first}{f' and {len(rest)} more' if rest else ''})"
