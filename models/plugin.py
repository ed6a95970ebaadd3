"""The built-in models as a plugin: builders, levers and manifests, offered like anybody else's."""

from collections.abc import Iterable
from pathlib import Path

from kernel_muster.MODEL_toml import manifest_folder
from kernel_muster.models.build import MODEL_TYPES, RECORDED, build_model
from kernel_muster.models.drafter import DRAFTER_TYPES, build_drafter
from kernel_muster.models.levers import MODEL_LEVERS
from kernel_muster.registry.contract.builders import ModelBuilder
from kernel_muster.registry.hookspecs import hookimpl
from kernel_muster.registry.levers import Lever


@hookimpl
def muster_models() -> Iterable[ModelBuilder]:
    """Return the builders of the hybrid decoder family and of its drafter, each with its maturity."""
    return [
        ModelBuilder("hybrid_decoder", MODEL_TYPES, "production", build_model, RECORDED),
        ModelBuilder("block_diffusion_drafter", DRAFTER_TYPES, "partial", build_drafter),
    ]


@hookimpl
def muster_levers() -> Iterable[Lever]:
    """Return every lever of dispatch and models."""
    return MODEL_LEVERS


@hookimpl
def muster_manifests() -> Iterable[Path]:
    """Return the folder of the shipped manifests."""
    return [manifest_folder()]
