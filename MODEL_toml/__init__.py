"""Model manifests: the shipped ones, their schema and their loader."""

from pathlib import Path

from kernel_muster.MODEL_toml.loader import check_levers, load_manifest
from kernel_muster.MODEL_toml.manifest import Manifest
from kernel_muster.MODEL_toml.resolve import Catalogue, Resolution
from kernel_muster.MODEL_toml.schema import QUANTS
from kernel_muster.MODEL_toml.waivers import Expectation, Waiver

__all__ = [
    "QUANTS",
    "Catalogue",
    "Expectation",
    "Manifest",
    "Resolution",
    "Waiver",
    "check_levers",
    "load_manifest",
    "manifest_folder",
]


def manifest_folder() -> Path:
    """Return the folder of the shipped manifests."""
    return Path(__file__).parent
