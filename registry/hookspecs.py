"""The hooks a plugin may implement.

A plugin is a module named in the entry-point group ``kernel_muster.v1``. It implements any of these functions, each
marked ``@km.hookimpl``. Wrappers and ordering options are refused: no plugin may depend on the order of others.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.levers import Lever

if TYPE_CHECKING:
    from kernel_muster.registry.contract.builders import ModelBuilder

PROJECT = "kernel_muster"
#: The host API version is part of the group's name: plugins of another version are reported, never imported.
ENTRY_POINT_GROUP = "kernel_muster.v1"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def muster_contracts() -> Iterable[Contract]:  # type: ignore[empty-body]
    """Return the contracts that this plugin's kernels implement."""


@hookspec
def muster_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Return all specs, for every architecture: the registry filters by target."""


@hookspec
def muster_manifests() -> Iterable[Path]:  # type: ignore[empty-body]
    """Return folders that hold ``<name>/MODEL.toml``."""


@hookspec
def muster_models() -> Iterable["ModelBuilder"]:  # type: ignore[empty-body]
    """Return the builders of models."""


@hookspec
def muster_levers() -> Iterable[Lever]:  # type: ignore[empty-body]
    """Return this plugin's levers; their names begin with ``MUSTER_``."""


@hookspec
def muster_audit_finished(report: Any) -> None:
    """Observe a finished audit, passed or refused; an exception here is a finding."""
