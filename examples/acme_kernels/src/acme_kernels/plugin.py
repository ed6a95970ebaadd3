"""The module of the entry point: every hook of this plugin, and nothing else.

Hooks run whenever plugins are listed: they must return quickly. Heavy imports belong into the kernels.
"""

from collections.abc import Iterable
from pathlib import Path

import kernel_muster as km

from acme_kernels import levers, model, silu, softcap


@km.hookimpl
def muster_contracts() -> Iterable[km.Contract]:
    """Return the contract of the one new family. An override implements its key's existing contract."""
    return (softcap.SOFTCAP,)


@km.hookimpl
def muster_kernels() -> Iterable[km.KernelSpec]:
    """Return all specs, for every architecture: the registry chooses by target."""
    return silu.SILU_MUL, softcap.SOFTCAP_ROWS


@km.hookimpl
def muster_manifests() -> Iterable[Path]:
    """Return the folder of acme-tiny/MODEL.toml."""
    return (Path(__file__).parent / "manifests",)


@km.hookimpl
def muster_models() -> Iterable[km.ModelBuilder]:
    """Return the builder of model type acme_mlp."""
    return (km.ModelBuilder("acme_mlp", ("acme_mlp",), "production", model.build),)


@km.hookimpl
def muster_levers() -> Iterable[km.Lever]:
    """Return the plugin's levers."""
    return (levers.NO_SOFTCAP,)
