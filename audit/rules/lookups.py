"""Rules about what was asked for: absent keys, chains that fell back, and kernels that are there but wrong."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kernel_muster.audit.evidence import Evidence
from kernel_muster.audit.rules.causes import DECLARE, caused, of_blocked_plugins, unblock
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey, parse_key
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.records import LookupRow
from kernel_muster.registry.selection.select import Decision, is_host_only

GATE = "or gate the lookup on the model's configuration, so that it is never issued"


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
        why="; ".join(dict.fromkeys(clause for finding in group for clause in finding.why.split("; "))),
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
    why = f"{row.requested_by} asked for {missing.key}, which is absent: {missing.reason}"
    remedies = (*_provide(evidence, missing), f"or unset {row.requested_by}")
    return _finding(row, "REQUEST_NOT_HONORED", row.requested_by, why, remedies)


def _waived_required(evidence: Evidence, row: LookupRow, absent: list[Decision]) -> Finding:
    waiver = evidence.waivers[absent[-1].key]
    keys = ", ".join(str(d.key) for d in absent)
    why = f"{keys} is absent and waived, but the model cannot run without it: {absent[-1].reason}"
    remedies = (f"drop the waiver at {waiver.where}", *_provide(evidence, absent[-1]), GATE)
    remedies += _hint(evidence, absent[-1])
    return _finding(row, "WAIVED_REQUIRED", absent[0].key, why, remedies)


def _chain(
    evidence: Evidence, row: LookupRow, decisions: list[Decision], unexcused: list[Decision], found: bool
) -> Finding:
    chain = " > ".join(map(str, row.members))
    reasons = "; ".join(f"{d.key}: {d.reason}" for d in unexcused)
    if found:
        code, outcome = "FALLBACK_TAKEN", f"fell back to {decisions[-1].key}"
    else:
        code, outcome = ("MISSING" if row.kind == "required" else "FALLBACK_TAKEN"), "no member resolves"
    # The finding is about one key, and to allow that key excuses it: take one that nobody allowed, if there is one.
    about = next((d for d in unexcused if d.key not in evidence.options.allow_unresolved), unexcused[0])
    finding = _finding(row, code, about.key, f"chain {chain}: {outcome}; {reasons}", _remedies(evidence, about))
    return caused(evidence, finding, about)


def _remedies(evidence: Evidence, decision: Decision) -> tuple[str, ...]:
    """Install or repair the provider; gate the lookup; declare it; and what the key might be a misspelling of.

    What is no key, no plugin can register and no manifest declare.
    """
    if decision.key.problem:
        return ("correct the key that is asked for: both names are small letters, digits and _",
                *_hint(evidence, decision))  # fmt: skip
    return (*_provide(evidence, decision), GATE, declare(evidence, decision.key), *_hint(evidence, decision))


def _provide(evidence: Evidence, decision: Decision) -> tuple[str, ...]:
    key = decision.key
    blocked = evidence.catalog.absent_provider(key)
    if decision.cause == "DISABLED":
        return (f"take {decision.renamed_to or key} out of MUSTER_DISABLE",)
    if decision.cause == "SHADOWED":
        return (f"add {key.func} to the distribution that replaces module {key.module}, or uninstall it",)
    if blocked is not None and blocked.status == "blocked":
        return (unblock(blocked),)
    if decision.cause == "WRONG_ARCH":
        return (f"install a distribution that provides {key} for {evidence.target.arch or 'cpu'}",)
    if decision.candidates and all(is_host_only(c.registered.spec) for c in decision.candidates):
        return _only_on_the_host(evidence, key)
    return (f"install the distribution that provides {key}, or repair it",)


def _only_on_the_host(evidence: Evidence, key: KernelKey) -> tuple[str, ...]:
    """Nothing is broken: a kernel for this target has yet to be installed, or written."""
    arch = evidence.target.arch
    install = f"no installed distribution ships a kernel of {key} for {arch}: install one that does, or write it"
    return (install,) if evidence.is_replay else (install, "or choose --target cpu")


def _hint(evidence: Evidence, decision: Decision) -> tuple[str, ...]:
    near = evidence.selector.near_names(decision.key) if not decision.candidates else []
    return (f"or, if the name is misspelt: did you mean {' or '.join(near)}?",) if near else ()


def declare(evidence: Evidence, key: KernelKey) -> str:
    """Say how a waiver excuses a key; or why the one that is there does not."""
    if key in evidence.required_keys:
        return "it is required: a waiver cannot excuse it"
    if elsewhere := " and ".join(evidence.scope_problems(key)):
        return f"or correct the scope in the manifest: {elsewhere}"
    if meant := evidence.idle_waivers.like(key):
        waiver = evidence.waivers[parse_key(meant[0])]
        return f"or correct the waiver at {waiver.where}: it names {waiver.key}, which nothing asks for"
    entry = f'[expected_absent.{key.module}] {key.func} = "..."'
    return f"{DECLARE}with the true reason, in {evidence.manifest.path.name}: {entry}"


def renamed_keys(evidence: Evidence) -> list[Finding]:
    """Report lookups that used an old name."""
    return merge(
        _finding(
            row,
            "KEY_RENAMED",
            key,
            f"{key} is now called {renamed}",
            (f"look up {renamed}; the old name goes away with a later version of {decision.chosen.provider}",),
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
            f"only a kernel of tier reference, by {decision.chosen.provider}, serves {key} on {evidence.target}",
            (f"install a distribution with a fast kernel for {key}", GATE),
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
            why = f"{chosen.provider} implements contract {chosen.spec.contract}, but {key} has contract {owner}"
            remedies = (f"implement contract {owner}", "or register the kernel under a key of its own")
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
            f"read by {', '.join(readers)}, but the layout plan does not build {_copies(len(weights))}",
            remedies=("build the copy in the model's layout plan", "or choose kernels that read a layout it builds"),
            layers=tuple(weights),
        )
        for (layout, readers), weights in causes.items()
    ]


def _copies(count: int) -> str:
    return "this copy" if count == 1 else "these copies"
