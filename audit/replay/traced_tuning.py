"""What a trace says of its table, against what it says of its levers: both come from one boot and must agree."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kernel_muster.audit.tuning.choose import LEVER, NO_TABLE
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.levers import Lever

if TYPE_CHECKING:
    from kernel_muster.audit.replay.trace_model import Trace, TraceTuning

_REMEDY = "write the trace anew: levers are the values in force, tuning is the table that decided some of them"


def tuned_values(trace: "Trace", declared: Iterable[Lever]) -> dict[str, int]:
    """Return what the trace's table sets, as far as a table may."""
    if trace.tuning is None:
        return {}
    tunable = {lever.name for lever in declared if lever.tuning}
    return {name: value for name, value in trace.tuning.levers.items() if name in tunable}


def contradictions(trace: "Trace", declared: Iterable[Lever]) -> list[Finding]:
    """Return a BAD_LEVER for each lever about which ``levers`` and ``tuning`` of a trace do not agree."""
    known = {lever.name: lever for lever in declared}
    problems = [(LEVER, why) for why in _of_the_table(trace.levers.get(LEVER), trace.tuning)]
    if trace.tuning is not None:
        problems += [
            (name, why)
            for name, value in sorted(trace.tuning.levers.items())
            for why in _of_a_lever(known.get(name), value, name in trace.levers, trace.levers.get(name))
        ]
    return [Finding("BAD_LEVER", name, f"the trace contradicts itself: {why}", remedies=(_REMEDY,))
            for name, why in problems]  # fmt: skip


def _of_the_table(asked: object, tuning: "TraceTuning | None") -> Iterator[str]:
    if asked is None:
        return
    name = str(asked).strip()
    if name == NO_TABLE:
        if tuning is not None:
            yield f"{LEVER}={NO_TABLE}, and tuning is table {tuning.table!a}"
    elif tuning is None:
        yield f"{LEVER}={name!a}, and there is no tuning"
    elif tuning.table != name:
        yield f"{LEVER}={name!a}, and tuning is table {tuning.table!a}"


def _of_a_lever(lever: Lever | None, value: int, is_there: bool, in_force: object) -> Iterator[str]:
    if lever is None:
        yield f"tuning.levers sets it to {value}, and nobody declares it"
    elif not lever.tuning:
        yield f"tuning.levers sets it to {value}, and it is no threshold that a table may set"
    elif not is_there:
        yield f"tuning.levers sets it to {value}, and levers does not have it"
    elif type(in_force) is not int or in_force != value:
        yield f"tuning.levers sets it to {value}, and levers says {in_force!a}"
