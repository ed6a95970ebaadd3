"""``muster plugins``: the installed plugins, with errors."""

from kernel_muster.cli import options


def plugins(
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """List the plugins, including broken ones.

    Exit code: 0 all are sound, 1 an error would refuse a boot.
    """
    from kernel_muster.audit.render.sections import Section, Table
    from kernel_muster.cli.booting import request_of
    from kernel_muster.cli.lists import Listing, find_plugins, rows_of, show

    catalog = find_plugins(request_of(plugins=plugin, no_plugins=no_plugin), output)
    data = [
        {
            "name": row.name,
            "distribution": row.distribution,
            "version": row.version,
            "status": row.status,
            "module": row.value,
            "location": row.location,
            "hooks": list(row.hooks),
            "keys": [str(key) for key in row.keys],
            "notes": list(row.notes),
        }
        for row in catalog.plugins
    ]
    header = ("NAME", "STATUS", "DISTRIBUTION", "MODULE", "KEYS", "HOOKS", *(("LOCATION",) if verbose else ()))
    rows = [
        (
            row.name,
            row.status,
            f"{row.distribution} {row.version}".strip(),
            row.value,
            str(len(row.keys)),
            " ".join(hook.removeprefix("muster_") for hook in row.hooks) or "-",
            *((row.location,) if verbose else ()),
        )
        for row in catalog.plugins
    ]
    notes = tuple(f"{row.name}: {note}" for row in catalog.plugins for note in row.notes)
    section = Section(f"Plugins: {len(rows)}", lines=notes, table=Table(header, tuple(rows)))
    return show(
        Listing("plugins", {"plugins": data}, (section,), rows_of(catalog.findings)), format, output, verbose=verbose
    )
