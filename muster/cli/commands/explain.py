"""``muster explain``: the selection of a key's kernel, with its reasons."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from kernel_muster.cli import options
from kernel_muster.cli.contract_text import contract_data, contract_section
from kernel_muster.registry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel_muster.audit.render.sections import Entry, Section
    from kernel_muster.registry.contract.contracts import Contract
    from kernel_muster.registry.contract.specs import KernelSpec
    from kernel_muster.registry.levers import Setting
    from kernel_muster.registry.selection.select import Candidate, Decision, Selector

#: Of the JSON; 1.1 adds the models that ask for a key, and the decisions that reach it.
VERSION = "1.2"
Key = Annotated[
    str, typer.Argument(metavar="KEY|SITE", help="module::func, or a line of model code: layers/attention.py:29")
]


def explain(
    key: Key,
    target: options.Target = None,
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """Explain the selection for a key on a target, and the rejection of every other candidate.

    Every candidate is listed: accepted, or rejected by a rule, with the change that would select it. Next come the
    models with a lookup of the key, and the decisions and levers that reach it. Then come the levers that drop the key
    or choose another, with their current values. The last part is the contract: inputs, outputs and promises of the
    key's kernels. --verbose adds the contract's cases and the rest of each spec. For a SITE from a report, the output
    is all lookups at that line, their kernels, and the levers.

    Exit code: 0 a kernel serves, or one of each chain; 1 none does.
    """
    from kernel_muster.cli.booting import request_of
    from kernel_muster.cli.explain_asked import asking_data, asking_section, askings_of
    from kernel_muster.cli.explain_site import is_site, questions_at, site_data, site_sections
    from kernel_muster.cli.lists import Listing, find_levers, find_plugins, find_target, rows_of, show
    from kernel_muster.cli.process.exits import REFUSED
    from kernel_muster.registry.keys import parse_key
    from kernel_muster.registry.selection.select import Selector
    from kernel_muster.registry.suggestions import named

    request = request_of(plugins=plugin, no_plugins=no_plugin)
    catalog = find_plugins(request, output)
    try:
        parsed = None if is_site(key) else parse_key(key)
    except ValueError as error:
        hint = named(catalog.key_names.meant(key))
        raise UsageError(f"{error}, or a line of model code such as layers/attention.py:29{hint}") from None
    levers, findings = find_levers(catalog, request)
    found, no_target = find_target(target)
    rows = rows_of((*catalog.findings, *no_target, *findings))
    if found is None:
        return show(Listing("explanation", {"key": key}, (), rows), format, output, verbose=verbose)
    selector = Selector(catalog, found, levers)
    if parsed is None:
        questions = questions_at(key, selector)
        parts = tuple(site_sections(questions, selector))
        listing = Listing("site", site_data(key, questions, selector), parts, rows, version=VERSION)
        code = show(listing, format, output, verbose=verbose)
        return code if all(question.is_served(selector) for question in questions) else REFUSED
    decision = selector.decide(parsed)
    askings = askings_of(parsed, selector)
    data = {**_data(decision, selector), "asked": asking_data(askings)}
    parts = (*_sections(decision, selector, verbose, asking_section(askings, selector)),)
    listing = Listing("explanation", data, parts, rows, version=VERSION)
    code = show(listing, format, output, verbose=verbose)
    return code if decision.chosen is not None and not _trouble(decision) else REFUSED


def _trouble(decision: "Decision") -> str:
    """Return the code that refuses a boot although a kernel would serve."""
    return "BAD_OVERRIDE" if decision.circle else "DUPLICATE_KERNEL" if decision.rivals else ""


def _data(decision: "Decision", selector: "Selector") -> dict[str, Any]:
    from kernel_muster.audit.render.sections import value_text

    return {
        "key": str(decision.key),
        "renamed_to": str(decision.renamed_to or ""),
        "target": str(selector.target),
        "served_by": str(decision.chosen.provider) if decision.chosen else "",
        "cause": _trouble(decision) or decision.cause,
        "reason": decision.reason,
        "remedy": _remedy_of_absence(decision, selector) if decision.chosen is None else "",
        "candidates": [
            {
                "plugin": c.registered.provider.plugin,
                "distribution": c.registered.provider.distribution,
                "version": c.registered.provider.version,
                "archs": list(c.registered.spec.archs),
                "tier": c.registered.spec.tier,
                "contract": c.registered.spec.contract,
                "verdict": _verdict(c, decision),
                "rule": c.rule,
                "reason": c.reason,
                "change": _change(c, decision, selector),
            }
            for c in decision.candidates
        ],
        "levers": [
            {
                "name": setting.lever.name,
                "value": setting.value,
                "origin": setting.origin,
                "grammar": setting.lever.grammar,
                "doc": setting.lever.doc,
                "effects": {value_text(value): effect for value, effect in setting.lever.effects.items()},
            }
            for setting in _settings(decision, selector)
        ],
        "contracts": [contract_data(contract) for contract in _contracts(decision, selector)],
    }


def _contracts(decision: "Decision", selector: "Selector") -> "list[Contract]":
    catalog = selector.catalog
    names = {c.registered.spec.contract for c in decision.candidates}
    opened = catalog.open_contracts.get(decision.key)
    return [catalog.contracts[name] for name in sorted(names | ({opened.name} if opened else set()))]


def _settings(decision: "Decision", selector: "Selector") -> "tuple[Setting, ...]":
    from kernel_muster.cli.explain_site import settings_of

    return settings_of([str(decision.key)], selector.levers)


def _lever_lines(decision: "Decision", selector: "Selector") -> "Iterator[str]":
    from kernel_muster.audit.render.sections import lever_text, value_text
    from kernel_muster.audit.reporting import lever_row
    from kernel_muster.cli.explain_site import absence_text

    for setting in _settings(decision, selector):
        yield lever_text(lever_row(setting))
        yield f"    {setting.lever.doc} ({setting.lever.grammar})"
        for value, effect in setting.lever.effects.items():
            if value != setting.value:
                yield f"    {setting.lever.name}={value_text(value)} -> {effect}"
    yield absence_text([str(decision.key)])


def _sections(
    decision: "Decision", selector: "Selector", verbose: bool, asked: "Section"
) -> "Iterator[Section]":  # fmt: skip
    from kernel_muster.audit.render.sections import Section

    key = f"{decision.key}{f' (now called {decision.renamed_to})' if decision.renamed_to else ''}"
    if decision.chosen is None:
        lines = (decision.reason, f"to change it: {_remedy_of_absence(decision, selector)}")
        yield Section(f"{decision.cause}: nothing serves {key} on {selector.target}", "refuse", lines=lines)
    elif decision.circle:
        yield Section(f"BAD_OVERRIDE: kernels of {key} override each other in a circle", "refuse")
    elif decision.rivals:
        yield Section(f"DUPLICATE_KERNEL: equal kernels compete for {key} on {selector.target}", "refuse")
    else:
        yield Section(f"{decision.chosen.provider} serves {key} on {selector.target}")
    entries = tuple(_entry(n, c, decision, selector, verbose) for n, c in enumerate(decision.candidates, 1))
    if entries:
        yield Section(f"Candidates: {len(entries)}", entries=entries)
        levers = tuple(_lever_lines(decision, selector))
        yield asked
        yield Section("Levers that switch it off, or choose another kernel", lines=levers)
    else:
        yield asked
    for contract in _contracts(decision, selector):
        yield contract_section(contract, verbose=verbose)


def _entry(number: int, candidate: "Candidate", decision: "Decision", selector: "Selector", verbose: bool) -> "Entry":
    from kernel_muster.audit.render.sections import Entry

    registered = candidate.registered
    spec = registered.spec
    fields = (
        ("plugin", registered.provider.plugin),
        ("archs", " ".join(spec.archs)),
        ("tier", spec.tier),
        ("backend", spec.backend_name),
        ("rule", candidate.rule),
        ("reason", candidate.reason),
        ("to change it", _change(candidate, decision, selector)),
    )
    labelled = tuple((label, (text,)) for label, text in (*fields, *(_more(spec) if verbose else ())) if text)
    return Entry(number, _verdict(candidate, decision).upper(), str(registered.provider), labelled)


def _more(spec: "KernelSpec") -> tuple[tuple[str, str], ...]:
    """Return the fields of a spec that selection ignores."""
    return (
        ("contract", spec.contract),
        ("weights in", spec.weight_layout or ""),
        ("same bits as", " ".join(spec.bit_identical_to)),
        ("deterministic", "yes" if spec.deterministic else "no"),
        ("old names", " ".join(spec.aliases)),
        ("overrides", spec.overrides or ""),
        ("opt in", spec.opt_in or ""),
        ("provenance", spec.provenance),
    )


def _verdict(candidate: "Candidate", decision: "Decision") -> str:
    if candidate.is_rejected:
        return "rejected"
    return "equal" if decision.rivals else "accepted"


def _change(candidate: "Candidate", decision: "Decision", selector: "Selector") -> str:
    """Return the change that would make selection take a rejected candidate."""
    target, spec = selector.target.arch or "cpu", candidate.registered.spec
    provider = candidate.registered.provider
    winner = decision.chosen.provider.distribution if decision.chosen is not None else ""
    changes = {
        "": f"MUSTER_PREFER={decision.key}={provider.distribution} decides for it" if decision.rivals else "",
        "arch": f"build it for {target} and add that to its archs, or choose a target among {' '.join(spec.archs)}",
        "host": f"it serves --target cpu only; {target} needs a device kernel",
        "disabled": f"take {decision.key} out of MUSTER_DISABLE",
        "replaced": f"uninstall the distribution that replaces module {decision.key.module}, or block its plugin",
        "overridden": f"uninstall {winner}, or block its plugin",
        "tier": "declare it tier fast, if it is, or remove the fast kernel",
        "specificity": f"give it an arch entry at least as specific for {target}, or remove the other kernel",
        "preferred": f"MUSTER_PREFER={decision.key}={provider.distribution}",
        "duplicate": f"MUSTER_PREFER={decision.key}={provider.distribution}",
    }
    if candidate.rule not in changes:
        raise AssertionError(f"no explanation for rule {candidate.rule!r}")
    return changes[candidate.rule]


def _remedy_of_absence(decision: "Decision", selector: "Selector") -> str:
    absent = selector.catalog.absent_provider(decision.key)
    if decision.candidates:
        return "see each candidate"
    if absent is not None:
        return f"plugin {absent.name} of {absent.distribution} would provide it, but is {absent.status}"
    if opened := selector.catalog.open_contracts.get(decision.key):
        return f"install a distribution that provides it, or write one: anybody may, under contract {opened.name}"
    near = selector.near_names(decision.key)
    return f"correct the key ({' or '.join(near)})" if near else "install a distribution that provides it"
