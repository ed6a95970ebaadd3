import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kernel_muster.registry.backends.cache import BuildCache


def _module(name: str) -> ModuleType:
    """Import a module beside this one, for all tests: their folders are no packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module("host_kernels")


@pytest.fixture(scope="session")
def machine_code() -> ModuleType:
    """Return what reads machine code."""
    return _module("machine_code")


@pytest.fixture(scope="session")
def build_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuildCache:
    """Return a cache of compiled kernels that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return BuildCache((own.parent if hasattr(request.config, "workerinput") else own) / "cubins")
