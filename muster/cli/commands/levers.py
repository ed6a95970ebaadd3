"""``muster levers``: every declared override, its value here and what it does."""

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

    With a MODEL, the defaults of its manifest count too. What is wrong comes first.
    """
    from kernel_muster.audit.opening import find_manifest
    from kernel_muster.audit.render.sections import Section
    from kernel_muster.audit.reporting import lever_rows
    from kernel_muster.cli.booting import wanted_of
    from kernel_muster.cli.lists import Listing, find_levers, find_plugins, find_target, rows_of, show

    wanted = wanted_of(
        model=model,
        manifest=manifest,
        config=config,
        reference=ref,
        manifests=manifests,
        target=target,
        plugins=plugin,
        no_plugins=no_plugin,
    )
    catalog = find_plugins(wanted, output)
    found, no_target = find_target(target) if target is not None else (None, [])
    is_about_a_model = bool(model or manifest or config)
    of_model, no_model = find_manifest(wanted, catalog) if is_about_a_model else (None, [])
    snapshot, bad = find_levers(catalog, wanted, of_model, found)
    declared = {lever.name: lever for lever in catalog.levers}
    arch = "" if found is None else str(found.arch or "cpu")
    rows = lever_rows(snapshot)
    data = [_row(row, declared[row.name], arch) for row in rows]
    name = of_model.name if of_model else ""
    title = f"Levers: {len(rows)}{f', with the defaults of {name}' if name else ''}"
    lines = tuple(line for row, one in zip(rows, data, strict=True) for line in _lines(row, one))
    listing = Listing(
        "levers",
        {"model": name, "levers": data},
        () if no_model and of_model is None else (Section(title, lines=lines),),
        rows_of((*catalog.findings, *no_target, *no_model, *bad)),
        is_long=True,
    )
    return show(listing, format, output, verbose=verbose)


def _row(row: "LeverRow", lever: "Lever", arch: str) -> dict[str, Any]:
    from kernel_muster.audit.render.sections import foreign_evidence

    chip = foreign_evidence(row, arch)
    return {
        "name": row.name,
        "value": row.value,
        "origin": row.origin,
        "effect": row.effect,
        "evidence": row.evidence,
        "measured_elsewhere": f"measured on {chip}, not on {arch}: measure again" if chip else "",
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
    for label in ("evidence", "measured_elsewhere"):
        if data[label]:
            yield f"    {'evidence: ' if label == 'evidence' else ''}{data[label]}"
