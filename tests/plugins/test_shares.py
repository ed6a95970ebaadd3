"""The set hash covers all code of a host kernel: its own module and all of this project's modules that it imports."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.specs import PythonKernel
from kernel_muster.registry.discovery.discover import discover

KERNELS = {r.spec.key: r.spec.backend for r in discover().kernels if isinstance(r.spec.backend, PythonKernel)}


@cache
def imported(name: str) -> set[str]:
    """Return the modules of families that a module imports, at any depth, and the NVFP4 format."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & set(sys.modules)
    code = {
        one for one in found if one.startswith("kernel_muster.plugins.") and not hasattr(sys.modules[one], "__path__")
    }
    return code.union({nvfp4.__name__} & found, *map(imported, code))


@pytest.mark.parametrize("key", KERNELS)
def test_host_kernel_shares_all_code_that_it_imports(key):
    backend = KERNELS[key]
    own = backend.function.__module__
    assert imported(own) - {own} <= {module.__name__ for module in backend.shares}
