"""``muster kernels``: the registered kernels, by key, provider and target."""

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kernel_muster.cli import options
from kernel_muster.registry.keys import near

if TYPE_CHECKING:
    from kernel_muster.registry.contract.specs import Registered
    from kernel_muster.registry.selection.catalog import Catalog
    from kernel_muster.registry.selection.select import Selector

Filter = Annotated[
    str | None,
    typer.Argument(metavar="FILTER", help="Part of a key, or a pattern: 'w4a16::*_p3'.", show_default=False),
]


def kernels(
    filter: Filter = None,
    target: options.Target = None,
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """List the registered kernels with their distributions.

    With --target it also shows which of them serve there, with the reasons against the others.
    """
    from kernel_muster.audit.render.sections import Section, Table
    from kernel_muster.cli.booting import request_of
    from kernel_muster.cli.lists import Listing, find_levers, find_plugins, find_target, rows_of, show
    from kernel_muster.registry.selection.catalog import sort_registered
    from kernel_muster.registry.selection.select import Selector

    request = request_of(plugins=plugin, no_plugins=no_plugin)
    catalog = find_plugins(request, output)
    levers, findings = find_levers(catalog, request)
    found, no_target = find_target(target) if target is not None else (None, [])
    selector = Selector(catalog, found, levers) if found is not None else None
    chosen = [r for r in sort_registered(catalog.kernels) if _matches(r.spec.key, filter)]
    data = [_row(registered, selector) for registered in chosen]
    names = ["key", "provider", "tier", "archs", "backend", "contract"]
    names += ["weight_layout", "aliases", "opt_in", "overrides"] if verbose else []
    names += ["on_target"] if selector is not None else []
    cells = tuple(tuple(_cell(row[name]) for name in names) for row in data)
    table = Table(tuple(name.replace("_", " ").upper() for name in names), cells)
    title = f"Kernels: {len(data)} of {len(catalog.kernels)}" + (f" on {found}" if found is not None else "")
    listing = Listing(
        "kernels",
        {"target": str(found or ""), "kernels": data},
        (Section(title, table=table if data else None, lines=() if data else _hint(filter or "", catalog)),),
        rows_of((*catalog.findings, *no_target, *findings)),
    )
    return show(listing, format, output, verbose=verbose)


def _matches(key: str, pattern: str | None) -> bool:
    return pattern is None or pattern in key or fnmatchcase(key, pattern)


def _hint(filter: str, catalog: "Catalog") -> tuple[str, ...]:
    """Suggest existing keys for a filter without a match."""
    keys = sorted(catalog.by_key)
    names = {*map(str, keys), *(key.module for key in keys), *(key.func for key in keys)}
    close = near(filter, names)
    modules = ", ".join(sorted({key.module for key in keys}))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return (f"no key holds {filter!r}, or matches it as a pattern{hint}", f"modules: {modules or 'none'}")


def _row(registered: "Registered", selector: "Selector | None") -> dict[str, Any]:
    spec, provider = registered.spec, registered.provider
    row: dict[str, Any] = {
        "key": spec.key,
        "provider": str(provider),
        "plugin": provider.plugin,
        "distribution": provider.distribution,
        "version": provider.version,
        "tier": spec.tier,
        "archs": list(spec.archs),
        "backend": spec.backend_name,
        "contract": spec.contract,
        "weight_layout": spec.weight_layout or "",
        "deterministic": spec.deterministic,
        "bit_identical_to": list(spec.bit_identical_to),
        "aliases": list(spec.aliases),
        "overrides": spec.overrides or "",
        "replaces_module": list(spec.replaces_module or ()),
        "opt_in": spec.opt_in or "",
        "provenance": spec.provenance,
    }
    return row if selector is None else row | {"on_target": _on_target(registered, selector)}


def _on_target(registered: "Registered", selector: "Selector") -> str:
    decision = selector.decide(registered.spec.kernel_key)
    if decision.chosen is registered:
        return "serves"
    lost = next(c for c in decision.candidates if c.registered is registered)
    return lost.reason if lost.reason.startswith(lost.rule) else f"{lost.rule}: {lost.reason}"


def _cell(value: object) -> str:
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value)) or "-"
