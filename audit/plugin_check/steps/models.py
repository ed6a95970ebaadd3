"""``muster plugin check`` about models: what refuses every boot of a model that a plugin brings."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from kernel_muster.audit.rules.levers import with_lines
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.resolve import Catalogue
from kernel_muster.registry.contract.builders import choose_builder
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.levers import read_levers
from kernel_muster.registry.selection.catalog import Catalog, PluginRow


def equal_builders(catalog: Catalog, rows: Iterable[PluginRow]) -> Iterator[Finding]:
    """Yield model types that a builder of these plugins serves and another builder too: no model of them is built."""
    for row in rows:
        own = {kind for builder in catalog.builders_of.get(row.name, ()) for kind in builder.model_types}
        for kind in sorted(own):
            names = sorted(builder.name for builder in catalog.builders if kind in builder.model_types)
            if len(names) > 1:
                why = f"{len(names)} builders serve model type {kind}: {', '.join(names)}; a boot refuses its models"
                remedies = ("give the builder a model type of its own, and the manifest with it",)
                yield Finding("BAD_SPEC", row.name, why, (f"{row.distribution} {row.version}",), remedies)


def manifest_findings(catalog: Catalog, rows: Iterable[PluginRow]) -> Iterator[Finding]:
    """Yield what refuses every boot about the manifests of these plugins, alone or beside those of other plugins."""
    has_builders = {folder: bool(catalog.builders_of.get(row.name)) for row in rows
                    for folder in catalog.folders_of.get(row.name, ())}  # fmt: skip
    if not has_builders:
        return
    places = tuple(map(str, has_builders))
    known = Catalogue.from_folders(catalog.manifest_folders, levers=catalog.levers)
    for finding in known.findings:
        if any(where.startswith(places) for where in finding.where):
            yield finding
    for manifest in known.manifests:
        if folder := _folder_of(manifest, has_builders):
            bad = read_levers(catalog.levers, [("manifest", manifest.defaults)])[1]
            yield from with_lines(bad, manifest)
            # An engine that builds its models itself needs the manifest alone.
            if has_builders[folder] or not manifest.model.missing_dimensions:
                yield from _unbuilt(catalog, manifest)


def _folder_of(manifest: Manifest, folders: Iterable[Path]) -> Path | None:
    return next((folder for folder in folders if manifest.path.is_relative_to(folder)), None)


def _unbuilt(catalog: Catalog, manifest: Manifest) -> Iterator[Finding]:
    """Yield why a boot of this model would find no builder; several builders have a finding of their own."""
    if sum(manifest.model_type in builder.model_types for builder in catalog.builders) > 1:
        return
    try:
        choose_builder(catalog.builders, manifest.model_type, manifest.name)
    except MusterError as error:
        where = manifest.where("model", "model_type")
        remedies = ("correct the manifest", "or return a km.ModelBuilder of its type from muster_models")
        yield Finding("REQUEST_NOT_HONORED", f"manifest {manifest.name}", str(error), (where,), remedies)
