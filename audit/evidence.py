"""Evidence: everything the rules may look at. A live boot and a replayed trace both make one."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from datetime import date
from functools import cached_property
from typing import TypeVar

from kernel_muster.audit.tuning.facts import TuningFacts
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.waivers import Expectation, Waiver
from kernel_muster.registry.contract.builders import ModelBuilder
from kernel_muster.registry.contract.digests import Digests
from kernel_muster.registry.contract.layouts import WeightCopy
from kernel_muster.registry.contract.specs import Registered, Stage
from kernel_muster.registry.findings import Finding, Profile
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.keys import KernelKey, KeyNames
from kernel_muster.registry.launch.runners import BuildState
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.records import FailedRequest, LateRegistration, LookupEntry, LookupRow, fold
from kernel_muster.registry.selection.select import Decision, Selector
from kernel_muster.registry.values import frozen

_Entry = TypeVar("_Entry", bound=Expectation)


@frozen
class AuditOptions:
    """What was asked of the audit itself.

    ``without``: keys that MUSTER_DISABLE takes from this boot to compare it with another: where layers can do without,
    their absence is no finding, as that of what a kill switch drops.
    """

    profile: Profile = "serve"
    stage: Stage | None = None
    as_of: date | None = None
    expect_set_hash: str | None = None
    allow_unresolved: frozenset[KernelKey] = frozenset()
    without: frozenset[KernelKey] = frozenset()


@frozen
class Evidence:
    """One boot as the rules see it.

    ``is_complete`` is false where the boot's block raised: then what was never asked says nothing. ``failure`` is what
    it raised.
    """

    catalog: Catalog
    target: Target
    levers: Levers
    manifest: Manifest
    quant: str
    as_of: date
    entries: tuple[LookupEntry, ...]
    late_entries: tuple[LookupEntry, ...] = ()
    requests: tuple[FailedRequest, ...] = ()
    late_registrations: tuple[LateRegistration, ...] = ()
    missing_layouts: tuple[WeightCopy, ...] = ()
    options: AuditOptions = AuditOptions()
    opening: tuple[Finding, ...] = field(default=())
    is_complete: bool = True
    is_replay: bool = False
    states: Mapping[KernelKey, BuildState] = field(default_factory=dict)  # of the kernels that serve
    of_builds: tuple[Finding, ...] = ()  # what concerns all builds, and no single kernel
    proven: frozenset[KernelKey] = frozenset()
    proof_findings: tuple[Finding, ...] = ()
    tuning: TuningFacts | None = None  # of the table that decides thresholds
    failure: str = ""
    is_failure_reported: bool = False  # a finding covers it
    builders: tuple[ModelBuilder, ...] = ()  # that built in this boot
    decider: Selector | None = None  # of the boot's lookups: it knows the decisions already
    digests: Digests = field(default_factory=Digests)  # of sources that were read; one for a boot

    @cached_property
    def selector(self) -> Selector:
        """Decides keys for this target and these levers."""
        known = self.decider
        if known is not None and known.is_for(self.catalog, self.target, self.levers):
            return known
        return Selector(self.catalog, self.target, self.levers)

    def decide(self, key: KernelKey) -> Decision:
        """Return the decision about a key."""
        return self.selector.decide(key)

    def source_digest(self, registered: Registered) -> str:
        """Return the digest of a kernel's source; empty where it cannot be read.

        For a kernel that was compiled in this boot, the digest is that of the bytes that the compiler was given. Other
        sources are read once in a boot: report, trace and rules have one digest.
        """
        state = self.states.get(registered.spec.kernel_key)
        if state is not None and state.source_sha256 and self._serves(registered):
            return state.source_sha256
        return self.digests.of(registered).source

    def digest_error(self, registered: Registered) -> BaseException | None:
        """Return the reason where a digest of a kernel cannot be taken. The builder has that of a compiled source."""
        found = self.digests.of(registered)
        return found.host_error if self.source_digest(registered) else found.source_error or found.host_error

    def host_digest(self, registered: Registered) -> str:
        """Return the digest of the Python code that plans a kernel's launches; empty where it cannot be taken."""
        return self.digests.of(registered).host

    def _serves(self, registered: Registered) -> bool:
        return self.decide(registered.spec.kernel_key).chosen is registered

    @cached_property
    def rows(self) -> tuple[LookupRow, ...]:
        """What was asked while the boot was open."""
        return fold(self.entries)

    @cached_property
    def late_rows(self) -> tuple[LookupRow, ...]:
        """What was asked after the seal."""
        return fold(self.late_entries)

    def evaluated(self, question: LookupRow | LookupEntry) -> Iterator[KernelKey]:
        """Yield the members of a question that were really tried: up to the first that resolves."""
        for key in question.members:
            yield key
            if self.decide(key).chosen is not None:
                return

    @cached_property
    def asked_keys(self) -> frozenset[KernelKey]:
        """All keys that were really tried."""
        return self._tried(self.entries)

    @cached_property
    def late_keys(self) -> frozenset[KernelKey]:
        """All keys that were really tried after the seal; a waiver excuses their misses too."""
        return self._tried(self.late_entries)

    def _tried(self, entries: Iterable[LookupEntry]) -> frozenset[KernelKey]:
        questions = {entry.members: entry for entry in entries}
        return frozenset(key for question in questions.values() for key in self.evaluated(question))

    @cached_property
    def required_keys(self) -> frozenset[KernelKey]:
        """Keys asked for as required, by themselves."""
        return frozenset(row.key for row in self.rows if row.kind == "required" and not row.is_chain)

    @cached_property
    def waivers(self) -> dict[KernelKey, Waiver]:
        """Waivers in scope."""
        return {waiver.key: waiver for waiver in self.in_scope(self.manifest.waivers)}

    def in_scope(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        """Yield the manifest entries that apply to this target, quant and levers."""
        return (e for e in entries if e.in_scope(self.target.arch, self.quant, self.levers))

    @cached_property
    def tried_keys(self) -> frozenset[KernelKey]:
        """All keys that were tried, before the seal or after it."""
        return self.asked_keys | self.late_keys

    @cached_property
    def chains_of(self) -> dict[KernelKey, set[KernelKey]]:
        """The first members of the chains that each key is in."""
        found: dict[KernelKey, set[KernelKey]] = {}
        for row in self.rows:
            for key in row.members if row.is_chain else ():
                found.setdefault(key, set()).add(row.key)
        return found

    @cached_property
    def waivers_of(self) -> dict[KernelKey, list[Waiver]]:
        """All waivers of each key, in scope or not."""
        found: dict[KernelKey, list[Waiver]] = {}
        for waiver in self.manifest.waivers:
            found.setdefault(waiver.key, []).append(waiver)
        return found

    @cached_property
    def unwaived_misses(self) -> KeyNames:
        """Keys that were tried and are absent, and that no waiver names: a waiver may have meant them."""
        tried = self.tried_keys.difference(self.waivers_of)
        return KeyNames(key for key in tried if self.decide(key).chosen is None)

    @cached_property
    def idle_waivers(self) -> KeyNames:
        """Keys of waivers in scope that nothing asked for: they may mean a miss."""
        return KeyNames(self.waivers.keys() - self.tried_keys if self.is_complete else ())

    def scope_problems(self, key: KernelKey) -> Iterator[str]:
        """Say of each waiver of a key that does not apply here where it stands, and why."""
        for waiver in self.waivers_of.get(key, ()):
            if why := waiver.scope_problem(self.target.arch, self.quant, self.levers):
                yield f"waived at {waiver.where}, but {why}"

    def excuse(self, key: KernelKey) -> Waiver | None:
        """Return the waiver in scope that excuses a key; one that has expired is a finding of its own."""
        return self.waivers.get(key)
