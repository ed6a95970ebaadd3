"""Lookups: how a model's layers ask for kernels, and how every question is recorded.

A lookup costs about a microsecond (benchmarks/lookup_cost.py). The first one from a site decides and makes a record.
Each further one finds that record by the caller's code and instruction and counts it.
"""

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

from kernel_muster.registry.contract.builders import ModelBuilder, choose_builder
from kernel_muster.registry.contract.layouts import LayoutPlan
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.plugin_code.plain_text import plain_text
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.handles import AnyHandle
from kernel_muster.registry.selection.lookup_session import LookupRecord, LookupSession, Members, Place
from kernel_muster.registry.selection.records import LookupKind
from kernel_muster.registry.selection.sites import site_name

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
        self._places: dict[Place, LookupRecord] = {}

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

    def has_failed(self, lever: str) -> bool:
        """Whether a request of this lever has failed, or its kernel is absent: that finding has the better reason."""
        session = self._live
        if any(request.lever == lever for request in session.requests):
            return True
        asked = (entry for entry in session.entries("boot") if entry.requested_by == lever)
        return any(all(session.selector.decide(key).chosen is None for key in entry.members) for entry in asked)

    def builder_of(self, model_type: str | None, model: str) -> ModelBuilder:
        """Return the one builder of a model type, and no copy of it; MusterError if there is none, or more than one."""
        return choose_builder(self._live.catalog.builders, model_type, model)

    def built_by(self, builder: ModelBuilder) -> None:
        """Say which builder begins to build a model: the report names it and its maturity."""
        self._live.built_by(builder)

    def noticed(self, finding: Finding) -> None:
        """Add a finding to the boot's report: a doubt about weights, say, that the builder alone can see."""
        self._live.noticed(finding)

    def request_failed(self, lever: str, why: str | MusterError, *, where: str = "") -> None:
        """Report that a lever or option asked for something that this model cannot do: REQUEST_NOT_HONORED.

        ``why`` is a sentence, or the exception that follows: then the report shows it once, in
        this finding. ``where`` is the ``file:line`` that asked; without it, it is the line that calls this.
        """
        session = self._live
        frame = session.caller(sys._getframe(1))
        session.request_failed(lever, why, self._layer, where or site_name(frame.f_code, frame.f_lasti))
