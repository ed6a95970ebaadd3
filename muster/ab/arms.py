"""Arms: the settings of each side of a comparison, and the resulting boot."""

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from kernel_muster.audit.opening import BootRequest
from kernel_muster.registry.discovery.entry_points import scan
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.keys import KernelKey, did_you_mean, parse_key
from kernel_muster.registry.levers import PREFIX
from kernel_muster.registry.service_variables import is_service_variable, resembles_service
from kernel_muster.registry.values import frozen

#: Speculation is never suspended in a comparison: otherwise an arm without drafting would be measured.
GATE = "MUSTER_MTP_GATE_FORCE"
DISABLE = "MUSTER_DISABLE"
A, B = "A", "B"


@frozen(kw_only=True)
class Arm:
    """One side. ``plugins`` belong to this arm alone: required here, blocked on the other side.

    ``without``: keys removed from this arm, if its layers can run without them.
    """

    name: str
    levers: Mapping[str, str] = field(default_factory=dict)
    without: tuple[KernelKey, ...] = ()
    plugins: tuple[str, ...] = ()
    no_plugins: tuple[str, ...] = ()
    local_plugins: Mapping[str, object] = field(default_factory=dict)

    def text(self) -> str:
        """Return its settings as text."""
        parts = [f"{name}={value}" for name, value in self.levers.items()]
        parts += [f"without {key}" for key in self.without]
        parts += [f"with plugin {name}" for name in (*self.plugins, *self.local_plugins)]
        parts += [f"without plugin {name}" for name in self.no_plugins]
        return ", ".join(parts) or "as it is"


def parse_levers(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Read ``NAME=VALUE`` settings. UsageError for any other form. The boot checks that the lever exists."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith(PREFIX) or resembles_service(name):
            hint = did_you_mean(f"{PREFIX}{name}", [f"{PREFIX}{name}"], "") if not name.startswith(PREFIX) else ""
            raise UsageError(f"{option} {text!r}: expected MUSTER_NAME=VALUE{hint}")
        if not value:
            raise UsageError(f"{option} {text!r}: the value is empty; leave the option out to keep the lever as it is")
        if name in found:
            raise UsageError(f"{option}: {name} is set twice")
        if name == GATE:
            raise UsageError(f"{option}: {GATE} is pinned in both arms where tokens are drafted")
        found[name] = value
    return found


def parse_without(option: str, texts: Iterable[str]) -> tuple[KernelKey, ...]:
    """Read the keys removed from an arm. UsageError for an invalid key. The boot checks that a model asks for it."""
    try:
        return tuple(dict.fromkeys(map(parse_key, texts)))
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def check_arms(a: Arm, b: Arm) -> None:
    """Refuse arms that contradict each other or themselves."""
    for arm, other in ((a, b), (b, a)):
        if both := sorted({*arm.plugins} & {*other.plugins}):
            raise UsageError(f"plugin {', '.join(both)} is to be in {A} alone and in {B} alone: drop both")
        if both := sorted({*arm.plugins} & {*arm.no_plugins}):
            raise UsageError(f"plugin {', '.join(both)} is to be in and out of arm {arm.name}: drop one")
        if both := sorted(map(str, {*arm.without} & {*other.without})):
            raise UsageError(f"both arms are to do without {', '.join(both)}: what would be compared?")


def request_for(base: BootRequest, arm: Arm, other: Arm, *, pins_gate: bool) -> BootRequest:
    """Return the boot of an arm: the shared settings, then its own levers and plugins."""
    given = base.levers
    levers: dict[str, Any] = {
        k: v for k, v in given.items() if k.startswith(PREFIX) and not is_service_variable(k, given)
    }
    levers.update(arm.levers)
    if arm.without:
        levers[DISABLE] = ",".join(filter(None, (str(levers.get(DISABLE, "")), *map(str, arm.without))))
    if pins_gate:
        levers[GATE] = "1"
    return replace(
        base,
        levers=levers,
        levers_origin="given",
        plugins=base.plugins | {*arm.plugins},
        no_plugins=base.no_plugins | {*arm.no_plugins, *_installed(other.plugins)},
        local_plugins={**base.local_plugins, **arm.local_plugins},
    )


def _installed(names: Iterable[str]) -> frozenset[str]:
    """Return the installed ones of these plugins, which can be blocked; a missing one refuses the arm that needs it."""
    return frozenset(names) & scan().names
