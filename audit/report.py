"""The report of one audit: plain data, from which text, JSON and Markdown are rendered."""

from dataclasses import field
from typing import Any, Literal

from kernel_muster.registry.errors import Lacks, UsageError
from kernel_muster.registry.values import frozen

SCHEMA = "kernel-muster/report"
VERSION = "1.3"

Outcome = Literal["found", "fallback", "waived", "absent"]


@frozen(kw_only=True)
class FindingRow:
    """One finding with its severity in this boot.

    ``template`` and ``parameters`` are the sentence of ``why`` as data: its name, and the values that fill it.
    ``cause``, ``lacks`` and ``needed_by`` link findings: the plugin whose absence led to this one, the hook that would
    have given the missing thing, and the plugins that failed for want of the subject's contracts.
    """

    code: str
    severity: Literal["refuse", "warn", "note"]
    allowed: bool
    subject: str
    title: str
    why: str
    where: tuple[str, ...]
    layers: tuple[str, ...]
    remedies: tuple[str, ...]
    explains: tuple[str, ...]
    log: str
    # since 1.3
    template: str = "quoted"
    parameters: dict[str, Any] = field(default_factory=dict, compare=False)
    cause: str = ""
    lacks: Lacks = ""
    needed_by: tuple[str, ...] = ()


@frozen(kw_only=True)
class KernelRow:
    """One question that a layer asked, and who serves it."""

    key: str
    chain: tuple[str, ...]
    kind: Literal["optional", "required"]
    outcome: Outcome
    served_by: str  # the key that serves: the key itself, or a later member of its chain
    distribution: str
    version: str
    tier: str
    backend: str
    archs: tuple[str, ...]
    contract: str
    stage: str
    reason: str
    when: str
    sites: dict[str, int]
    layers: tuple[str, ...]
    reached_by: str = ""  # since 1.2: the decisions or levers that launch it


@frozen(kw_only=True)
class WaiverRow:
    """One waiver that excused something."""

    key: str
    reason: str
    where: str
    until: str


@frozen(kw_only=True)
class LeverRow:
    """One lever as this boot read it. ``keys``: which kernels it drops or chooses among, one pattern for each side."""

    name: str
    value: bool | int | str | None
    origin: str
    effect: str
    evidence: str
    diagnostic: bool
    keys: tuple[str, ...] = ()
    assumed: bool = False  # since 1.2: measured on another device, or with other kernels than those that serve


@frozen(kw_only=True)
class PluginReportRow:
    """One plugin as this boot saw it."""

    name: str
    distribution: str
    version: str
    status: str
    hooks: tuple[str, ...]
    kernels: int
    notes: tuple[str, ...]


@frozen(kw_only=True)
class LayoutRow:
    """One copy of a weight."""

    weight: str
    layout: str
    size_bytes: int
    reason: str
    readers: tuple[str, ...]
    condition: str = ""  # since 1.2: what a plan without weights could not know, and the copy depends on


@frozen(kw_only=True)
class Counts:
    """How many of what."""

    refusing: int
    warnings: int
    notes: int
    allowed: int
    lookups: int
    keys: int
    waived: int


@frozen(kw_only=True)
class Report:
    """Everything one audit has to say.

    ``below_stage_asked``: whether some kernel that serves stays below the stage that was asked for. ``failure``: where
    the boot's block raised, the exception and what caused it, one line each, with where it was raised. ``builder``: who
    built the model, through ``build_model``; ``maturity``: how far that builder may be used on this architecture;
    ``recorded_run``: the date of its last judged run at full size there.
    """

    schema: str = SCHEMA
    version: str = VERSION
    muster_version: str
    verdict: Literal["passed", "refused", "incomplete"]
    degraded: bool
    complete: bool
    replayed: bool = False  # from a trace, which says what was registered and nothing about compilers
    model: str
    manifest: str
    target: str
    arch: str
    device: str
    quant: str
    profile: Literal["serve", "qualify"]
    stage_asked: str
    stage_reached: str
    as_of: str
    set_hash: str
    counts: Counts
    findings: tuple[FindingRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    waivers: tuple[WaiverRow, ...] = ()
    levers: tuple[LeverRow, ...] = ()
    plugins: tuple[PluginReportRow, ...] = ()
    layouts: tuple[LayoutRow, ...] = field(default=())
    # since 1.1
    below_stage_asked: bool = False
    failure: str = ""
    builder: str = ""
    maturity: str = ""
    recorded_run: str = ""  # since 1.2
    failure_reported: bool = False  # since 1.3: a finding covers the failure

    @property
    def passed(self) -> bool:
        """Whether the boot may go on."""
        return self.verdict == "passed"

    @property
    def is_refused(self) -> bool:
        """Whether a finding refuses the boot. One whose model was not built to its end may be neither."""
        return self.verdict == "refused"


def check_report(given: object) -> None:
    """UsageError for what is no report: the exception that holds one, say."""
    if not isinstance(given, Report):
        raise UsageError(f"{type(given).__name__} is no report: expected boot.report, or that of a BootRefused")
