"""Sources of plugins, and what of a check's document tests look at."""

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
