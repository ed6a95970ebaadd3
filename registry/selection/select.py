"""Selection: which of the registered kernels serves a key on a target, and why the others do not.

A decision is a value: every candidate is accepted, or rejected by one named rule with a reason.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice

from kernel_muster.registry.contract.specs import KernelSpec, Registered
from kernel_muster.registry.distributions import normal_name, same_distribution
from kernel_muster.registry.hardware.arch import CPU, CodeArch
from kernel_muster.registry.hardware.target import Target
from kernel_muster.registry.keys import KernelKey, KeyNames, parse_key
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.messages.message import Message, joined, message, quoted
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.suggestions import named
from kernel_muster.registry.values import frozen
from kernel_muster.registry.wording import listed

_NO_NAMES = KeyNames(())


@frozen
class Candidate:
    """One registration under test: eligible, or rejected by ``rule`` because of ``reason``."""

    registered: Registered
    rule: str = ""
    reason: str = ""

    @property
    def is_rejected(self) -> bool:
        """Whether a rule rejected it."""
        return bool(self.rule)


@frozen
class Decision:
    """What selection says about one key. ``cause`` is a finding code where nothing was chosen."""

    key: KernelKey
    chosen: Registered | None
    candidates: tuple[Candidate, ...] = ()
    cause: str = ""
    reason: str = ""
    renamed_to: KernelKey | None = None
    rivals: tuple[Registered, ...] = ()  # equal to the chosen one: DUPLICATE_KERNEL

    @property
    def circle(self) -> tuple[Registered, ...]:
        """Those that override each other in a circle: whoever serves then, nobody meant it."""
        overridden = {
            c.registered.provider.normal_name: c.registered for c in self.candidates if c.rule == "overridden"
        }
        circles = _in_circles(overridden)
        return tuple(one for name, one in overridden.items() if name in circles)

    @property
    def is_slow(self) -> bool:
        """Whether a device kernel of tier reference was chosen."""
        return self.chosen is not None and self.chosen.spec.tier == "reference" and not is_host_only(self.chosen.spec)


def _in_circles(overridden: Mapping[str, Registered]) -> set[str]:
    """Return the distributions that come back to themselves in the chain of overrides."""
    found: set[str] = set()
    seen: set[str] = set()
    for first in overridden:
        path: dict[str, int] = {}  # of this walk, with their places in it
        name: str | None = first
        while name is not None and name in overridden and name not in seen:
            seen.add(name)
            path[name] = len(path)
            overrides = overridden[name].spec.overrides
            name = None if overrides is None else normal_name(overrides)
        if name in path:
            found.update(islice(path, path[name], None))
    return found


def is_host_only(spec: KernelSpec) -> bool:
    """Whether a spec runs on the host only."""
    return all(entry.kind == "host" for entry in spec.code_archs)


def parse_prefer(text: str, known: KeyNames = _NO_NAMES) -> tuple[dict[KernelKey, str], list[str]]:
    """Read ``module::func=distribution,...``; return the choices and what is malformed, with known keys it may mean."""
    choices: dict[KernelKey, str] = {}
    problems = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, distribution = item.partition("=")
        try:
            chosen = choices.setdefault(parse_key(key.strip()), distribution.strip())
        except ValueError as error:
            problems.append(f"{error}{named(known.meant(key))}")
        else:
            if not same_distribution(chosen, distribution.strip()):
                problems.append(f"{key.strip()} is to be served by {chosen} and by {distribution.strip()}")
        if not (separator and distribution.strip()):
            problems.append(f"{item!r} does not read module::func=distribution")
    return choices, problems


def parse_key_list(text: str, known: KeyNames = _NO_NAMES) -> tuple[list[KernelKey], list[str]]:
    """Read ``module::func,...``; return the keys and what is malformed, with known keys that may be meant."""
    keys, problems = [], []
    for item in filter(None, (part.strip() for part in text.split(","))):
        try:
            keys.append(parse_key(item))
        except ValueError as error:
            problems.append(f"{error}{named(known.meant(item))}")
    return keys, problems


def near_keys(catalog: Catalog, key: KernelKey) -> list[str]:
    """Return registered keys that one may be meant for."""
    return catalog.key_names.like(key)


class Selector:
    """Decides each key once, for one target and one set of levers."""

    def __init__(self, catalog: Catalog, target: Target, levers: Levers) -> None:
        self.catalog, self.target, self.levers = catalog, target, levers
        self._decisions: dict[KernelKey, Decision] = {}
        self.disabled = frozenset(parse_key_list(str(levers["MUSTER_DISABLE"] or ""))[0])
        self.prefer = parse_prefer(str(levers["MUSTER_PREFER"] or ""))[0]

    def is_for(self, catalog: Catalog, target: Target, levers: Levers) -> bool:
        """Whether its decisions hold for exactly these."""
        return self.catalog is catalog and self.target is target and self.levers is levers

    def decide(self, key: KernelKey) -> Decision:
        """Return the decision about a key; the same object each time."""
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decisions.setdefault(key, self._decide(key))
        return decision

    def _decide(self, key: KernelKey) -> Decision:
        registered = self.catalog.by_key.get(key)
        if registered is None:
            return self._renamed_or_missing(key)
        if key in self.disabled:
            reason = message("decision.disabled", key=key)
            return Decision(key, None, tuple(Candidate(r, "disabled", reason) for r in registered), "DISABLED", reason)
        return self._selected(key, registered)

    def if_enabled(self, key: KernelKey) -> Decision:
        """Return the decision about a key as it were if MUSTER_DISABLE named no key."""
        key = key if key in self.catalog.by_key else self.catalog.by_alias.get(str(key), key)
        registered = self.catalog.by_key.get(key)
        return self._selected(key, registered) if registered else self._renamed_or_missing(key)

    def _selected(self, key: KernelKey, registered: tuple[Registered, ...]) -> Decision:
        candidates = self._apply_rules(key, registered)
        eligible = [c.registered for c in candidates if not c.is_rejected]
        if not eligible:
            return self._none_left(key, candidates)
        best = self._best(eligible)
        chosen, rivals = best[0], tuple(best[1:])
        preferred = [r for r in best if self._is_preferred(r)]
        if len(preferred) == 1:
            chosen, rivals = preferred[0], ()
        losers = tuple(
            c if c.is_rejected or c.registered is chosen else Candidate(c.registered, *self._why_worse(c, chosen))
            for c in candidates
        )
        return Decision(key, chosen, losers, rivals=rivals)

    def _is_preferred(self, registered: Registered) -> bool:
        name = self.prefer.get(registered.spec.kernel_key)
        return name is not None and same_distribution(name, registered.provider.distribution)

    def _renamed_or_missing(self, key: KernelKey) -> Decision:
        renamed = self.catalog.by_alias.get(str(key))
        if renamed is not None and key in self.disabled:  # the old name alone is off
            return Decision(key, None, (), "DISABLED", message("decision.disabled", key=key))
        if renamed is not None:
            found = self.decide(renamed)
            return Decision(key, found.chosen, found.candidates, found.cause, found.reason, renamed, found.rivals)
        return Decision(key, None, (), "MISSING", self._missing(key))

    def _missing(self, key: KernelKey) -> Message:
        """Return why a key is missing: the plugin that would provide it, or the keys that may be meant."""
        row = self.catalog.absent_provider(key)
        if row is not None:
            plugin = {"plugin": row.name, "distribution": row.distribution}
            how, state = message(self._knows(key)), message(f"plugin.{row.status}")
            return message("decision.missing_from", key=key, how=how, state=state, **plugin)
        if modules := self.catalog.key_names.modules_of(key.func):
            return message("decision.missing_here", key=key, func=key.func, modules=listed(modules))
        near = tuple(map(parse_key, self.near_names(key)))
        if key.problem:
            return message("decision.no_key", key=key, problem=key.problem, near=near)
        return message("decision.missing", key=key, near=near)

    def _knows(self, key: KernelKey) -> str:
        """Return the template of the link between an absent plugin and a key."""
        if key in self.catalog.absent_keys:
            return "plugin.provides"
        return "plugin.provided" if key in self.catalog.last_keys else "plugin.owns"

    def near_names(self, key: KernelKey) -> list[str]:
        """Return registered keys that one may be meant for."""
        return near_keys(self.catalog, key)

    def _apply_rules(self, key: KernelKey, registered: Iterable[Registered]) -> tuple[Candidate, ...]:
        """Reject by architecture, then by replaced module, then by override."""
        candidates = [Candidate(r, *self._arch_rule(r.spec)) for r in registered]
        candidates = [c if c.is_rejected else self._unless_replaced(key, c) for c in candidates]
        overriders = {
            normal_name(c.registered.spec.overrides): c.registered
            for c in candidates
            if not c.is_rejected and c.registered.spec.overrides
        }
        return tuple(
            Candidate(
                c.registered, "overridden", message("decision.overridden", provider=str(overriders[name].provider))
            )
            if not c.is_rejected
            and (name := c.registered.provider.normal_name) in overriders
            and overriders[name].provider.normal_name != name
            else c
            for c in candidates
        )

    def _unless_replaced(self, key: KernelKey, candidate: Candidate) -> Candidate:
        provider = candidate.registered.provider
        by = self.replacements.get(key.module, {}).get(provider.normal_name)
        if by is None:
            return candidate
        reason = message("decision.replaced", module=key.module, distribution=provider.distribution, by=by)
        return Candidate(candidate.registered, "replaced", reason)

    @cached_property
    def replacements(self) -> Mapping[str, Mapping[str, str]]:
        """module -> {replaced distribution: replacing one}, where the replacing one has a kernel for this target."""
        found: dict[str, dict[str, str]] = {}
        for registered in self.catalog.kernels:
            spec = registered.spec
            if spec.replaces_module is None or self._arch_rule(spec)[0]:
                continue
            module, replaced = spec.replaces_module
            replaced = normal_name(replaced)
            if spec.kernel_key.module == module and registered.provider.normal_name != replaced:
                found.setdefault(module, {})[replaced] = registered.provider.distribution
        return found

    def _arch_rule(self, spec: KernelSpec) -> tuple[str, str]:
        reasons = [entry.rejects(self.target.arch) for entry in spec.code_archs]
        if None in reasons:
            return "", ""
        needed = [entry.text for entry in spec.code_archs if entry.kind != "host"]
        if not needed:
            return "host", quoted(str(reasons[0]))
        return "arch", message("decision.arch", needed=needed, target=str(self.target.arch or CPU))

    def _none_left(self, key: KernelKey, candidates: tuple[Candidate, ...]) -> Decision:
        rules = [candidate.rule for candidate in candidates]
        if "overridden" in rules:  # only a circle of overrides leaves nobody; BAD_OVERRIDE reports it
            first = next(c.registered for c in candidates if c.rule == "overridden")
            return Decision(key, first, candidates)
        for rule, cause in (("replaced", "SHADOWED"), ("arch", "WRONG_ARCH"), ("host", "MISSING")):
            if rule in rules:
                reasons = sorted({c.reason for c in candidates if c.rule == rule})
                return Decision(key, None, candidates, cause, joined(reasons))
        raise AssertionError(f"{key}: nothing eligible and nothing rejected")

    def _fit(self, spec: KernelSpec) -> tuple[bool, tuple[int, tuple[int, int]]]:
        return spec.tier == "fast", self._closest(spec).specificity

    def _closest(self, spec: KernelSpec) -> CodeArch:
        accepted = [entry for entry in spec.code_archs if entry.rejects(self.target.arch) is None]
        return max(accepted, key=lambda entry: entry.specificity)

    def _best(self, eligible: list[Registered]) -> list[Registered]:
        best = max(self._fit(r.spec) for r in eligible)
        return [r for r in eligible if self._fit(r.spec) == best]

    def _why_worse(self, candidate: Candidate, chosen: Registered) -> tuple[str, str]:
        spec = candidate.registered.spec
        if (spec.tier == "fast") != (chosen.spec.tier == "fast"):
            return "tier", message("decision.tier", tier=spec.tier, serving=chosen.spec.tier)
        if self._fit(spec) != self._fit(chosen.spec):
            less, more = str(self._closest(spec)), str(self._closest(chosen.spec))
            return "specificity", message("decision.specificity", arch=less, serving=more)
        if self._is_preferred(chosen):
            return "preferred", message("decision.preferred", distribution=chosen.provider.distribution)
        return "duplicate", message("decision.duplicate", provider=str(chosen.provider))
