"""Shared by the tests of devices: a small CUDA kernel of a local plugin, and boots on the device that ask for it."""

from functools import partial
from types import ModuleType

import kernel_muster as km
import numpy as np
from kernel_muster.registry.backends import EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan

THREADS = 128
HEAD = f'extern "C" __global__ void __launch_bounds__({THREADS}) twice(const float* x, int n, float* out) {{\n'
INDEX = f"  const int i = blockIdx.x * {THREADS} + threadIdx.x;\n"
GOOD = HEAD + INDEX + "  if (i < n) out[i] = x[i] * 2;\n}\n"


def plan(bound, entries, dynamic_shared_bytes=0):
    rows = bound.dims["M"]
    grid = (-(-rows // THREADS), 1, 1)
    arguments = (bound.views["x"], rows, bound.views["out"])
    return LaunchPlan("twice", grid, arguments, dynamic_shared_bytes=dynamic_shared_bytes)


def plugin(folder, text, dynamic_shared_bytes=0, **options):
    """Return a plugin with ``acme::twice`` from this source, and ``acme::good``."""
    params = (km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out"))
    contract = km.Contract(
        "acme_twice",
        "out = 2 x",
        km.Signature(params),
        lambda arguments, dims: {"out": arguments["x"].astype(np.float64) * 2},
        (km.Case("empty", {"M": 0}), km.Case("one", {"M": 1}), km.Case("tile", {"M": 128}), km.Case("odd", {"M": 301})),
        km.Tolerance(2.0**-24, 2e-3, "exact; the absolute part lets two different results both be right"),
    )
    specs = []
    for name, source in (("twice", text), ("good", GOOD)):
        path = folder / f"{name}.cu"
        path.write_text(source)
        shared = dynamic_shared_bytes if name == "twice" else 0
        entry = EntryPoint("twice", ("ptr", "i32", "ptr"), shared)
        backend = CudaKernel(path, (entry,), partial(plan, dynamic_shared_bytes=shared))
        more = options if name == "twice" else {}
        common = {"contract": "acme_twice", "archs": ("sm_80+",), "backend": backend}
        specs.append(km.KernelSpec(key=f"acme::{name}", **common, **more))
    module = ModuleType("acme")
    module.muster_contracts = km.hookimpl(lambda: [contract])
    module.muster_kernels = km.hookimpl(lambda: specs)
    for hook in ("muster_contracts", "muster_kernels"):
        getattr(module, hook).__name__ = hook
    return module


def boot(folder, cache, *keys, local=None, stage="proven"):
    """Boot on the device, ask for the keys, and return the session, passed or refused."""
    manifest = folder / "MODEL.toml"
    manifest.write_text('[model]\nname = "tiny"\nquant = "nvfp4"\n')
    levers = {"MUSTER_CACHE_DIR": cache}
    session = km.boot(manifest=manifest, target="cuda", stage=stage, levers=levers, local_plugins=local or {})
    try:
        with session:
            for key in keys:
                session.kernels.kernel(*key.split("::"))
    except km.BootRefused:
        pass
    return session


def codes(session):
    return [(f.code, f.subject) for f in session.report.findings if f.severity != "note"]
