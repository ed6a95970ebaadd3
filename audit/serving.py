"""What serves must be ready for production, whoever chose its builder."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from kernel_muster.registry.contract.builders import ModelBuilder
from kernel_muster.registry.selection.catalog import Catalog

REQUEST = "serving (on_late_miss=abort)"


def noting_unready(catalog: Catalog, note: Callable[[str], None]) -> Catalog:
    """Return a catalog whose builders say why, when they build, if they are not ready for production."""
    return replace(catalog, builders=tuple(_noting(builder, note) for builder in catalog.builders))


def _noting(builder: ModelBuilder, note: Callable[[str], None]) -> ModelBuilder:
    if builder.maturity == "production":
        return builder

    @wraps(builder.build)
    def build(*given: Any, **named: Any) -> Any:
        note(f"builder {builder.name} is {builder.maturity}: what serves must be production")
        return builder.build(*given, **named)

    return replace(builder, build=build)
