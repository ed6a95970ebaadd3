import importlib
from types import ModuleType

import pytest
from kernel_muster.registry.backends.cache import BuildCache


@pytest.fixture(scope="session")
def machine_code() -> ModuleType:
    """Return what reads machine code."""
    return importlib.import_module("machine_code")


@pytest.fixture(scope="session")
def build_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuildCache:
    """Return a cache of compiled kernels that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return BuildCache((own.parent if hasattr(request.config, "workerinput") else own) / "cubins")
