"""What the process of ``muster plugin check`` reports to its parent: one frozen value for each kind of event."""

from functools import cache
from typing import Annotated, Literal

from kernel_muster.audit.plugin_check.protocol.ended import Ended
from kernel_muster.audit.plugin_check.protocol.machine_code import EntryRow, WarningRow
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.values import frozen
from pydantic import Field, TypeAdapter

Kind = Literal["install", "load", "contract", "compile", "plan", "prove"]


@frozen(kw_only=True)
class StepHead:
    """Which step it is. ``keys`` are the kernels that a compilation is for; ``where`` lies the code that it runs."""

    name: str
    kind: Kind
    subject: str
    target: str = ""
    keys: tuple[str, ...] = ()
    where: tuple[str, ...] = ()


@frozen(kw_only=True)
class Loading:
    """A plugin begins to load; no name where the code is the project's own again."""

    event: Literal["loading"] = "loading"
    plugin: str = ""
    where: str = ""
    whose: Literal["", "own", "other"] = ""


@frozen(kw_only=True)
class ListedPlugin:
    """One plugin of the distribution, as its catalog has it."""

    name: str
    distribution: str
    version: str
    status: str
    value: str = ""
    location: str = ""
    hooks: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class ListedKernel:
    """One kernel, and what decides which steps it must have: ``builds`` are the architectures to compile it for."""

    key: str
    contract: str
    builds: tuple[str, ...] = ()
    is_for_host: bool = False
    is_for_device: bool = False


@frozen(kw_only=True)
class Listed:
    """What the distribution registers, once it has loaded; ``steps`` is how many there will be."""

    event: Literal["listed"] = "listed"
    plugins: tuple[ListedPlugin, ...]
    kernels: tuple[ListedKernel, ...]
    steps: int


@frozen(kw_only=True)
class Started:
    """A step begins."""

    event: Literal["started"] = "started"
    step: StepHead


@frozen(kw_only=True)
class Done:
    """A step is over. ``skipped`` is the reason why it could not be run here."""

    event: Literal["done"] = "done"
    step: StepHead
    skipped: str = ""
    findings: tuple[Finding, ...] = ()
    entries: tuple[EntryRow, ...] = ()
    warnings: tuple[WarningRow, ...] = ()
    seconds: float = 0.0


@frozen(kw_only=True)
class Builds:
    """What is found about all builds together."""

    event: Literal["builds"] = "builds"
    findings: tuple[Finding, ...]


@frozen(kw_only=True)
class Stopped:
    """The process gives up outside a step."""

    event: Literal["stopped"] = "stopped"
    is_usage: bool
    why: str


@frozen(kw_only=True)
class Finished:
    """All steps are over."""

    event: Literal["finished"] = "finished"


Event = Loading | Listed | Started | Done | Builds | Stopped | Finished | Ended


@cache
def events() -> TypeAdapter[Event]:
    """Return what reads an event; ValidationError for anything else."""
    return TypeAdapter(Annotated[Event, Field(discriminator="event")])
