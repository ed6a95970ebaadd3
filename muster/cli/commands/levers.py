"""``muster levers``: every declared override, with its current value and effect."""

from typing import TYPE_CHECKING, Any

from kernel_muster.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel_muster.audit.report import LeverRow
    from kernel_muster.registry.levers import Lever


def levers(
    model: options.Model = None,
    target: options.Target = None,
    manifest: options.Manifest = None,
    config: options.Config = None,
    ref: options.Reference = None,
    manifests: options.Manifests = None,
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """List the levers: value, origin, effect and evidence.

    With a MODEL, the defaults of its manifest count too. Errors come first.
    """
    from kernel_muster.audit.opening import find_manifest
    from kernel_muster.audit.render.sections import Section, assumed_text
    from kernel_muster.audit.reporting import lever_rows
    from kernel_muster.audit.tuning.assumed import assumption
    from kernel_muster.cli.booting import request_of
    from kernel_muster.cli.lists import Listing, find_levers, find_plugins, find_target, rows_of, show
    from kernel_muster.registry.selection.select import Selector

    request = request_of(
        model=model,
        manifest=manifest,
        config=config,
        reference=ref,
        manifests=manifests,
        target=target,
        plugins=plugin,
        no_plugins=no_plugin,
    )
    catalog = find_plugins(request, output)
    found, no_target = find_target(target) if target is not None else (None, [])
    is_about_a_model = bool(model or manifest or config)
    of_model, no_model = find_manifest(request, catalog) if is_about_a_model else (None, [])
    snapshot, bad = find_levers(catalog, request, of_model, found)
    declared = {lever.name: lever for lever in catalog.levers}
    selector = None if found is None else Selector(catalog, found, snapshot)
    rows = lever_rows(snapshot, assumption(found, selector))
    data = [_row(row, declared[row.name]) for row in rows]
    name = of_model.name if of_model else ""
    title = f"Levers: {len(rows)}{f', with the defaults of {name}' if name else ''}"
    lines = [line for row, one in zip(rows, data, strict=True) for line in _lines(row, one)]
    if found is not None and (assumed := [row.name for row in rows if row.assumed]):
        lines.append(assumed_text(assumed, str(found.device.name if found.device else found)))
    listing = Listing(
        "levers",
        {"model": name, "levers": data},
        () if no_model and of_model is None else (Section(title, lines=tuple(lines)),),
        rows_of((*catalog.findings, *no_target, *no_model, *bad)),
        is_long=True,
    )
    return show(listing, format, output, verbose=verbose)


def _row(row: "LeverRow", lever: "Lever") -> dict[str, Any]:
    return {
        "name": row.name,
        "value": row.value,
        "origin": row.origin,
        "effect": row.effect,
        "evidence": row.evidence,
        "assumed": row.assumed,
        "kind": lever.kind,
        "grammar": lever.grammar,
        "default": lever.default,
        "diagnostic": lever.diagnostic,
        "keys": list(lever.keys),
        "doc": lever.doc,
    }


def _lines(row: "LeverRow", data: dict[str, Any]) -> "Iterator[str]":
    from kernel_muster.audit.render.sections import lever_text

    yield lever_text(row)
    yield f"    {data['doc']} ({data['grammar']})"
    if row.evidence:
        yield f"    evidence: {row.evidence}"
