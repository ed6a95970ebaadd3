"""Waivers and expectations: keys with a reason, and where and until when they apply. Pure functions."""

import re
from collections.abc import Sequence
from datetime import UTC, date, datetime

from kernel_muster.MODEL_toml.wording import PathPart, dotted
from kernel_muster.registry.hardware.arch import CPU, Arch
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.values import frozen

EXPIRING_DAYS = 30
# The spellings that levers read alike (registry.levers).
_BOOLEANS = {"true": "1", "on": "1", "false": "0", "off": "0"}
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@frozen(kw_only=True)
class Expectation:
    """One ``expected_present`` entry. An empty scope means everywhere; ``where`` is ``file:line``."""

    key: KernelKey
    reason: str
    where: str
    path: tuple[PathPart, ...]
    archs: tuple[str, ...] = ()
    quants: tuple[str, ...] = ()
    levers: tuple[str, ...] = ()

    @property
    def dotted(self) -> str:
        """The entry's path in the manifest: ``expected_absent.w4a4.w4a4_gemm``."""
        return dotted(self.path)

    @property
    def scope(self) -> str:
        """Where it applies, in words; empty for everywhere."""
        parts = (("archs", self.archs), ("quants", self.quants), ("levers", self.levers))
        return ", ".join(f"{name} {' '.join(values)}" for name, values in parts if values)

    def in_scope(self, target: Arch | str | None, quant: str, levers: Levers) -> bool:
        """Whether it applies to a target (an architecture, or ``cpu`` or None for the host), quant and levers."""
        return not self.scope_problem(target, quant, levers)

    def scope_problem(self, target: Arch | str | None, quant: str, levers: Levers) -> str:
        """Say which part of its scope keeps it from applying: ``only on sm_90; this target is sm_90a``; or nothing."""
        arch = CPU if target is None else str(target)
        if self.archs and arch not in self.archs:
            return f"only on {' '.join(self.archs)}; this target is {arch}"
        if self.quants and quant not in self.quants:
            return f"only for quant {' '.join(self.quants)}; this one is {quant}"
        unmet = next((entry for entry in self.levers if not lever_holds(entry, levers)), None)
        return "" if unmet is None else f"only where {unmet}; here {_lever_text(unmet, levers)}"


@frozen(kw_only=True)
class Waiver(Expectation):
    """One ``expected_absent`` entry. ``until`` is the last day, in UTC, on which it counts."""

    until: date | None = None

    def is_expired(self, as_of: date) -> bool:
        """Whether its last day has passed."""
        return self.until is not None and utc_date(as_of) > self.until

    def is_expiring(self, as_of: date, days: int = EXPIRING_DAYS) -> bool:
        """Whether it still counts and ends within ``days`` days."""
        if self.until is None or self.is_expired(as_of):
            return False
        return (self.until - utc_date(as_of)).days <= days


def utc_date(moment: date) -> date:
    """Return the UTC date of a date or a time; a time without zone is taken as UTC."""
    if not isinstance(moment, datetime):
        return moment
    return moment.astimezone(UTC).date() if moment.tzinfo else moment.date()


def lever_holds(entry: str, levers: Levers) -> bool:
    """Whether ``NAME=value`` is so. A lever that nobody declares holds nothing."""
    name, _, text = entry.partition("=")
    if name not in levers:
        return False
    setting = levers.setting(name)
    try:
        return setting.value is not None and setting.lever.parse(text) == setting.value
    except ValueError:
        return False


def _lever_text(entry: str, levers: Levers) -> str:
    """Say what a lever that an entry names is in this boot."""
    name = entry.partition("=")[0]
    if name not in levers:
        return f"nobody declares {name}"
    value = levers.setting(name).value
    return f"{name} is {'unset' if value is None else int(value) if isinstance(value, bool) else value}"


def scopes_overlap(one: Expectation, other: Expectation) -> bool:
    """Whether both may apply in one boot."""
    return (
        _may_meet(one.archs, other.archs)
        and _may_meet(one.quants, other.quants)
        and not contradicting_levers((*one.levers, *other.levers))
    )


def _may_meet(one: Sequence[str], other: Sequence[str]) -> bool:
    return not one or not other or not set(one).isdisjoint(other)


def contradicting_levers(entries: Sequence[str]) -> tuple[str, ...]:
    """Return the first two of ``NAME=value`` that no boot can hold at once; nothing where one can."""
    wanted: dict[str, tuple[str, str]] = {}
    for entry in entries:
        name, value = _name_and_value(entry)
        first, held = wanted.setdefault(name, (entry, value))
        if held != value:
            return first, entry
    return ()


def _name_and_value(entry: str) -> tuple[str, str]:
    """Write a value in one spelling, as whichever kind of lever may read it: ``on`` and ``+01`` are 1."""
    name, _, text = entry.partition("=")
    text = text.strip()
    text = _BOOLEANS.get(text.lower(), text)
    return name, str(int(text)) if _INTEGER.fullmatch(text) else text
