"""The verdict: all rules over one body of evidence, consequences linked to their causes, sorted."""

from collections.abc import Iterable

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.rules import RULES
from kernel_muster.audit.rules.causes import consequence
from kernel_muster.registry.findings import ABSENCE_CODES, Finding, Profile, Severity, sort_key
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.messages.message import message, quoted
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.values import frozen


@frozen
class Judged:
    """A finding with what it does to this boot."""

    finding: Finding
    severity: Severity
    is_allowed: bool = False  # by --dangerously-allow-unresolved

    @property
    def refuses(self) -> bool:
        """Whether it refuses the boot."""
        return self.severity is Severity.REFUSE and not self.is_allowed


@frozen
class Verdict:
    """All findings of a boot, those that refuse first."""

    findings: tuple[Judged, ...]

    @property
    def is_refused(self) -> bool:
        """Whether the boot is refused."""
        return any(judged.refuses for judged in self.findings)

    @property
    def is_degraded(self) -> bool:
        """Whether it passes only because something absent was allowed."""
        return not self.is_refused and any(judged.is_allowed for judged in self.findings)


def judge_boot(evidence: Evidence) -> Verdict:
    """Apply every rule and return the verdict."""
    found = [finding for rule in RULES for finding in rule(evidence)]
    causes, found = link_consequences(evidence.catalog, evidence.opening, found)
    allowed = evidence.options.allow_unresolved
    waived = allowed.intersection(evidence.waivers).difference(_key(f) for f in found if f.code in ABSENCE_CODES)
    idle = [key for key in allowed if evidence.is_complete and (key in waived or not _is_absent(evidence, key))]
    return judge((*causes, *found, *map(_idle_allowance, idle)), evidence.options.profile, allowed)


def _is_absent(evidence: Evidence, key: KernelKey) -> bool:
    return key in evidence.asked_keys and evidence.decide(key).chosen is None


def judge_opening(catalog: Catalog, findings: Iterable[Finding], profile: Profile) -> Verdict:
    """Return the verdict of a boot that ended before its model was built."""
    causes, rest = link_consequences(catalog, findings, ())
    return judge((*causes, *rest), profile)


def judge(findings: Iterable[Finding], profile: Profile, allowed: frozenset[KernelKey] = frozenset()) -> Verdict:
    """Give each finding its severity and sort them."""
    judged = [Judged(f, f.severity(profile), _is_allowed(f, allowed)) for f in dict.fromkeys(findings)]
    return Verdict(tuple(sorted(judged, key=_report_order)))


def _report_order(judged: Judged) -> tuple[object, ...]:
    finding = judged.finding
    return judged.is_allowed, _ORDER.index(judged.severity), sort_key(finding), finding.where, finding.why


_ORDER = tuple(Severity)


def _is_allowed(finding: Finding, allowed: frozenset[KernelKey]) -> bool:
    return finding.code in ABSENCE_CODES and _key(finding) in allowed


def _idle_allowance(key: KernelKey) -> Finding:
    """Return what to say of an allowance that nothing needs: it would hide that kernel or waiver goes missing."""
    return Finding(
        "UNUSED_WAIVER",
        str(key),
        message("unused_waiver.allowance"),
        where=("--dangerously-allow-unresolved",),
        remedies=(message("remedy.drop_allowance"),),
    )


def _key(finding: Finding) -> KernelKey:
    """Return the key that a lookup's finding is about; a layer may have asked for something malformed."""
    return KernelKey(*finding.subject.split("::", 1))


def link_consequences(
    catalog: Catalog, opening: Iterable[Finding], found: Iterable[Finding]
) -> tuple[tuple[Finding, ...], list[Finding]]:
    """Move what a failed plugin explains into that plugin's finding: misses, and models, builders and levers."""
    whole = list(opening)
    causes = [finding for finding in whole if not finding.lacks]
    explained: dict[int, list[str]] = {}
    rest = []
    link = _Links(catalog, causes)
    for finding in (*(finding for finding in whole if finding.lacks), *found):
        at = link.cause_of(finding)
        if at is None:
            rest.append(finding)
        elif finding.lacks:
            explained.setdefault(at, []).append(
                message("consequence", code=finding.code, subject=finding.subject, why=quoted(finding.why))
            )
        else:
            explained.setdefault(at, []).append(consequence(finding))
    return tuple(f.explaining(explained[at]) if at in explained else f for at, f in enumerate(causes)), rest


class _Links:
    """Which finding about a plugin explains another finding."""

    def __init__(self, catalog: Catalog, causes: Iterable[Finding]) -> None:
        self._rows = [row for row in catalog.plugins if row.status in ("failed", "mismatched")]
        subjects, labels, orphans = dict[str, int](), dict[str, int](), dict[str, int]()
        for at, cause in enumerate(causes):
            if cause.severity("serve") is Severity.REFUSE:  # under every profile: only then may it stand for others
                subjects.setdefault(cause.subject, at)
                for text in cause.where:
                    labels.setdefault(text, at)
                for name in cause.needed_by:
                    orphans.setdefault(name, at)
        #: Of each plugin, the finding about it alone, the one about several of them, or that of what it needs.
        self._places: dict[str, int] = {}
        for row in self._rows:
            label = f"{row.distribution} {row.version} ({row.value})"
            for place in (subjects.get(row.name), labels.get(label), orphans.get(row.name)):
                if place is not None:
                    self._places.setdefault(row.name, place)
        self._by_hook: dict[str, int | None] = {}

    def cause_of(self, finding: Finding) -> int | None:
        """Return the place of the finding that explains one; None where none does."""
        hook = finding.lacks
        if not hook:
            return self._places.get(finding.cause) if finding.cause else None
        if hook not in self._by_hook:
            places = (self._places.get(row.name) for row in self._rows if not row.hooks or hook in row.hooks)
            self._by_hook[hook] = min((at for at in places if at is not None), default=None)
        return self._by_hook[hook]
