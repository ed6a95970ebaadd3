"""Rules about what was asked for: absent keys, chains that fell back, and kernels that are there but wrong."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.rules.causes import caused, of_blocked_plugins, unblock
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.arch import CPU
from kernel_muster.registry.keys import KernelKey, parse_key
from kernel_muster.registry.messages.message import Message, joined, message, quoted
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.records import LookupRow
from kernel_muster.registry.selection.select import Decision, is_host_only

GATE = message("remedy.gate")


def absent_keys(evidence: Evidence) -> list[Finding]:
    """Judge every question that was not answered by its first member; one finding a cause."""
    return of_blocked_plugins(evidence, merge(f for row in evidence.rows for f in _judge(evidence, row)))


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Fold findings of one code and subject into one, with all reasons, sites, layers and remedies."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.subject), []).append(finding)
    return [group[0] if len(group) == 1 else _joined(group) for group in groups.values()]


def _joined(group: list[Finding]) -> Finding:
    return replace(
        group[0],
        # Several chains behind one absent key: its reason once.
        why=joined(finding.why for finding in group),
        where=tuple(dict.fromkeys(site for finding in group for site in finding.where)),
        remedies=tuple(dict.fromkeys(remedy for finding in group for remedy in finding.remedies)),
        layers=tuple(dict.fromkeys(layer for finding in group for layer in finding.layers)),
        # Another cause of one of them is not said away with the others.
        cause=group[0].cause if len({finding.cause for finding in group}) == 1 else "",
    )


def _judge(evidence: Evidence, row: LookupRow) -> Iterator[Finding]:
    decisions = [evidence.decide(key) for key in evidence.evaluated(row)]
    found = decisions[-1].chosen is not None
    absent = decisions[:-1] if found else decisions
    if not absent:
        return
    if row.requested_by is not None:
        yield caused(evidence, _not_honored(evidence, row, absent), absent[0])
        return
    unexcused = [d for d in absent if evidence.excuse(d.key) is None and not _is_left_out(evidence, row, d, found)]
    if not found and row.kind == "required" and not unexcused:
        yield _waived_required(evidence, row, absent)
    for decision in (d for d in unexcused if d.cause == "DISABLED"):
        yield _finding(row, "DISABLED", decision.key, decision.reason, _remedies(evidence, decision))
    unexcused = [d for d in unexcused if d.cause != "DISABLED"]
    if unexcused and not row.is_chain:
        only = unexcused[0]
        finding = _finding(row, only.cause, only.key, only.reason, _remedies(evidence, only))
        yield caused(evidence, finding, only)
    elif unexcused:
        yield _chain(evidence, row, decisions, unexcused, found)


def _is_left_out(evidence: Evidence, row: LookupRow, decision: Decision, found: bool) -> bool:
    """Whether a key was taken away to compare, and the layers have something else."""
    can_do_without = found or row.kind == "optional"
    return can_do_without and decision.cause == "DISABLED" and decision.key in evidence.options.without


def _finding(row: LookupRow, code: str, subject: object, why: str, remedies: Iterable[str]) -> Finding:
    return Finding(code, str(subject), why, tuple(_sites(row)), tuple(remedies), tuple(row.layers))


def _sites(row: LookupRow) -> Iterator[str]:
    return (f"{site} ({count}x)" if count > 1 else site for site, count in row.sites.items())


def _not_honored(evidence: Evidence, row: LookupRow, absent: list[Decision]) -> Finding:
    missing = absent[0]
    why = message("lookup.not_honored", lever=row.requested_by, key=missing.key, reason=quoted(missing.reason))
    remedies = (*_provide(evidence, missing), message("remedy.or_unset", lever=row.requested_by))
    return _finding(row, "REQUEST_NOT_HONORED", row.requested_by, why, remedies)


def _waived_required(evidence: Evidence, row: LookupRow, absent: list[Decision]) -> Finding:
    waiver = evidence.waivers[absent[-1].key]
    keys = tuple(d.key for d in absent)
    why = message("waived_required", keys=keys, reason=quoted(absent[-1].reason))
    remedies = (message("remedy.drop_waiver", where=waiver.where), *_provide(evidence, absent[-1]), GATE)
    remedies += _hint(evidence, absent[-1])
    return _finding(row, "WAIVED_REQUIRED", absent[0].key, why, remedies)


def _chain(
    evidence: Evidence, row: LookupRow, decisions: list[Decision], unexcused: list[Decision], found: bool
) -> Finding:
    chain = " > ".join(map(str, row.members))
    if found:
        code, outcome = "FALLBACK_TAKEN", message("lookup.fell_back", key=decisions[-1].key)
    else:
        code = "MISSING" if row.kind == "required" else "FALLBACK_TAKEN"
        outcome = message("lookup.no_member")
    reasons = (message("lookup.reason", key=d.key, reason=quoted(d.reason)) for d in unexcused)
    why = joined((message("lookup.chain", chain=chain, outcome=outcome), *reasons))
    # The finding is about one key, and to allow that key excuses it: take one that nobody allowed, if there is one.
    about = next((d for d in unexcused if d.key not in evidence.options.allow_unresolved), unexcused[0])
    finding = _finding(row, code, about.key, why, _remedies(evidence, about))
    return caused(evidence, finding, about)


def _remedies(evidence: Evidence, decision: Decision) -> tuple[str, ...]:
    """Install or repair the provider; gate the lookup; declare it; and what the key might be a misspelling of.

    What is no key, no plugin can register and no manifest declare.
    """
    if decision.key.problem:
        return (message("remedy.correct_key"), *_hint(evidence, decision))
    return (*_provide(evidence, decision), GATE, declare(evidence, decision.key), *_hint(evidence, decision))


def _provide(evidence: Evidence, decision: Decision) -> tuple[str, ...]:
    key = decision.key
    blocked = evidence.catalog.absent_provider(key)
    if decision.cause == "DISABLED":
        return (message("remedy.enable", key=decision.renamed_to or key),)
    if decision.cause == "SHADOWED":
        return (message("remedy.add_func", func=key.func, module=key.module),)
    if blocked is not None and blocked.status == "blocked":
        return (unblock(blocked),)
    if decision.cause == "WRONG_ARCH":
        return (message("remedy.install_for", key=key, arch=str(evidence.target.arch or CPU)),)
    if decision.candidates and all(is_host_only(c.registered.spec) for c in decision.candidates):
        return _only_on_the_host(evidence, key)
    return (message("remedy.install", key=key),)


def _only_on_the_host(evidence: Evidence, key: KernelKey) -> tuple[str, ...]:
    """Nothing is broken: a kernel for this target has yet to be installed, or written."""
    install = message("remedy.write_kernel", key=key, arch=str(evidence.target.arch))
    return (install,) if evidence.is_replay else (install, message("remedy.choose_target", target=CPU))


def _hint(evidence: Evidence, decision: Decision) -> tuple[str, ...]:
    near = evidence.selector.near_names(decision.key) if not decision.candidates else []
    return (message("remedy.misspelt", near=tuple(map(parse_key, near))),) if near else ()


def declare(evidence: Evidence, key: KernelKey) -> Message:
    """Say how a waiver excuses a key; or why the one that is there does not."""
    if key in evidence.required_keys:
        return message("remedy.required")
    if elsewhere := " and ".join(evidence.scope_problems(key)):
        return message("remedy.waiver_scope", scope=elsewhere)
    if meant := evidence.idle_waivers.like(key):
        waiver = evidence.waivers[parse_key(meant[0])]
        return message("remedy.waiver_key", where=waiver.where, key=waiver.key)
    return message("remedy.declare", manifest=evidence.manifest.path.name, module=key.module, func=key.func)


def renamed_keys(evidence: Evidence) -> list[Finding]:
    """Report lookups that used an old name."""
    return merge(
        _finding(
            row,
            "KEY_RENAMED",
            key,
            message("key_renamed", key=key, renamed=renamed),
            (message("remedy.look_up", renamed=renamed, provider=str(decision.chosen.provider)),),
        )
        for row in evidence.rows
        for key in evidence.evaluated(row)
        if (decision := evidence.decide(key)).chosen is not None and (renamed := decision.renamed_to) is not None
    )


def slow_tiers(evidence: Evidence) -> list[Finding]:
    """Report device kernels of tier reference that would serve."""
    return merge(
        _finding(
            row,
            "SLOW_TIER",
            key,
            message("slow_tier", provider=str(decision.chosen.provider), key=key, target=str(evidence.target)),
            (message("remedy.install_fast", key=key), GATE),
        )
        for row in evidence.rows
        for key in evidence.evaluated(row)
        if (decision := evidence.decide(key)).is_slow and decision.chosen is not None
    )


def signatures(evidence: Evidence) -> list[Finding]:
    """Report kernels that implement another contract than the key's owner does."""
    found = []
    owners: dict[KernelKey, str] = {}
    for row in evidence.rows:
        for key in evidence.evaluated(row):
            chosen = evidence.decide(key).chosen
            if key not in owners:
                owners[key] = owner_contract(evidence.catalog, evidence.decide(key).renamed_to or key)
            owner = owners[key]
            if chosen is None or not owner or not chosen.spec.contract or chosen.spec.contract == owner:
                continue
            contracts = {"contract": chosen.spec.contract, "owner": owner}
            why = message("signature_mismatch", provider=str(chosen.provider), key=key, **contracts)
            remedies = (message("remedy.implement", contract=owner), message("remedy.own_key"))
            found.append(_finding(row, "SIGNATURE_MISMATCH", key, why, remedies))
    return merge(found)


def owner_contract(catalog: Catalog, key: KernelKey) -> str:
    """Return the contract that a key's owner gives it: the host, else the plugin whose namespace it lies in."""
    registered = catalog.by_key.get(key, ())
    plugins = catalog.plugins_by_name
    of_host = [r for r in registered if r.provider.is_host]
    of_plugin = [r for r in registered if (row := plugins.get(r.provider.plugin)) and row.owns_module(key.module)]
    return next((r.spec.contract for r in (*of_host, *of_plugin)), "")


def layouts(evidence: Evidence) -> list[Finding]:
    """Report weight layouts that a chosen kernel reads and the plan does not build: one finding for all its weights."""
    causes: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for copy in evidence.missing_layouts:
        readers = tuple(sorted(map(str, copy.readers)))
        causes.setdefault((copy.layout, readers), []).append(copy.weight)
    return [
        Finding(
            "LAYOUT_MISSING",
            f"{weights[0] if len(weights) == 1 else f'{len(weights)} weights'} in {layout}",
            message("layout_missing" if len(weights) == 1 else "layout_missing.many", readers=readers),
            remedies=(message("remedy.build_copy"), message("remedy.other_kernels")),
            layers=tuple(weights),
        )
        for (layout, readers), weights in causes.items()
    ]
