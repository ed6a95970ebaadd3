"""The calls of a program: open a boot, build a model in it, or open the registry alone."""

import os
import re
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from kernel_muster._version import __version__
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.opening import BootRequest, open_registry_catalog
from kernel_muster.audit.session import BootOptions, BootSession, abort_process
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.registry.contract.specs import Stage
from kernel_muster.registry.errors import MusterError, UsageError
from kernel_muster.registry.findings import Profile
from kernel_muster.registry.keys import parse_key
from kernel_muster.registry.launch.choose import choose_runner
from kernel_muster.registry.selection.lookup_session import LookupSession, OnLateMiss
from kernel_muster.registry.selection.lookups import Lookups

_T = TypeVar("_T")


def boot(
    model: str | None = None,
    *,
    manifest: str | Path | None = None,
    config: str | Path | None = None,
    target: str | None = None,
    quant: str | None = None,
    levers: Mapping[str, object] | None = None,
    profile: Profile = "serve",
    stage: Stage | None = None,
    as_of: date | None = None,
    expect_set_hash: str | None = None,
    dangerously_allow_unresolved: Iterable[str] = (),
    plugins: Iterable[str] = (),
    no_plugins: Iterable[str] = (),
    local_plugins: Mapping[str, object] | None = None,
    manifest_folders: Iterable[str | Path] = (),
    on_late_miss: OnLateMiss = "raise",
    abort: Any = abort_process,
) -> BootSession:
    """Open a boot: a context manager that seals the audit on leaving, or raises BootRefused.

    The model comes from ``model`` (a name, a Hugging Face id, or a folder with a config.json), ``manifest`` (a
    MODEL.toml) or ``config`` (a config.json, with ``model`` as the reference that breaks ties). ``model`` beside
    ``manifest`` must match that file, or be a folder whose config.json fits it. ``levers`` replaces the environment.
    UsageError for impossible arguments, on entering also for a file of another model. Every error outside the call is
    a finding.
    """
    if model is None and manifest is None and config is None:
        raise UsageError("name a model, a manifest or a config.json")
    if as_of is not None and not isinstance(as_of, date):
        raise UsageError(f"as_of is {as_of!r}, expected a date: datetime.date(2026, 1, 31)")
    plugins, no_plugins = _texts("plugins", plugins), _texts("no_plugins", no_plugins)
    allowed = _texts("dangerously_allow_unresolved", dangerously_allow_unresolved)
    folders = _several("manifest_folders", manifest_folders)
    for folder in folders:
        _check_path("manifest_folders", folder)
    for name, file in (("manifest", manifest), ("config", config)):
        if file is not None:
            _check_path(name, file)
    if not callable(abort):
        raise UsageError(f"abort is {abort!r}, expected a function of a text")
    request = BootRequest(
        model=model,
        manifest=manifest,
        config=config,
        target=target,
        quant=quant,
        levers=dict(os.environ) if levers is None else _mapping("levers", levers),
        levers_origin="environment" if levers is None else "given",
        plugins=frozenset(plugins),
        no_plugins=frozenset(no_plugins),
        local_plugins=_plugins(local_plugins),
        manifest_folders=tuple(map(Path, folders)),
    )
    set_hash = _set_hash(expect_set_hash)
    audit = AuditOptions(profile, stage, as_of, set_hash, frozenset(map(_allowed_key, allowed)))
    options = BootOptions(audit=audit, on_late_miss=on_late_miss, abort=abort, muster_version=__version__)
    return BootSession(request, options)


def _set_hash(text: str | None) -> str | None:
    if text is None or (isinstance(text, str) and re.fullmatch(r"[0-9a-fA-F]{64}", text)):
        return text and text.lower()
    raise UsageError(f"expect_set_hash is {text!r}, expected a SHA-256: 64 hexadecimal digits")


def _allowed_key(text: str) -> Any:
    try:
        return parse_key(text)
    except ValueError as error:
        raise UsageError(f"dangerously_allow_unresolved: {error}") from None


def _several(name: str, value: Iterable[_T]) -> tuple[_T, ...]:
    """Refuse one text in place of a collection: each of its letters would count as an item."""
    if isinstance(value, str | bytes | os.PathLike) or not isinstance(value, Iterable):
        raise UsageError(f"{name} is {value!r}, expected several: [{value!r}]")
    return tuple(value)


def _texts(name: str, value: Iterable[str]) -> tuple[str, ...]:
    texts = _several(name, value)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"{name} has {text!r}, expected a text")
    return texts


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str) or "\0" in os.fspath(value):
        raise UsageError(f"{name} is {value!r}, expected the path of a file or folder")


def _plugins(local: Mapping[str, object] | None) -> dict[Any, Any]:
    given = _mapping("local_plugins", local or {})
    if empty := [name for name, plugin in given.items() if plugin is None]:
        raise UsageError(f"local_plugins: {empty[0]!r} is None, expected an object with hooks")
    return given


def _mapping(name: str, value: object) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} is {value!r}, expected a mapping of names")
    return dict(value)


def build_model(manifest: Manifest, kernels: Lookups, weights: Any = None) -> Any:
    """Build a manifest's model with the one builder that serves its model type. Without weights it is a plan.

    MusterError, and a finding of the boot, if no builder or more than one serves it. In a serving process
    (``on_late_miss="abort"``), a builder without production maturity reports that when it builds.
    """
    try:
        builder = kernels.builder_of(manifest.model_type, manifest.name)
    except MusterError as error:
        # A manifest without model_type is named by its first line.
        where = manifest.where("model", "model_type")
        kernels.request_failed(f"manifest {manifest.name}", error, where=where)
        raise
    kernels.built_by(builder)
    return builder.build(manifest, kernels, weights)


def open_registry(
    target: str | None = None,
    *,
    levers: Mapping[str, object] | None = None,
    no_plugins: Iterable[str] = (),
    local_plugins: Mapping[str, object] | None = None,
) -> Lookups:
    """Open the registry without a boot, for tools and tests: ``kernel()`` raises KernelMissing on a miss.

    Without an audit, errors raise at once: BootRefused for a broken plugin, lever or target.
    """
    no_plugins = _texts("no_plugins", no_plugins)
    request = BootRequest(
        target=target,
        levers=dict(os.environ) if levers is None else _mapping("levers", levers),
        levers_origin="environment" if levers is None else "given",
        no_plugins=frozenset(no_plugins),
        local_plugins=_plugins(local_plugins),
    )
    catalog, found, snapshot = open_registry_catalog(request, __version__)
    cache_dir = snapshot["MUSTER_CACHE_DIR"]
    runner = choose_runner(found, None, None if cache_dir is None else str(request.cwd / str(cache_dir)))
    return Lookups(LookupSession(catalog, found, snapshot, raises=True, runner=runner))
