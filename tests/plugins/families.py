"""The built-in families: their modules, contracts, and host kernels by key."""

import importlib
import pkgutil

from kernel_muster import plugins

FAMILIES = sorted(
    module.name for module in pkgutil.iter_modules(plugins.__path__) if module.ispkg and module.name[0] != "_"
)
MODULES = [importlib.import_module(f"kernel_muster.plugins.{family}") for family in FAMILIES]
CONTRACTS = {contract.name: contract for module in MODULES for contract in module.muster_contracts()}
SPECS = {spec.key: spec for module in MODULES for spec in module.muster_kernels() if "cpu" in spec.archs}
