"""Sources of plugins, their wheels, and the tested parts of a check's document."""

import zipfile
from pathlib import Path
from typing import Any

HEAD = """
import ctypes, os, time
import kernel_muster as km


def double(x, out):
    out[...] = x * 2


def wrong(x, out):
    out[...] = x * 2.01


def crash(x, out):
    ctypes.string_at(0)


def leave(x, out):
    os._exit(0)


def hang(x, out):
    time.sleep(3600)


def chatter(x, out):
    print("a kernel that prints", flush=True)
    out[...] = x * 2


def contract(name="acme_double", reference=lambda arguments, dims: {"out": arguments["x"].astype("f8") * 2}, **more):
    signature = km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out")))
    return km.Contract(name=name, summary="out = 2 * x", signature=signature, reference=reference,
                       cases=(km.Case("three", {"M": 3}),), tolerance=km.Tolerance(0, 0, "exact"), **more)


def spec(key, function=double, **more):
    return km.KernelSpec(**{"key": key, "contract": "acme_double", "archs": ("cpu",),
                            "backend": km.PythonKernel(function), **more})
"""
HOOKS = """

@km.hookimpl
def muster_contracts():
    return [{contracts}]


@km.hookimpl
def muster_kernels():
    return [{kernels}]
"""


def source(*kernels: str, contracts: str = "contract()", head: str = "") -> str:
    return HEAD + head + HOOKS.format(kernels=", ".join(kernels), contracts=contracts)


def steps(report: Any) -> dict[str, str]:
    return {f"{s['kind']} {s['subject']} {s['target']}".strip(): s["outcome"] for s in report["steps"]}


def codes(report: Any) -> list[tuple[str, str]]:
    return [(finding["code"], finding["subject"]) for finding in report["findings"]]


def wheel(
    folder: Path,
    text: str,
    version: str = "2.0",
    name: str = "acme",
    more: dict[str, str] | None = None,
    entry_points: str = "",
) -> Path:
    """Write a wheel of one module, and of more files."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}_wheel.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points or f"[kernel_muster.v1]\n{name} = {name}_wheel\n",
        **(more or {}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD")))
    return path
