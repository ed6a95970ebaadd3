"""What serves must be ready for production, whoever chose its builder."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from kernel_muster.registry.contract.builders import ModelBuilder
from kernel_muster.registry.selection.catalog import Catalog

REQUEST = "serving (on_late_miss=abort)"


def noting_unready(catalog: Catalog, arch: str, note: Callable[[str], None]) -> Catalog:
    """Return a catalog whose builders report, when they build, that they are not ready for production on ``arch``."""
    return replace(catalog, builders=tuple(_noting(builder, arch, note) for builder in catalog.builders))


def _noting(builder: ModelBuilder, arch: str, note: Callable[[str], None]) -> ModelBuilder:
    maturity = builder.maturity_on(arch)
    if maturity == "production":
        return builder
    places = ", ".join(sorted({name for name, _ in builder.recorded}))
    where = f" on {arch} (recorded runs at full size: {places})" if places else ""

    @wraps(builder.build)
    def build(*given: Any, **named: Any) -> Any:
        note(f"builder {builder.name} is {maturity}{where}: what serves must be production")
        return builder.build(*given, **named)

    return replace(builder, build=build)
