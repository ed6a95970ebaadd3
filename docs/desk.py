"""A folder for boots with intended errors: a manifest, installed distributions, and a small engine.

Distributions are real ones on ``sys.path``, and model code has the file name of an engine, so excerpts do not
depend on the place of this repository.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import kernel_muster as km

ENGINE = "engine/layers/mlp.py"
_MODEL = '[model]\nname = "tiny"\nquant = "nvfp4"\n'
#: The start of every plugin here: a contract, and a short way to a spec.
PLUGIN = """
import itertools

import kernel_muster as km
import numpy as np

ROUNDS = itertools.count()


def double(x, out):
    out[...] = x * 2


def close(x, out):
    out[...] = x * np.float32(2 + 2**-22)


def unsteady(x, out):
    out[...] = x * np.float32(2 + next(ROUNDS) %% 2 * 2**-22)


def wrong(x, out):
    out[...] = x * np.float32(2.01)


def partial(x, out):
    out[:4] = x[:4] * 2


def clobber(x, out):
    x *= 2
    out[...] = x


def stand_in(**arguments):
    raise RuntimeError("these reports are about registration")


def contract(name):
    signature = km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out")))
    return km.Contract(name=name, summary="out = 2 * x", signature=signature,
                       reference=lambda arguments, dims: {"out": arguments["x"].astype(np.float64) * 2},
                       cases=(km.Case("five_rows", {"M": 5}),), tolerance=km.Tolerance(2.0**-20, 0, "few roundings"))


def spec(key, contract="acme_double", archs=("cpu",), function=double, **more):
    return km.KernelSpec(key=key, contract=contract, archs=archs, backend=km.PythonKernel(function), **more)


@km.hookimpl
def muster_contracts():
    return [contract("acme_double")]


@km.hookimpl
def muster_kernels():
    return [%s]
"""


class Desk:
    """One folder with a manifest, distributions and an engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest()

    def manifest(self, text: str = "", *, model: str = "", file: str = "MODEL.toml") -> None:
        """Write a manifest: ``model`` goes into ``[model]``, ``text`` after it."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{_MODEL}{model}\n{text}\n", encoding="utf-8")

    def install(
        self, source: str, name: str = "acme-kernels", version: str = "1.2", plugin: str = "acme", group: str = "v1"
    ) -> None:
        """Put a distribution with one plugin on sys.path; a source of one line is a list of specs."""
        site, module = self.folder / "site-packages", name.replace("-", "_")
        info = site / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[kernel_muster.{group}]\n{plugin} = {module}\n", encoding="utf-8")
        text = source if "\n" in source else PLUGIN % source
        (site / f"{module}.py").write_text(text, encoding="utf-8")

    def table(self, kernels: dict[str, str], arch: str = "sm_90a", device: str = "NVIDIA H200", sms: int = 132) -> None:
        """Write a tuning table of one edge with the current kernels, and select it by its lever."""
        behind = km.open_registry("sm_90a").kernel("w4a16_gemv", "w4a16_gemv_batch3")
        kernels = {str(behind.key): behind.spec.backend.source_sha256, **kernels}
        span = {"least": 512, "most": 17408}
        chip = {"name": device, "arch": arch, "multiprocessors": sms, "driver": "13.0", "cuda": "NVRTC 13.0"}
        edge = {"lever": "MUSTER_QKV_TIER_ROWS", "value": 3, "built_in": 3, "below": "one GEMV tier"}
        edge |= {"above": "tiles of 3 rows", "loss": 0.0, "spread": 0.01, "figures": ["M=16 2.00x"]}
        times = {"gemv": 1.0, "tiles3": 2.0}
        places = [dict.fromkeys(("features", "depth", "rows"), size) for size in span.values()]
        table = {
            "schema": "kernel-muster/tuning", "version": "1.0", "device": chip, "date": "2026-11-29", "command": "",
            "method": "", "muster_version": "1", "kernels": kernels, "edges": [edge],
            "timings": [{**place, "us": times, "spread": dict.fromkeys(times, 0.01)} for place in places],
            "covers": {"rows": span, "features": span, "depth": span},
        }  # fmt: skip
        (self.folder / "table.json").write_text(json.dumps(table), encoding="utf-8")
        os.environ["MUSTER_TUNING_TABLE"] = "table.json"

    def boot(self, build: str = 'kernels.kernel("norm", "rms_norm")', **options: Any) -> km.BootSession:
        """Boot with a builder made of these lines, and return the session, passed or refused."""
        options = {"manifest": "MODEL.toml", "target": "cpu"} | options
        session = km.boot(**options)
        # The manual shows findings with the command's options, not with the parameters of boot().
        request = session._boot_request  # noqa: SLF001
        session._boot_request = replace(request, is_command=True)  # noqa: SLF001
        with contextlib.suppress(km.BootRefused), session:
            engine(build)(session.kernels.for_layer("layers.0.mlp"), session.levers)
        return session


def engine(lines: str) -> Callable[[Any, Any], None]:
    """Return a builder whose dispatch sites lie in the engine's file."""
    body = "\n".join(f"        {line}" for line in lines.splitlines())
    space: dict[str, Any] = {}
    source = f"class Mlp:\n    def __init__(self, kernels, levers):\n{body}\n"
    exec(compile(source, ENGINE, "exec"), space)  # noqa: S102  (our own lines, under the file name of an engine)
    model: Callable[[Any, Any], None] = space["Mlp"]
    return model


@contextlib.contextmanager
def desk() -> Iterator[Desk]:
    """Work in a temporary folder and restore the process."""
    before, modules, path = Path.cwd(), set(sys.modules), list(sys.path)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, clean, clear=True):
        try:
            os.chdir(folder)
            sys.path.insert(0, str(Path(folder) / "site-packages"))
            with mock.patch.object(sys, "dont_write_bytecode", True):
                yield Desk(Path(folder))
        finally:
            os.chdir(before)
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                    del sys.modules[name]
