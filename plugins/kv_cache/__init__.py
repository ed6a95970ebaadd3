"""The paged key and value cache: module ``kv_cache``."""

from collections.abc import Iterable
from functools import partial

from kernel_muster.plugins import _sequences
from kernel_muster.plugins._cuda.launching import device_spec
from kernel_muster.plugins._reference import host_spec
from kernel_muster.plugins.kv_cache import launch
from kernel_muster.plugins.kv_cache.contracts import APPEND
from kernel_muster.plugins.kv_cache.cpu import kv_cache_append
from kernel_muster.registry.contract.contracts import Contract
from kernel_muster.registry.contract.specs import KernelSpec
from kernel_muster.registry.hookspecs import hookimpl

_host_spec = partial(host_spec, shares=(_sequences,))


@hookimpl
def muster_contracts() -> Iterable[Contract]:
    """Return the contract."""
    return (APPEND,)


@hookimpl
def muster_kernels() -> Iterable[KernelSpec]:
    """Return the kernel for each target."""
    yield _host_spec("kv_cache::kv_cache_append", APPEND, kv_cache_append)
    yield device_spec(key="kv_cache::kv_cache_append", contract=APPEND.name, backend=launch.APPEND)
