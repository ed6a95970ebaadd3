"""Rules that compare plugins with each other: names that collide, namespaces, contracts, overrides."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec, PythonKernel
from kernel_muster.registry.discovery.conformance import call_problems
from kernel_muster.registry.discovery.loading import watch_failed
from kernel_muster.registry.distributions import normal_name
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey, key_problem, parse_key
from kernel_muster.registry.levers import CORE_LEVERS, PREFIX, Lever
from kernel_muster.registry.messages.message import Message, joined, message
from kernel_muster.registry.plugin_code.watch import Outcome, watched
from kernel_muster.registry.selection.catalog import PluginRow
from kernel_muster.registry.suggestions import Names
from kernel_muster.registry.wording import MOST_NAMED, listed

Items = Mapping[str, Sequence[Any]]
Plugin = tuple[PluginRow, Items]
#: The plugin with a problem, by its name and the problem: a row takes long to hash.
Problems = dict[tuple[str, str], PluginRow]


@dataclass
class Rejected:
    """The plugins that these rules refuse, and why."""

    plugins: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding, plugins: Iterable[str]) -> None:
        """Refuse some plugins because of one finding."""
        self.findings.append(finding)
        self.plugins.update(plugins)


def check_together(
    plugins: Sequence[Plugin], unsound: Sequence[Plugin] = (), timeout_s: float = 10
) -> Rejected:  # fmt: skip
    """Apply all rules to plugins that are sound by themselves.

    What unsound ones would have registered counts as known: that it is missing is their finding, not their users'.
    """
    rejected = Rejected()
    for hook, kind in (
        ("muster_contracts", "contract"),
        ("muster_levers", "lever"),
        ("muster_models", "model builder"),
    ):
        _unique_names(plugins, hook, kind, rejected)
    opened = _open_keys(plugins, unsound, rejected)
    _namespaces(plugins, unsound, opened, rejected)
    _open_contracts(plugins, opened, rejected)
    _aliases(plugins, rejected)
    _contracts(plugins, unsound, rejected)
    _opt_ins(plugins, unsound, rejected)
    _functions(plugins, rejected, timeout_s)
    _weight_layouts(plugins, rejected)
    check_overrides(plugins, rejected, unsound)
    return rejected


def _specs(items: Items) -> Sequence[KernelSpec]:
    return items.get("muster_kernels", ())


def contracts_of(items: Items) -> Iterable[Contract]:
    """Return the well-formed contracts among a plugin's items."""
    found = (item for item in items.get("muster_contracts", ()) if isinstance(item, Contract))
    return (contract for contract in found if isinstance(contract.name, str))


def _opaque(unsound: Sequence[Plugin], hook: str) -> tuple[PluginRow, ...]:
    """Return the plugins that did not load and gave nothing of a hook: what they would have given, nobody knows."""
    return tuple(row for row, items in unsound if not items.get(hook))


def _replaces(spec: KernelSpec, distributions: Container[str]) -> bool:
    """Whether a spec replaces something of one of these distributions, whose names are in normal form."""
    replaced = (spec.overrides, None if spec.replaces_module is None else spec.replaces_module[1])
    return any(name is not None and normal_name(name) in distributions for name in replaced)


def _where(row: PluginRow) -> str:
    return f"{row.distribution} {row.version} ({row.value})"


def _unique_names(plugins: Sequence[Plugin], hook: str, kind: str, rejected: Rejected) -> None:
    """One name means one thing. The host keeps a name that somebody else takes too."""
    owners: dict[str, list[PluginRow]] = {}
    for row, items in plugins:
        for item in items.get(hook, ()):
            owners.setdefault(item.name, []).append(row)
    core = {lever.name for lever in CORE_LEVERS} if hook == "muster_levers" else set()
    for name, rows in sorted(owners.items()):
        if len(rows) < 2 and name not in core:
            continue
        guests = [row for row in rows if not row.is_host] or rows
        rejected.add(
            Finding(
                "BAD_SPEC",
                guests[0].name,
                message("bad_spec.declared_twice", kind=kind, name=name, count=len(rows) + (name in core)),
                tuple(_where(row) for row in rows),
                (message("remedy.own_name", kind=kind, distribution=guests[0].distribution),),
            ),
            (row.name for row in guests),
        )


def _open_keys(plugins: Sequence[Plugin], unsound: Sequence[Plugin], rejected: Rejected) -> dict[KernelKey, str]:
    """Return the keys that anybody may provide, each with its one contract; a plugin opens keys of its own modules."""
    given = [(row, key, contract.name) for row, items in (*plugins, *unsound)
             for contract in contracts_of(items) for key in _opened_by(contract)]  # fmt: skip
    opened: dict[KernelKey, str] = {}
    # The host keeps a key that somebody else opens too.
    for row, key, name in sorted(given, key=lambda one: not one[0].is_host):
        if not _owns(row, key):
            why = message("bad_spec.opens_foreign", contract=name, key=key, namespace=row.namespace)
        elif opened.setdefault(key, name) != name:
            why = message("bad_spec.opened", contract=name, key=key, other=opened[key])
        else:
            continue
        remedies = (message("remedy.open_own"),)
        rejected.add(Finding("BAD_SPEC", row.name, why, (_where(row),), remedies), (row.name,))
    return opened


def _opened_by(contract: Contract) -> Iterable[KernelKey]:
    """Return the well-formed keys that a contract opens; one that did not load may hold anything."""
    keys = contract.open_keys if isinstance(contract.open_keys, tuple) else ()
    return (parse_key(key) for key in keys if not key_problem(key))


def _namespaces(
    plugins: Sequence[Plugin], unsound: Sequence[Plugin], opened: Mapping[KernelKey, str], rejected: Rejected
) -> None:
    """New keys of third parties live in modules that begin with their plugin's name, unless a contract opens them."""
    known = [(row, spec.kernel_key) for row, items in plugins for spec in _specs(items)]
    known += [(row, key) for row, _ in unsound for key in row.keys]
    owned = {key for row, key in known if _owns(row, key)} | opened.keys()
    opaque = {normal_name(row.distribution) for row in _opaque(unsound, "muster_kernels")}
    hidden = _opaque(unsound, "muster_contracts")
    contracts = _contract_names((*plugins, *unsound))
    names = Names(map(str, owned))
    for row, items in plugins:
        # What replaces the kernel of a plugin that failed is no new key: that it failed is a finding already. What
        # implements the contract of one may be open under it.
        new = {spec.kernel_key for spec in _specs(items) if not _replaces(spec, opaque)}
        of_others = {spec.kernel_key for spec in _specs(items) if hidden and spec.contract not in contracts}
        if strangers := sorted(new - owned - of_others):
            near = names.near(str(strangers[0]))
            values = {"plugin": row.name, "namespace": row.namespace, "near": near}
            why = message("bad_spec.namespace", keys=strangers, **values)
            remedies = (message("remedy.namespace", namespace=row.namespace),)
            rejected.add(Finding("BAD_SPEC", row.name, why, (_where(row),), remedies), (row.name,))


def _open_contracts(plugins: Sequence[Plugin], opened: Mapping[KernelKey, str], rejected: Rejected) -> None:
    """A kernel of an open key implements the contract that opens it: the model calls it so."""
    known = _contract_names(plugins)
    for row, items in plugins:
        for spec in _specs(items):
            wanted = opened.get(spec.kernel_key, spec.contract)
            if spec.contract == wanted or spec.contract not in known:
                continue
            why = message("bad_spec.open_contract", key=spec.kernel_key, contract=spec.contract, wanted=wanted)
            remedies = (
                message("remedy.open_contract", contract=wanted, key=spec.key),
                message("remedy.choose_own_key"),
            )
            rejected.add(Finding("BAD_SPEC", row.name, why, (_where(row),), remedies), (row.name,))


def _contract_names(plugins: Iterable[Plugin]) -> set[str]:
    return {contract.name for _, items in plugins for contract in contracts_of(items)}


def _owns(row: PluginRow, key: KernelKey) -> bool:
    return row.is_host or row.owns_module(key.module)


def _aliases(plugins: Sequence[Plugin], rejected: Rejected) -> None:
    """An old name means one key, is none itself, and lies in the namespace of who gives it, or of the key's owner."""
    clashing = check_alias_claims(plugins, rejected)
    granted = {(alias, key) for row, alias, key in _given(plugins) if _owns(row, alias)}
    problems: Problems = {}
    for row, alias, key in _given(plugins):
        if alias not in clashing and (alias, key) not in granted:
            why = message("bad_spec.alias_foreign", key=key, alias=alias, namespace=row.namespace)
            problems[row.name, why] = row
    _refuse_aliases(problems, rejected)


def check_alias_claims(plugins: Sequence[Plugin], rejected: Rejected) -> set[KernelKey]:
    """Refuse old names that are keys of their own, or that two keys have; return them."""
    claims: dict[KernelKey, set[KernelKey]] = {}
    given = _given(plugins)
    for _, alias, key in given:
        claims.setdefault(alias, set()).add(key)
    registered = {spec.kernel_key for _, items in plugins for spec in _specs(items)}
    has_guest = {alias for row, alias, _ in given if not row.is_host}
    several = {alias: listed(sorted(keys), separator=" and ") for alias, keys in claims.items() if len(keys) > 1}
    problems: Problems = {}
    for row, alias, key in given:
        if row.is_host and alias in has_guest:
            continue  # the host keeps a name that somebody else takes too
        if alias in registered:
            problems[row.name, message("bad_spec.alias_key", key=key, alias=alias)] = row
        elif alias in several:
            problems[row.name, message("bad_spec.alias_twice", alias=alias, keys=several[alias])] = row
    _refuse_aliases(problems, rejected)
    return {alias for alias, keys in claims.items() if alias in registered or len(keys) > 1}


def _given(plugins: Sequence[Plugin]) -> list[tuple[PluginRow, KernelKey, KernelKey]]:
    """Return who gives which old name to which key."""
    return [(row, parse_key(a), spec.kernel_key) for row, items in plugins for spec in _specs(items)
            for a in spec.aliases]  # fmt: skip


def _refuse_aliases(problems: Problems, rejected: Rejected) -> None:
    remedies = (message("remedy.alias"),)
    for (_, why), row in problems.items():
        rejected.add(Finding("BAD_SPEC", row.name, why, (_where(row),), remedies), (row.name,))


def _contracts(plugins: Sequence[Plugin], unsound: Sequence[Plugin], rejected: Rejected) -> None:
    """Each spec names a contract that somebody registers."""
    known = _contract_names((*plugins, *unsound))
    names, absent = Names(known), _listed(_opaque(unsound, "muster_contracts"))
    for row, items in plugins:
        for name, keys in _keys_by((spec.contract, spec) for spec in _specs(items) if spec.contract not in known):
            why = message("bad_spec.no_contract", keys=keys, contract=repr(name), near=names.near(name))
            remedies: tuple[Message, ...] = (message("remedy.return_contract"),)
            if absent:
                why = joined((why, message("bad_spec.unknown_rest", plugins=absent)))
                remedies = (message("remedy.first_load"), *remedies)
            rejected.add(Finding("BAD_SPEC", row.name, why, (_where(row),), remedies), (row.name,))


def _opt_ins(plugins: Sequence[Plugin], unsound: Sequence[Plugin], rejected: Rejected) -> None:
    """What a kernel waits for is a lever that somebody declares: nothing else can be set."""
    declared = (item for _, items in (*plugins, *unsound) for item in items.get("muster_levers", ()))
    known = {lever.name for lever in CORE_LEVERS}
    known |= {item.name for item in declared if isinstance(item, Lever) and isinstance(item.name, str)}
    names, absent = Names(known, PREFIX), _listed(_opaque(unsound, "muster_levers"))
    for row, items in plugins:
        waiting = ((spec.opt_in, spec) for spec in _specs(items) if spec.opt_in is not None)
        for name, keys in _keys_by((name, spec) for name, spec in waiting if name not in known):
            why = message("bad_spec.no_lever", keys=keys, lever=repr(name), near=names.near(name))
            remedies: tuple[Message, ...] = (message("remedy.declare_lever"),)
            if absent:
                why = joined((why, message("bad_spec.unknown_rest", plugins=absent)))
                remedies = (message("remedy.first_load"), *remedies)
            rejected.add(Finding("BAD_SPEC", row.name, why, (_where(row),), remedies), (row.name,))


def _keys_by(labelled: Iterable[tuple[str, KernelSpec]]) -> list[tuple[str, str]]:
    """Return each label with the keys of its specs, sorted."""
    keys: dict[str, list[str]] = {}
    for label, spec in labelled:
        keys.setdefault(label, []).append(spec.key)
    return [(label, ", ".join(sorted(keys[label]))) for label in sorted(keys)]


def _listed(rows: Iterable[PluginRow]) -> str:
    return listed([f"{row.name} ({row.status})" for row in rows])


def _functions(plugins: Sequence[Plugin], rejected: Rejected, timeout_s: float) -> None:
    """The function of a host kernel takes the parameters of its contract. A plugin's functions are its objects."""
    known = {contract.name: contract for _, items in plugins for contract in contracts_of(items)}
    for row, items in plugins:
        specs = [spec for spec in _specs(items) if isinstance(spec.backend, PythonKernel) and spec.contract in known]
        if not specs:
            continue
        check = partial(_call_problems, specs, known)
        outcome = Outcome(check()) if row.is_host else watched(check, timeout_s, f"plugin {row.name}")
        findings = [_bad_function(row, why) for why in outcome.value or ()]
        if outcome.value is None:
            when = "while its functions were compared with their contracts"
            findings = [watch_failed(row.name, _where(row), when, outcome, timeout_s)]
        for finding in findings:
            rejected.add(finding, (row.name,))


def _call_problems(specs: Sequence[KernelSpec], known: Mapping[str, Contract]) -> list[str]:
    return [f"{spec.key}: {why}" for spec in specs for why in call_problems(spec, known[spec.contract])]


def _bad_function(row: PluginRow, why: str) -> Finding:
    remedies = (message("remedy.parameters"),)
    return Finding("BAD_SPEC", row.name, why, (_where(row),), remedies)


def _weight_layouts(plugins: Sequence[Plugin], rejected: Rejected) -> None:
    """A kernel that takes a weight says in which layout: what reads no copy that a plan knows would never be used."""
    known = {contract.name: contract for _, items in plugins for contract in contracts_of(items)}
    for row, items in plugins:
        for spec in _specs(items):
            contract = known.get(spec.contract)
            if contract is None or spec.weight_layout is not None or not contract.signature.weights:
                continue
            names = ", ".join(param.name for param in contract.signature.weights)
            why = message("bad_spec.no_layout", key=spec.kernel_key, contract=contract.name, weights=names)
            remedies = (message("remedy.weight_layout"),)
            rejected.add(Finding("BAD_SPEC", row.name, why, (_where(row),), remedies), (row.name,))


def check_overrides(plugins: Sequence[Plugin], rejected: Rejected, unsound: Sequence[Plugin] = ()) -> None:
    """An override names a distribution, other than its own, that has the key (or the module), or that did not load."""
    offers = [(row.distribution, spec.kernel_key) for row, items in plugins for spec in _specs(items)]
    offers += [(row.distribution, key) for row, _ in unsound for key in row.keys]
    providers: dict[KernelKey, dict[str, str]] = {}  # the distributions by their normal names, sorted
    modules: dict[str, dict[str, str]] = {}
    for distribution, key in sorted(offers):
        providers.setdefault(key, {})[normal_name(distribution)] = distribution
        modules.setdefault(key.module, {})[normal_name(distribution)] = distribution
    unknown = {normal_name(row.distribution) for row in _opaque(unsound, "muster_kernels")}
    for row, items in plugins:
        for spec in _specs(items):
            for problem in _override_problems(row, spec, providers, modules, unknown):
                remedies = (message("remedy.correct_override"),)
                why = message("bad_override", key=spec.kernel_key, problem=problem)
                rejected.add(Finding("BAD_OVERRIDE", row.name, why, (_where(row),), remedies), (row.name,))


def _override_problems(
    row: PluginRow,
    spec: KernelSpec,
    providers: Mapping[KernelKey, Mapping[str, str]],
    modules: Mapping[str, Mapping[str, str]],
    unknown: set[str],
) -> Iterable[Message]:
    own = normal_name(row.distribution)

    def is_wrong(name: str, theirs: Mapping[str, str]) -> bool:
        normal = normal_name(name)
        return normal not in unknown and (normal == own or normal not in theirs)

    name = spec.overrides
    if name is not None and is_wrong(name, providers[spec.kernel_key]):
        others = _others(providers[spec.kernel_key], own)
        yield message("bad_override.distribution", distribution=name, others=others or "none")
    if spec.replaces_module is None:
        return
    module, name = spec.replaces_module
    if module != spec.kernel_key.module:
        yield message("bad_override.module", module=module, own=spec.kernel_key.module)
    elif is_wrong(name, modules[module]):
        others = _others(modules[module], own)
        yield message("bad_override.owner", distribution=name, module=module, others=others or "nobody else")


def _others(distributions: Mapping[str, str], own: str) -> str:
    """Return the distributions other than one; of thousands it reads the first alone."""
    first = islice((name for normal, name in distributions.items() if normal != own), MOST_NAMED)
    more = len(distributions) - MOST_NAMED - (own in distributions)
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
