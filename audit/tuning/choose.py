"""Which table a boot takes, and levers read with it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.levers import Lever, Levers, Origin, read_levers
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.values import frozen

if TYPE_CHECKING:
    from kernel_muster.audit.tuning.table import Table

LEVER = "MUSTER_TUNING_TABLE"
NO_TABLE = "none"
SHIPPED = Path(__file__).parent / "tables"


@frozen
class Chosen:
    """A table, and what it is called: its file as the lever named it, or the name of a shipped one."""

    name: str
    table: "Table"


def shipped_names() -> list[str]:
    """Return the names of the shipped tables."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


def read_tuned_levers(
    declared: Iterable[Lever],
    sources: Iterable[tuple[Origin, Mapping[str, object]]],
    target: Target | None,
    cwd: Path | None = None,
) -> tuple[Levers, list[Finding], Chosen | None]:
    """Read the levers as a boot on this target does: below all other sources stands the device's table.

    ``cwd`` is where the relative path of a table starts; the working directory by default.
    """
    table_of, given = tuple(declared), list(sources)
    levers, findings = read_levers(table_of, given)
    chosen, bad = choose_table(levers, target, table_of, cwd)
    if bad is not None:
        return levers, [*findings, bad], None
    if chosen is None:
        return levers, findings, None
    values = {name: value for name, value in chosen.table.values().items() if name in levers}
    given.append(("table", values))
    levers, findings = read_levers(table_of, given, measured=chosen.table.evidence(chosen.name))
    return levers, findings, chosen


def choose_table(
    levers: Levers, target: Target | None, declared: Iterable[Lever], cwd: Path | None = None
) -> tuple[Chosen | None, Finding | None]:
    """Return the table that MUSTER_TUNING_TABLE names, else the shipped one of the device; BAD_LEVER for a bad one."""
    asked = levers[LEVER]
    if asked == NO_TABLE:
        return None, None
    if asked is not None:
        return _named(str(asked), declared, levers.setting(LEVER).origin, cwd or Path())
    # Nothing more is imported for a target that has no table: a cold audit on cpu or for an architecture.
    if target is None or target.device is None:
        return None, None
    return _of_device(target.device.name)


def _named(name: str, declared: Iterable[Lever], origin: str, cwd: Path) -> tuple[Chosen | None, Finding | None]:
    from kernel_muster.audit.tuning.table import read_table

    shipped = name in shipped_names()
    try:
        table = read_table(SHIPPED / f"{name}.json" if shipped else cwd / name)
        problems = [*table.problems(), *table.lever_problems(declared)]
    except UsageError as error:
        problems = [str(error)]
    if problems:
        remedies = (
            "name a file that muster tune wrote: muster tune --output FILE",
            f"or a shipped table ({', '.join(shipped_names()) or 'there is none'}), or {NO_TABLE}",
        )
        return None, Finding("BAD_LEVER", LEVER, f"{LEVER}={name}: {'; '.join(problems)}", (origin,), remedies)
    return Chosen(name, table), None


def _of_device(device: str) -> tuple[Chosen | None, Finding | None]:
    from kernel_muster.audit.tuning.table import read_table, slug

    name = slug(device)
    if not name or name not in shipped_names():
        return None, None
    try:
        table = read_table(SHIPPED / f"{name}.json")
    except UsageError as error:
        return None, _broken(str(error))
    if table.device.name != device:
        return None, None
    problems = table.problems()
    return (None, _broken("; ".join(problems))) if problems else (Chosen(name, table), None)


def _broken(why: str) -> Finding:
    remedies = (message("remedy.reinstall_muster"), message("remedy.no_table"))
    return Finding("BAD_LEVER", LEVER, message("bad_lever.table", why=why), remedies=remedies)
