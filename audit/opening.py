"""Opening a boot: plugins, target, manifest and levers, in that order, with everything wrong collected."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from kernel_muster.audit.render.audiences import for_program
from kernel_muster.audit.render.text import render_text
from kernel_muster.audit.reporting import opening_report
from kernel_muster.audit.rules.levers import list_levers, with_lines
from kernel_muster.audit.tuning.choose import Chosen, read_tuned_levers
from kernel_muster.audit.verdict import judge_opening
from kernel_muster.MODEL_toml.hf.config import config_at
from kernel_muster.MODEL_toml.loader import load_manifest
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.resolve import Catalogue, fit, has_config
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.discovery.remembered import Remembered
from kernel_muster.registry.errors import BootRefused, UsageError
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.target import Target, resolve_target
from kernel_muster.registry.levers import CORE_LEVERS, Levers, Origin, read_levers
from kernel_muster.registry.paths import current_folder
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.values import frozen


@frozen(kw_only=True)
class BootRequest:
    """What a boot was asked to be about. One of ``model``, ``manifest`` and ``config`` says which model.

    ``model`` beside ``manifest`` must be the name of what that file describes, or a folder whose config.json fits it.
    ``weights`` is the checkpoint that the model will be built from: the builder compares its config.json with the
    manifest, and what that leaves in doubt is reported here too, before any weight is read.
    Relative paths start at ``cwd``: what plugins make of the working directory does not redirect them.
    """

    model: str | None = None
    manifest: str | Path | None = None
    config: str | Path | None = None
    weights: Path | None = None
    target: str | None = None
    quant: str | None = None
    levers: Mapping[str, object] = field(default_factory=dict)
    levers_origin: Origin = "environment"
    plugins: frozenset[str] = frozenset()
    no_plugins: frozenset[str] = frozenset()
    local_plugins: Mapping[str, object] = field(default_factory=dict)
    manifest_folders: tuple[Path, ...] = ()
    only_these_folders: bool = False  # leave the manifests of plugins out, the shipped ones too
    cwd: Path = field(default_factory=current_folder)
    is_command: bool = False  # what is said names the command's options, not boot()'s parameters


@frozen
class Opening:
    """An opened boot; without manifest or target, or with a bad lever, it is refused at once."""

    catalog: Catalog
    levers: Levers
    target: Target | None
    manifest: Manifest | None
    findings: tuple[Finding, ...]
    has_bad_levers: bool
    tuning: Chosen | None = None

    @property
    def is_usable(self) -> bool:
        """Whether a model can be built at all."""
        return self.target is not None and self.manifest is not None and not self.has_bad_levers


def open_boot(request: BootRequest) -> Opening:
    """Resolve the target, discover plugins, find the manifest, and read the levers; collect every finding.

    The target comes first: a plugin that hides devices as it is imported does not change which one is meant.
    """
    target, no_target = resolve_target(request.target)
    catalog = discover_for(request)
    findings = [*catalog.findings, *([no_target] if no_target else [])]
    manifest, manifest_findings = find_manifest(request, catalog)
    findings += dict.fromkeys((*manifest_findings, *weight_doubts(request, catalog, manifest)))
    sources: list[tuple[Origin, Mapping[str, object]]] = [(request.levers_origin, request.levers)]
    if manifest is not None:
        sources.append(("manifest", manifest.defaults))
    levers, lever_findings, tuning = read_tuned_levers(catalog.levers, sources, target, request.cwd)
    lever_findings = with_lines((*lever_findings, *list_levers(levers, catalog.key_names)), manifest)
    return Opening(catalog, levers, target, manifest, (*findings, *lever_findings), bool(lever_findings), tuning)


def open_registry_catalog(request: BootRequest, muster_version: str) -> tuple[Catalog, Target, Levers]:
    """Open the registry alone; BootRefused, with a report, if anything found would refuse a boot."""
    target, no_target = resolve_target(request.target)
    catalog = discover_for(request)
    levers, findings, _ = read_tuned_levers(
        catalog.levers, [(request.levers_origin, request.levers)], target, request.cwd
    )
    findings = [*catalog.findings, *with_lines(findings, None), *([no_target] if no_target else [])]
    verdict = judge_opening(catalog, findings, "serve")
    if verdict.is_refused or target is None:
        report = opening_report(
            verdict,
            muster_version,
            catalog=catalog,
            levers=levers,
            model="",
            target=request.target or "",
            profile="serve",
            as_of="",
        )
        report = for_program(report)
        raise BootRefused(render_text(report), report)
    return catalog, target, levers


def discover_for(request: BootRequest) -> Catalog:
    """Discover with the time limit that the levers set."""
    core, _ = read_levers(CORE_LEVERS, [(request.levers_origin, _only_core(request.levers))])
    cache = core["MUSTER_CACHE_DIR"]
    return discover(
        blocked=request.no_plugins,
        demanded=request.plugins,
        local=request.local_plugins,
        timeout_s=float(core["MUSTER_PLUGIN_TIMEOUT_S"] or 10),
        options=("--plugin", "--no-plugin") if request.is_command else ("plugins", "no_plugins"),
        remembered=Remembered(None if cache is None else Path(str(cache)) / "plugins"),
    )


def _only_core(levers: Mapping[str, object]) -> dict[str, object]:
    names = {lever.name for lever in CORE_LEVERS}
    return {name: value for name, value in levers.items() if name in names}


def is_of(manifest: Manifest, model: str) -> bool:
    """Whether a manifest describes the model of this name."""
    return model in (manifest.name, manifest.hf_id)


def find_manifest(request: BootRequest, catalog: Catalog) -> tuple[Manifest | None, list[Finding]]:
    """Load the file that was named, or resolve the model among all manifests.

    UsageError if a model was named too and the file is of another: its waivers and levers are not that model's. Of a
    folder its config.json says whether the file is of that model.
    """
    cwd = request.cwd
    if request.manifest is not None:
        label = str(request.manifest)
        found, problems = load_manifest(cwd / request.manifest, levers=catalog.levers, label=label)
        if found is None or request.model is None or is_of(found, request.model):
            return found, problems
        if has_config(request.model, cwd):
            fitted = fit(found, config_at(cwd, request.model))
            return fitted.manifest, [*problems, *fitted.findings]
        why = f"{request.manifest} describes {found.name!r}, not {request.model!r}"
        raise UsageError(f"{why}: name no model, or name the other manifest")
    catalogue = _catalogue(request, catalog)
    if request.config is not None:
        resolution = catalogue.resolve_config(config_at(cwd, request.config), request.model)
    else:
        resolution = catalogue.resolve(request.model or "", cwd)
    return resolution.manifest, list(dict.fromkeys((*catalogue.findings, *resolution.findings)))


def weight_doubts(request: BootRequest, catalog: Catalog, manifest: Manifest | None) -> tuple[Finding, ...]:
    """Report what the config.json beside the weights leaves in doubt; an unreadable one is an error of loading."""
    if request.weights is None or manifest is None or not has_config(str(request.weights), request.cwd):
        return ()
    try:
        return _catalogue(request, catalog).doubts_of(manifest, request.weights, request.cwd)
    except UsageError:
        return ()


def _catalogue(request: BootRequest, catalog: Catalog) -> Catalogue:
    own = (request.cwd / folder for folder in request.manifest_folders)
    folders = (*(() if request.only_these_folders else catalog.manifest_folders), *own)
    return Catalogue.from_folders(folders, levers=catalog.levers)
