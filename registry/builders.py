"""What the registry knows of a model builder: which model types it serves and how mature it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Maturity = Literal["reference", "partial", "production"]


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the layers of some model types.

    ``build(manifest, kernels, weights)`` looks every kernel up, eagerly, and returns the model. Without weights it
    is a plan only. Serving refuses a maturity other than ``production``; an audit does not.
    """

    name: str
    model_types: tuple[str, ...]
    maturity: Maturity
    build: Callable[..., Any]
