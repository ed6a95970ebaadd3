"""``muster models``: the models with a manifest, and the resolution of a config.json to one of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_muster.cli import options
from kernel_muster.registry.errors import UsageError

if TYPE_CHECKING:
    from kernel_muster.audit.render.sections import Section
    from kernel_muster.MODEL_toml.hf.config import HfConfig
    from kernel_muster.MODEL_toml.manifest import Manifest
    from kernel_muster.MODEL_toml.resolve import Catalogue, Resolution
    from kernel_muster.registry.contract.builders import ModelBuilder


def models(
    model: options.Model = None,
    config: options.Config = None,
    ref: options.Reference = None,
    manifests: options.Manifests = None,
    plugin: options.Plugins = None,
    no_plugin: options.NoPlugins = None,
    format: options.ListFormat = options.Format.TEXT,
    output: options.Output = None,
    verbose: options.Verbose = False,
) -> int:
    """List the models, or show the resolution of one.

    With a MODEL, --config or --ref it shows the resolution alone, step by step.

    Exit code: 0 listed or resolved, 1 not resolved, or a manifest or plugin is broken.
    """
    from kernel_muster.cli.booting import request_of
    from kernel_muster.cli.lists import Listing, find_plugins, rows_of, show
    from kernel_muster.MODEL_toml.hf.config import config_of
    from kernel_muster.MODEL_toml.resolve import Catalogue, has_config

    if model is not None and ref is not None and config is None and has_config(model):
        config, model = Path(model), None
    if model is not None and ref is not None and model != ref:
        raise UsageError(f"MODEL is {model!r}, --ref {ref!r}: give one")
    content = None if config is None else config_of(config)  # before any plugin loads
    catalog = find_plugins(request_of(plugins=plugin, no_plugins=no_plugin), output)
    catalogue = Catalogue.from_folders(manifests or catalog.manifest_folders, levers=catalog.levers)
    reference = model if model is not None else ref
    findings = [*catalog.findings, *catalogue.findings]
    if config is None and reference is None:
        data, sections = _list(catalogue, catalog.builders, verbose)
    else:
        resolution = _resolve(catalogue, content, reference or "")
        data, sections = _resolved(resolution.manifest, resolution.steps)
        findings = list(dict.fromkeys((*findings, *resolution.findings)))
    return show(Listing("models", data, sections, rows_of(findings)), format, output, verbose=verbose)


def _resolve(catalogue: "Catalogue", config: "HfConfig | None", reference: str) -> "Resolution":
    return catalogue.resolve(reference) if config is None else catalogue.resolve_config(config, reference or None)


def _list(
    catalogue: "Catalogue", builders: "tuple[ModelBuilder, ...]", verbose: bool
) -> "tuple[dict[str, Any], tuple[Section, ...]]":
    from kernel_muster.audit.render.sections import Section, Table

    data = [_row(manifest, builders) for manifest in catalogue.manifests]
    names = ("name", "quant", "model_types", "match_names", "hf_id", "builder", "manifest")
    rows = data if verbose else [row | {"manifest": _short(Path(row["manifest"]))} for row in data]
    cells = tuple(tuple(_cell(row[name]) for name in names) for row in rows)
    header = ("NAME", "QUANT", "CONFIG.JSON TYPES", "TOLD APART BY", "HUGGING FACE ID", "BUILDER", "MANIFEST")
    return {"models": data}, (Section(f"Models: {len(data)}", table=Table(header, cells) if data else None),)


def _row(manifest: "Manifest", builders: "tuple[ModelBuilder, ...]") -> dict[str, Any]:
    found = [f"{b.name} ({_maturity(b)})" for b in builders if manifest.model_type in b.model_types]
    return {
        "name": manifest.name,
        "hf_id": manifest.hf_id or "",
        "quant": manifest.quant,
        "model_types": [f"{row.model_type}/{row.hidden_size or '*'}" for row in manifest.model_types],
        "match_names": list(manifest.match_names),
        "builder": " ".join(sorted(found)) or "none",
        "manifest": str(manifest.path),
    }


def _maturity(builder: "ModelBuilder") -> str:
    """Return a builder's maturity, and the architectures of its recorded runs."""
    archs = ", ".join(sorted({arch for arch, _ in builder.recorded}))
    return f"{builder.maturity} on {archs}" if archs else builder.maturity


def _resolved(manifest: "Manifest | None", steps: tuple[str, ...]) -> "tuple[dict[str, Any], tuple[Section, ...]]":
    from kernel_muster.audit.render.sections import Section

    name = manifest.name if manifest is not None else ""
    path = str(manifest.path) if manifest is not None else ""
    title = f"Resolved: {name}" if name else "Not resolved"
    data = {"model": name, "manifest": path, "steps": list(steps)}
    return data, (Section(title, "" if name else "refuse", lines=steps),)


def _short(path: Path) -> str:
    """Return a manifest's path from here, or its last two parts. --verbose and JSON show all of it."""
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(Path("...", *path.parts[-2:]))


def _cell(value: object) -> str:
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value)) or "-"
