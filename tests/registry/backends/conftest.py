from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernel_muster.registry.backends import BuildRequest, EntryPoint
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.hardware.arch import parse_arch

SCALE = """\
extern "C" __global__ void __launch_bounds__(128) scale(const float* __restrict__ x, float factor, int n, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * factor;
}
"""
SCALE_PARAMETERS = ("ptr", "f32", "i32", "ptr")


@pytest.fixture(scope="session")
def builder() -> Builder:
    """A builder without a cache."""
    return Builder()


@pytest.fixture
def make_request(tmp_path: Path) -> Callable[..., BuildRequest]:
    """Write a source file and return the request to build it."""

    def make(
        text: str = SCALE, parameters: tuple[str, ...] = SCALE_PARAMETERS, arch: str = "sm_90a", **kwargs: Any
    ) -> BuildRequest:
        names = {name: kwargs.pop(name) for name in ("dynamic_shared_bytes", "threads") if name in kwargs}
        entry = EntryPoint(kwargs.pop("entry", "scale"), parameters, **names)
        source = kwargs.pop("source", tmp_path / "scale.cu")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        return BuildRequest("scale", source, parse_arch(arch), (entry,), **kwargs)

    return make
