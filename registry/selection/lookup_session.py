"""The state of one boot: every question of its layers, the answers, and the seal."""

import threading
from collections.abc import Callable
from functools import cached_property
from types import CodeType, FrameType
from typing import Literal, NoReturn

from kernel_muster.registry.contract.builders import ModelBuilder
from kernel_muster.registry.contract.layouts import LayoutPlan
from kernel_muster.registry.errors import KernelMissing, Lacks, LateKernelMiss, MusterError
from kernel_muster.registry.errors import LateRegistration as LateRegistrationError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.foreign_text import written
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.launch.runners import HostRunner, NoRunner, Runner
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.logs import logger
from kernel_muster.registry.plugin_code.plain_text import plain_text
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.handles import AnyHandle, Gate, Handle, NullHandle
from kernel_muster.registry.selection.records import (
    MALFORMED,
    FailedRequest,
    LateRegistration,
    LookupEntry,
    LookupKind,
    Phase,
)
from kernel_muster.registry.selection.select import Selector
from kernel_muster.registry.selection.sites import is_marked, site_name
from kernel_muster.registry.values import copied

OnLateMiss = Literal["raise", "abort", "count"]
Members = tuple[tuple[str, str], ...]
Place = tuple[object, ...]


class LookupRecord:
    """One question from one instruction of one layer: its answer, and how often it was asked."""

    __slots__ = (
        "code",
        "count",
        "handle",
        "instruction",
        "kind",
        "layer",
        "members",
        "phase",
        "reached_by",
        "requested_by",
        "when",
    )

    def __init__(
        self,
        members: tuple[KernelKey, ...],
        kind: LookupKind,
        requested_by: str | None,
        when: str,
        reached_by: str,
        phase: Phase,
        layer: str,
        frame: FrameType,
    ) -> None:  # fmt: skip
        self.members, self.kind, self.requested_by = members, kind, requested_by
        self.when, self.reached_by = when, reached_by
        self.phase, self.layer = phase, layer
        # Holding the code keeps its id from being used again.
        self.code, self.instruction = frame.f_code, frame.f_lasti
        self.count = 0
        self.handle: AnyHandle

    @property
    def site(self) -> str:
        """The ``file:line`` that asked."""
        return site_name(self.code, self.instruction)


class LookupSession:
    """The state behind all lookups of one boot (or of one open registry). Thread-safe; nothing is global."""

    def __init__(
        self,
        catalog: Catalog,
        target: Target,
        levers: Levers,
        *,
        raises: bool = False,
        excused: Callable[[KernelKey], str] = lambda key: "",
        runner: Runner | None = None,
        serves: bool = False,
    ) -> None:
        self.catalog, self.target, self.levers, self.serves = catalog, target, levers, serves
        self.selector = Selector(catalog, target, levers)
        self.layouts = LayoutPlan()
        self.runner: Runner = runner or (HostRunner() if target.is_cpu else NoRunner())
        self.raises = raises
        self.sealed = False
        self._gate = Gate()
        self.lock = threading.RLock()
        self._records: dict[Place, LookupRecord] = {}
        self._marked: dict[int, tuple[bool, CodeType]] = {}
        self._sites: dict[tuple[int, int], str] = {}  # records hold their code, so that ids stay their own
        self._found: dict[Members, tuple[tuple[KernelKey, ...], Handle]] = {}
        self._boot: tuple[LookupEntry, ...] | None = None  # complete once sealed
        self._requests: list[FailedRequest] = []
        self._notices: list[Finding] = []
        self._builders: list[ModelBuilder] = []
        self._late_registrations: list[LateRegistration] = []
        self._log = logger()
        self._on_late_miss: OnLateMiss = "raise"
        self._excused = excused  # a key's waiver reason, or nothing
        self._abort: Callable[[str], None] = lambda text: None
        self.successor: LookupSession | None = None  # has taken over from this one, which nobody had used

    def seal(self, on_late_miss: OnLateMiss, abort: Callable[[str], None]) -> None:
        """End the boot: from here on each lookup is late."""
        with self.lock:
            self._on_late_miss, self._abort = on_late_miss, abort
            self.sealed = True

    def close(self, why: str) -> None:
        """Let no handle launch any more: the boot has not passed, because of ``why``."""
        self._gate.close(why)

    @cached_property
    def shown_catalog(self) -> Catalog:
        """A copy of the catalog for models and callers: what they do to it changes no decision."""
        return copied(self.catalog)

    @cached_property
    def shown_levers(self) -> Levers:
        """A copy of the levers for models and callers."""
        return self.levers.copy()

    @cached_property
    def shown_target(self) -> Target:
        """A copy of the target for models and callers."""
        return copied(self.target)

    def refuse_registration(self, plugin: str, site: str) -> NoReturn:
        """Record that somebody tried to register after the seal, and refuse it."""
        with self.lock:
            self._late_registrations.append(LateRegistration(plugin, site))
        raise LateRegistrationError(f"{plugin} was registered at {site}, after the audit was sealed; it has no effect")

    def entries(self, phase: Phase) -> tuple[LookupEntry, ...]:
        """Return what was asked in a phase, place by place."""
        with self.lock:
            if phase == "boot" and self._boot is not None:
                return self._boot
            entries = tuple(
                LookupEntry(
                    r.members, r.kind, r.requested_by, r.phase, r.when, self._site(r), r.layer, r.count, r.reached_by
                )
                for r in self._records.values()
                if r.phase == phase
            )
            if phase == "boot" and self.sealed:
                self._boot = entries
            return entries

    def _site(self, record: LookupRecord) -> str:
        """Return a record's site; many layers ask from one line, and naming it takes some microseconds."""
        place = (id(record.code), record.instruction)
        name = self._sites.get(place)
        if name is None:
            name = self._sites[place] = record.site
        return name

    @property
    def is_used(self) -> bool:
        """Whether a layer has asked for anything, or said what it wants."""
        with self.lock:
            return bool(self._records or self._requests or self.layouts.copies)

    @property
    def notices(self) -> tuple[Finding, ...]:
        """Findings of builders about what they were given."""
        return tuple(self._notices)

    @property
    def requests(self) -> tuple[FailedRequest, ...]:
        """What levers or options asked for in vain."""
        with self.lock:
            return tuple(self._requests)

    @property
    def builders(self) -> tuple[ModelBuilder, ...]:
        """Which builders built in this boot, each once."""
        with self.lock:
            return tuple(self._builders)

    def built_by(self, builder: ModelBuilder) -> None:
        """Record that a builder begins to build."""
        with self.lock:
            self._builders += [] if any(builder is known for known in self._builders) else [builder]

    @property
    def late_registrations(self) -> tuple[LateRegistration, ...]:
        """Registrations that came after the seal."""
        with self.lock:
            return tuple(self._late_registrations)

    def is_marked(self, code: CodeType) -> bool:
        """Whether a function is marked ``@track_caller``; its code is kept, so that its id stays its own."""
        known = self._marked.get(id(code))
        if known is None:
            known = self._marked[id(code)] = (is_marked(code), code)
        return known[0]

    def caller(self, frame: FrameType) -> FrameType:
        """Return the first frame at or above ``frame`` whose function is not marked ``@track_caller``."""
        while self.is_marked(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        return frame

    def look_up(
        self,
        place: Place,
        members: Members,
        kind: LookupKind,
        requested_by: str | None,
        when: str,
        reached_by: str,
        layer: str,
        frame: FrameType,
    ) -> LookupRecord:
        """Answer a question from a new place, or a late one."""
        with self.lock:
            phase: Phase = "late" if self.sealed else "boot"
            at = (layer, phase, place)
            record = self._records.get(at)
            if record is None:
                keys, handle = self._found.get(members) or self._answer(members)
                record = self._records[at] = LookupRecord(
                    keys, kind, requested_by, when, reached_by, phase, layer, frame
                )
                record.handle = handle or self._missed(record)
            record.count += 1
        if phase == "late":
            self._judge_late(record)
        elif isinstance(record.handle, NullHandle) and self.raises and kind == "required":
            raise KernelMissing(f"{record.members[0]}: {record.handle.reason} (asked for at {record.site})")
        return record

    def _answer(self, members: Members) -> tuple[tuple[KernelKey, ...], Handle | None]:
        """Return the keys of a question, and the handle of the first that resolves; its build begins."""
        keys = tuple(KernelKey(module, func) for module, func in members)
        for key in keys:
            decision = self.selector.decide(key)
            found = decision.chosen is not None
            self._log.debug("lookup.decided", key=str(key), found=found, reason=decision.reason)
            handle = self.handle_of(key)
            if handle is not None and decision.chosen is not None:
                self.runner.start(decision.chosen.spec)
                self._found[members] = keys, handle
                return keys, handle
        return keys, None

    def _missed(self, record: LookupRecord) -> NullHandle:
        first = self.selector.decide(record.members[0])
        excuses = [self._excused(key) for key in record.members]
        return NullHandle(first.key, first.reason, record.site, "; ".join(excuses) if all(excuses) else "")

    def handle_of(self, key: KernelKey) -> Handle | None:
        """Return the handle of a key without recording a question: for the audit's own use."""
        chosen = self.selector.decide(key).chosen
        if chosen is None:
            return None
        contract = self.catalog.contracts[chosen.spec.contract]
        return Handle(key, chosen.spec, contract, chosen.provider, self.runner, self._gate)

    def _judge_late(self, record: LookupRecord) -> None:
        handle = record.handle
        if isinstance(handle, Handle) or handle.waiver:
            return
        text = f"{record.members[0]} was looked up at {record.site} after the seal, and missed: {handle.reason}"
        if self._on_late_miss == "count":
            if record.count == 1:
                self._log.warning(f"LATE_MISS: {text}", code="LATE_MISS", key=str(record.members[0]), site=record.site)
            return
        if self._on_late_miss == "abort":
            self._abort(written(text, "log"))
        raise LateKernelMiss(text)

    def request_failed(self, lever: str, why: str | MusterError, layer: str, site: str) -> None:
        """Record that a lever or option asked for something the model cannot do; an exception is reported by that."""
        lacks: Lacks = ""
        if isinstance(why, MusterError):
            lacks, why.is_reported = why.lacks, True
        with self.lock:
            reason = plain_text(str(why)) or "no reason was given"
            self._requests.append(FailedRequest(plain_text(lever), reason, layer, plain_text(site), lacks))

    def malformed(self, why: str, layer: str, frame: FrameType) -> None:
        """Record a question that nobody can answer: its exception may be swallowed. After the seal it is a miss."""
        frame = self.caller(frame)
        if not self.sealed:
            self.request_failed(MALFORMED, why, layer, site_name(frame.f_code, frame.f_lasti))
            return
        members = ((MALFORMED, why),)
        self.look_up((members, id(frame.f_code), frame.f_lasti), members, "required", None, "", "", layer, frame)

    def noticed(self, finding: Finding) -> None:
        """Record a finding of a builder."""
        with self.lock:
            self._notices.append(finding)
