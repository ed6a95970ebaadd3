"""What the registry knows of a model builder: which model types it serves and how mature it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kernel_muster.registry.errors import MusterError

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


def choose_builder(builders: Iterable[ModelBuilder], model_type: str | None, model: str) -> ModelBuilder:
    """Return the one builder of a model type; MusterError if there is none, or more than one."""
    known = sorted(builders, key=lambda builder: builder.name)
    found = [builder for builder in known if model_type in builder.model_types]
    if len(found) == 1:
        return found[0]
    have = ", ".join(f"{builder.name} ({', '.join(builder.model_types)})" for builder in known) or "none"
    what = f"{len(found)} builders serve" if found else "no builder serves"
    raise MusterError(f"{model}: {what} model type {model_type!r}; builders: {have}")
