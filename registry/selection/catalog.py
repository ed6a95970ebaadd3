"""The catalog: everything that plugins registered, frozen, with what went wrong on the way."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kernel_muster.registry.contract.builders import ModelBuilder
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import Registered
from kernel_muster.registry.distributions import HOST_DISTRIBUTION, same_distribution
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.keys import KernelKey, KeyNames, parse_key
from kernel_muster.registry.levers import CORE_LEVERS, Lever
from kernel_muster.registry.values import frozen

PluginStatus = Literal["loaded", "failed", "blocked", "mismatched"]


@frozen
class PluginRow:
    """One plugin as ``muster plugins`` shows it."""

    name: str
    distribution: str
    version: str
    status: PluginStatus
    value: str = ""
    location: str = ""
    hooks: tuple[str, ...] = ()
    keys: tuple[KernelKey, ...] = ()  # what it registers, or would have registered
    notes: tuple[str, ...] = ()
    last_keys: tuple[KernelKey, ...] = ()  # of one that did not load: what it registered when it last did

    @property
    def namespace(self) -> str:
        """What the modules of its new keys begin with."""
        return self.name.lower().replace("-", "_").replace(".", "_")

    @property
    def is_host(self) -> bool:
        """Whether it is one of the built-in families."""
        return same_distribution(self.distribution, HOST_DISTRIBUTION)

    def owns_module(self, module: str) -> bool:
        """Whether a module name lies in this plugin's namespace."""
        return module == self.namespace or module.startswith(f"{self.namespace}_")


def sort_registered(kernels: Iterable[Registered]) -> tuple[Registered, ...]:
    """Order registrations by what they are, not by who came first."""
    return tuple(
        sorted(
            kernels,
            key=lambda r: (r.spec.kernel_key, r.provider.distribution, r.provider.plugin, r.spec.archs),
        )
    )


@frozen
class Catalog:
    """What a boot can choose from. Nothing is added after discovery."""

    plugins: tuple[PluginRow, ...] = ()
    kernels: tuple[Registered, ...] = ()
    contracts: Mapping[str, Contract] = field(default_factory=dict)
    builders: tuple[ModelBuilder, ...] = ()
    levers: tuple[Lever, ...] = CORE_LEVERS
    manifest_folders: tuple[Path, ...] = ()
    builders_of: Mapping[str, tuple[ModelBuilder, ...]] = field(default_factory=dict)  # by plugin
    folders_of: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)  # of manifests, by plugin
    observers: tuple[tuple[str, Callable[[Any], object]], ...] = ()
    findings: tuple[Finding, ...] = ()

    @cached_property
    def by_key(self) -> Mapping[KernelKey, tuple[Registered, ...]]:
        """Registrations of each key, in a fixed order."""
        index: dict[KernelKey, list[Registered]] = {}
        for registered in sort_registered(self.kernels):
            index.setdefault(registered.spec.kernel_key, []).append(registered)
        return MappingProxyType({key: tuple(rows) for key, rows in index.items()})

    @cached_property
    def key_names(self) -> KeyNames:
        """The registered keys, to suggest what another may be meant for."""
        return KeyNames(self.by_key)

    @cached_property
    def by_alias(self) -> Mapping[str, KernelKey]:
        """Old names of keys; where two keys claim one, the first in order has it."""
        index: dict[str, KernelKey] = {}
        for registered in sort_registered(self.kernels):
            for alias in registered.spec.aliases:
                index.setdefault(alias, registered.spec.kernel_key)
        return MappingProxyType(index)

    @cached_property
    def open_contracts(self) -> Mapping[KernelKey, Contract]:
        """Keys that anybody may provide, each with the contract that a kernel of it implements."""
        return {parse_key(key): contract for contract in self.contracts.values() for key in contract.open_keys}

    def plugins_that(self, status: PluginStatus) -> tuple[PluginRow, ...]:
        """Return the plugins in one state."""
        return tuple(row for row in self.plugins if row.status == status)

    @cached_property
    def plugins_by_name(self) -> Mapping[str, PluginRow]:
        """The plugins by name; of several that compete for one name, the last."""
        return {row.name: row for row in self.plugins}

    def absent_provider(self, key: KernelKey) -> PluginRow | None:
        """Return the failed or blocked plugin that would have provided a key, if one is known to."""
        if row := self.absent_keys.get(key) or self.last_keys.get(key):
            return row
        # A module of several words may lie in several namespaces: ``a`` and ``a_b`` have ``a_b_c``.
        ends = [at for at, letter in enumerate(key.module) if letter == "_"]
        owners = (self._absent_by_namespace.get(key.module[:end]) for end in (*ends, len(key.module)))
        return min((owner for owner in owners if owner is not None), default=(0, None), key=itemgetter(0))[1]

    @cached_property
    def _absent(self) -> tuple[PluginRow, ...]:
        return tuple(row for row in self.plugins if row.status != "loaded")

    @cached_property
    def absent_keys(self) -> Mapping[KernelKey, PluginRow]:
        """The keys that failed and blocked plugins are known to provide, each with its plugin."""
        return {key: row for row in reversed(self._absent) for key in row.keys}  # of several, the first stays

    @cached_property
    def last_keys(self) -> Mapping[KernelKey, PluginRow]:
        """The keys that failed and blocked plugins provided when they last loaded; they explain misses alone."""
        return {key: row for row in reversed(self._absent) for key in row.last_keys}

    @cached_property
    def _absent_by_namespace(self) -> Mapping[str, tuple[int, PluginRow]]:
        """The absent plugins by namespace, each with its place among all; all keys of a built-in family are known."""
        guests = [(at, row) for at, row in enumerate(self._absent) if not (row.is_host and row.keys)]
        return {row.namespace: (at, row) for at, row in reversed(guests)}
