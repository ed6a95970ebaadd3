"""Lookups: how a model's layers ask for kernels, and how every question is recorded.

A lookup costs about a microsecond (benchmarks/lookup_cost.py): the first one from a site decides and makes a record,
each further one finds that record by the caller's code and instruction and counts it.
"""

import sys
import threading
from collections.abc import Callable
from functools import cached_property, wraps
from types import CodeType, FrameType
from typing import Any, Literal, NoReturn, TypeVar

from kernel_muster.registry.contract.builders import ModelBuilder, choose_builder
from kernel_muster.registry.contract.layouts import LayoutPlan
from kernel_muster.registry.errors import KernelMissing, LateKernelMiss, UsageError
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
_Place = tuple[object, ...]


class _Record:
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
        self._records: dict[_Place, _Record] = {}
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

    def _site(self, record: _Record) -> str:
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
        place: _Place,
        members: Members,
        kind: LookupKind,
        requested_by: str | None,
        when: str,
        reached_by: str,
        layer: str,
        frame: FrameType,
    ) -> _Record:
        """Answer a question from a new place, or a late one."""
        with self.lock:
            phase: Phase = "late" if self.sealed else "boot"
            at = (layer, phase, place)
            record = self._records.get(at)
            if record is None:
                keys, handle = self._found.get(members) or self._answer(members)
                record = self._records[at] = _Record(keys, kind, requested_by, when, reached_by, phase, layer, frame)
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

    def _missed(self, record: _Record) -> NullHandle:
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

    def _judge_late(self, record: _Record) -> None:
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

    def request_failed(self, lever: str, why: str, layer: str, site: str) -> None:
        """Record that a lever or option asked for something the model cannot do."""
        with self.lock:
            said = plain_text(why) or "it was not said why"
            self._requests.append(FailedRequest(plain_text(lever), said, layer, plain_text(site)))

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


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_record(method: _Method) -> _Method:
    """Record a call whose arguments the method does not take; it is two frames above a lookup that asks."""

    @wraps(method)
    def asking(lookups: "Lookups", *given: Any, **named: Any) -> Any:
        try:
            return method(lookups, *given, **named)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:  # the call itself failed
                lookups.malformed(str(error), sys._getframe(1))
            raise

    return asking  # type: ignore[return-value]


def _is_plain(members: Members, when: str, reached_by: str, requested_by: str | None) -> bool:
    """Whether all of a question is text and nothing but text. Every lookup asks: no generator here."""
    for module, func in members:
        if type(module) is not str or type(func) is not str:
            return False
    return type(when) is type(reached_by) is str and (requested_by is None or type(requested_by) is str)


class Lookups:
    """What a layer sees of the registry. ``for_layer`` returns the same session under a layer's name.

    Of a question, ``when`` names the condition on which it is asked, ``reached_by`` the decisions or levers that launch
    the kernel, and ``requested_by`` the lever that asks for it by name.
    """

    def __init__(self, session: LookupSession, layer: str = "") -> None:
        self._session, self._layer = session, layer
        self._places: dict[_Place, _Record] = {}

    @property
    def _live(self) -> LookupSession:
        """The session that counts: these lookups may be older than the last plugin that was registered."""
        while self._session.successor is not None:
            self._session = self._session.successor
        return self._session

    @property
    def target(self) -> Target:
        """What kernels are selected for."""
        return self._live.shown_target

    @property
    def levers(self) -> Levers:
        """The frozen levers of this boot."""
        return self._live.shown_levers

    @property
    def layouts(self) -> LayoutPlan:
        """The layout plan of this boot."""
        return self._live.layouts

    @property
    def catalog(self) -> Catalog:
        """Everything that plugins registered."""
        return self._live.shown_catalog

    @property
    def serves(self) -> bool:
        """Whether this process will serve requests: then a model's builder must be ready for production."""
        return self._live.serves

    @property
    def layer(self) -> str:
        """The label that lookups carry."""
        return self._layer

    def for_layer(self, label: str) -> "Lookups":
        """Return these lookups labelled with a layer: ``layers.3.attn``."""
        return Lookups(self._live, plain_text(label))

    @_on_record
    def kernel(
        self, module: str, func: str, *, when: str = "", reached_by: str = "", requested_by: str | None = None
    ) -> AnyHandle:
        """Look up a kernel that the model cannot run without."""
        return self._ask(((module, func),), "required", when, reached_by, requested_by, sys._getframe(2))

    @_on_record
    def try_kernel(
        self, module: str, func: str, *, when: str = "", reached_by: str = "", requested_by: str | None = None
    ) -> AnyHandle:
        """Look up a kernel that the model can do without; a falsy handle says that it is absent."""
        return self._ask(((module, func),), "optional", when, reached_by, requested_by, sys._getframe(2))

    @_on_record
    def first_of(
        self,
        *members: tuple[str, str],
        required: bool = False,
        when: str = "",
        reached_by: str = "",
        requested_by: str | None = None,
    ) -> AnyHandle:
        """Look up the first member that resolves; each earlier one that is absent needs a waiver."""
        # A class derived from tuple, that of a key for instance, may have a length and an order of its own.
        pairs: list[Any] = [
            tuple.__getitem__(one, slice(None)) if issubclass(type(one), tuple) else one for one in members
        ]
        wrong = next((one for one in pairs if type(one) is not tuple or len(one) != 2), None)
        why = ""
        if not pairs:
            why = "first_of needs at least one (module, func)"
        elif wrong is not None:
            why = f"first_of takes (module, func) tuples, got {plain_text(wrong)}"
        elif type(required) is not bool:
            why = f"first_of: required is {plain_text(required)}, expected True or False"
        if why:
            self.malformed(why, sys._getframe(2))
            raise UsageError(why)
        kind: LookupKind = "required" if required else "optional"
        return self._ask(tuple(pairs), kind, when, reached_by, requested_by, sys._getframe(2))

    def malformed(self, why: str, frame: FrameType) -> None:
        """Record a question that nobody can answer, before its exception is raised."""
        self._live.malformed(why, self._layer, frame)

    def _ask(
        self,
        members: Members,
        kind: LookupKind,
        when: str,
        reached_by: str,
        requested_by: str | None,
        frame: FrameType,
    ) -> AnyHandle:
        session = self._session
        if session.is_marked(frame.f_code):
            frame = session.caller(frame)
        if not _is_plain(members, when, reached_by, requested_by):
            # A name that is a list, say: no plugin registers it, and that is the answer. Of anybody's class nothing is
            # called: its hash may raise, and its equality find the record of another question.
            members = tuple((plain_text(module), plain_text(func)) for module, func in members)
            requested_by = None if requested_by is None else plain_text(requested_by)
            when, reached_by = ("" if one is None else plain_text(one) for one in (when, reached_by))
        place = (members, id(frame.f_code), frame.f_lasti, kind, requested_by, when, reached_by)
        record = self._places.get(place)
        if record is not None:
            with session.lock:
                if not session.sealed:
                    record.count += 1
                    return record.handle
        session = self._live
        record = session.look_up(place, members, kind, requested_by, when, reached_by, self._layer, frame)
        if record.handle or not session.raises:
            self._places[place] = record
        return record.handle

    def builder_of(self, model_type: str | None, model: str) -> ModelBuilder:
        """Return the one builder of a model type, and no copy of it; MusterError if there is none, or more than one."""
        return choose_builder(self._live.catalog.builders, model_type, model)

    def built_by(self, builder: ModelBuilder) -> None:
        """Say which builder begins to build a model: the report names it and its maturity."""
        self._live.built_by(builder)

    def noticed(self, finding: Finding) -> None:
        """Add a finding to the boot's report: a doubt about weights, say, that the builder alone can see."""
        self._live.noticed(finding)

    def request_failed(self, lever: str, why: str, *, where: str = "") -> None:
        """Say that a lever or option asked for something that this model cannot do: REQUEST_NOT_HONORED.

        ``where`` is the ``file:line`` that asked; without it, it is the line that calls this.
        """
        session = self._live
        frame = session.caller(sys._getframe(1))
        session.request_failed(lever, why, self._layer, where or site_name(frame.f_code, frame.f_lasti))
