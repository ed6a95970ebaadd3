"""The first step of ``muster plugin check``: what discovery and selection find about the plugins of a distribution."""

from collections.abc import Iterable, Iterator

from kernel_muster.audit.plugin_check.steps.kernels import equal_kernels
from kernel_muster.audit.plugin_check.steps.models import equal_builders, manifest_findings
from kernel_muster.audit.plugin_check.steps.targets import ARCHS
from kernel_muster.audit.rules.lookups import owner_contract
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.distributions import same_distribution
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.hookspecs import ENTRY_POINT_GROUP
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.selection.catalog import Catalog, PluginRow


def rows_of(catalog: Catalog, distribution: str, plugin: str | None) -> list[PluginRow]:
    """Return the plugins to check: all of a distribution, or the one that was named."""
    rows = (row for row in catalog.plugins if same_distribution(row.distribution, distribution))
    return [row for row in rows if plugin in (None, row.name)]


def own_kernels(catalog: Catalog, rows: Iterable[PluginRow]) -> list[Registered]:
    """Return what these plugins register, if they have loaded."""
    names = {row.name for row in rows if row.status == "loaded"}
    return [registered for registered in catalog.kernels if registered.provider.plugin in names]


def load_findings(catalog: Catalog, distribution: str, plugin: str | None) -> Iterator[Finding]:
    """Yield what discovery and selection find about the plugins of one distribution, or about one of them."""
    rows = rows_of(catalog, distribution, plugin)
    if not rows:
        why = f"{distribution} has no entry point in the group {ENTRY_POINT_GROUP}"
        remedies = (f'list the plugin\'s module in pyproject.toml: [project.entry-points."{ENTRY_POINT_GROUP}"]',)
        yield Finding("PLUGIN_NOT_FOUND", distribution, why, remedies=remedies)
    names = {row.name for row in rows}
    places = tuple(f"{row.distribution} {row.version} ({row.value}" if plugin else f"{row.distribution} {row.version} ("
                   for row in rows)  # fmt: skip
    for finding in catalog.findings:
        if finding.subject in names or any(where.startswith(places) for where in finding.where):
            yield finding
    own = [r for r in catalog.kernels if r.provider.plugin in names]
    yield from _other_contracts(catalog, own)
    yield from equal_kernels(catalog, own, (CPU_TARGET, *(Target(str(arch), arch) for arch in ARCHS)))
    yield from equal_builders(catalog, rows)
    yield from manifest_findings(catalog, rows)


def _other_contracts(catalog: Catalog, own: Iterable[Registered]) -> Iterator[Finding]:
    for registered in own:
        spec = registered.spec
        owner = owner_contract(catalog, spec.kernel_key)
        if owner and owner != spec.contract:
            values = {"provider": str(registered.provider), "contract": spec.contract, "owner": owner}
            why = message("signature_mismatch", key=spec.kernel_key, **values)
            remedies = (message("remedy.implement", contract=owner), message("remedy.own_key"))
            yield Finding("SIGNATURE_MISMATCH", spec.key, why, (str(registered.provider),), remedies)
