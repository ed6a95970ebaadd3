"""Rules about levers and options that asked for something."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.rules.lookups import merge
from kernel_muster.audit.serving import REQUEST as SERVING
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.distributions import same_distribution
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KeyNames
from kernel_muster.registry.levers import PREFIX, Levers
from kernel_muster.registry.messages.message import joined, message
from kernel_muster.registry.selection.records import MALFORMED, FailedRequest
from kernel_muster.registry.selection.select import parse_key_list, parse_prefer
from kernel_muster.registry.suggestions import Names

#: Where levers that a boot was given come from.
GIVEN = "boot(levers=...)"
#: What a replay calls the quantisation that its trace names.
QUANT = "target.quant"


def failed_requests(evidence: Evidence) -> list[Finding]:
    """Report what the model's code says it cannot do although a lever or the manifest asked for it."""
    return merge(
        Finding(
            "REQUEST_NOT_HONORED",
            request.lever,
            request.why,
            (request.site,),
            _instead_of(request),
            (request.layer,) if request.layer else (),
            lacks=request.lacks,
        )
        for request in sorted(evidence.requests, key=lambda r: (r.lever, r.site, r.layer, r.why))
    )


def _instead_of(request: FailedRequest) -> tuple[str, ...]:
    """Return what helps against a request that failed."""
    asked = request.lever
    if asked.startswith(PREFIX):
        return (message("remedy.unset_model", lever=asked),)
    if asked in ("--quant", "quant"):
        return (message("remedy.other_quant"),)
    if asked.startswith("checkpoint of "):
        return (message("remedy.checkpoint", checkpoint=asked),)
    if asked == MALFORMED:
        return (message("remedy.correct_call"),)
    if asked == QUANT:
        return (message("remedy.trace_quant"),)
    if asked == SERVING:
        return (message("remedy.serve_production"), message("remedy.serve_nothing"))
    if request.lacks == "muster_models":
        return (message("remedy.model_type"), message("remedy.install_builder"))
    return (message("remedy.correct_request", request=asked),)


def disabled_unknown(evidence: Evidence) -> Iterator[Finding]:
    """MUSTER_DISABLE names a key that nobody registers and nobody asks for."""
    known = set(evidence.catalog.by_key) | evidence.asked_keys
    names = Names(map(str, known))
    for key in sorted(evidence.selector.disabled - known):
        near = names.near(str(key)) or evidence.selector.near_names(key)
        why = message("request_not_honored.disable", key=key, near=near)
        yield Finding("REQUEST_NOT_HONORED", "MUSTER_DISABLE", why, remedies=(message("remedy.drop_key"),))


def preferred_unused(evidence: Evidence) -> Iterator[Finding]:
    """MUSTER_PREFER names a distribution that does not serve the key."""
    for key, distribution in sorted(evidence.selector.prefer.items()):
        decision = evidence.decide(key)
        if decision.chosen is not None and same_distribution(decision.chosen.provider.distribution, distribution):
            continue
        theirs = (c for c in decision.candidates if same_distribution(c.registered.provider.distribution, distribution))
        reason = joined([c.reason for c in theirs] or [message("request_not_honored.no_key")])
        why = message("request_not_honored.prefer", distribution=distribution, key=key, reason=reason)
        yield Finding("REQUEST_NOT_HONORED", "MUSTER_PREFER", why, remedies=(message("remedy.drop_preference"),))


def with_lines(findings: Iterable[Finding], manifest: Manifest | None, given: str = GIVEN) -> list[Finding]:
    """Return findings about levers with the manifest's file and line, where a default of it is what is wrong.

    ``given`` says where what the boot was given comes from.
    """

    def place(where: str, finding: Finding) -> str:
        if where == "given":
            return given
        # of a conflict, the two levers share one finding: its subject leads to the table
        return manifest.where("defaults", finding.subject) if manifest and where == "manifest" else where

    return [replace(finding, where=tuple(place(where, finding) for where in finding.where)) for finding in findings]


def list_levers(levers: Levers, keys: KeyNames) -> Iterator[Finding]:
    """Report malformed MUSTER_DISABLE and MUSTER_PREFER, and a key that is in both; ``keys`` may be meant."""
    disable, prefer = levers.setting("MUSTER_DISABLE"), levers.setting("MUSTER_PREFER")
    disabled, problems = parse_key_list(str(disable.value or ""), keys)
    preferred, more = parse_prefer(str(prefer.value or ""), keys)
    for setting, found in ((disable, problems), (prefer, more)):
        name = setting.lever.name
        for problem in found:
            remedies = (message("remedy.lever_correct", lever=name),)
            yield Finding("BAD_LEVER", name, message("bad_lever", lever=name, why=problem), (setting.origin,), remedies)
    for key in sorted(set(disabled) & set(preferred)):
        why = message("lever_conflict.key", key=key)
        where = tuple(dict.fromkeys((disable.origin, prefer.origin)))
        yield Finding("LEVER_CONFLICT", str(key), why, where, (message("remedy.one_list"),))
