"""Shared by the tests of proofs: a contract that adds rows, its kernels, and boots that ask for one."""

import kernel_muster as km
import numpy as np

LONGEST = 5  # terms of a sum: twice the roundings of one order bound the distance of two
SUM = km.Tolerance(2 * LONGEST * 2.0**-24, 2 * LONGEST * 2.0**-24, "LONGEST FP32 additions of terms below 1")


def total(x, order):
    """Add columns in an order, in FP32."""
    out = x[:, order[0]].copy()
    for column in order[1:]:
        out += x[:, column]
    return out


def good(x, scratch, out):
    out[...] = total(x, range(x.shape[1]))


def backwards(x, scratch, out):
    out[...] = total(x, range(x.shape[1] - 1, -1, -1))


def raises(x, scratch, out):
    raise RuntimeError("no such stream")


def contract(name="acme_sum", most=None, **more):
    params = (
        km.TensorParam("x", "f32", ("M", "K")),
        km.TensorParam("scratch", "f32", ("M",), role="in", optional=True),
        km.TensorParam("out", "f32", ("M",), role="out"),
    )
    return km.Contract(
        name,
        "out = sum of each row",
        km.Signature(params, limits=(("M", most),) if most else ()),
        lambda arguments, dims: {"out": arguments["x"].astype(np.float64).sum(axis=1)},
        tuple(
            km.Case(n, {"M": m, "K": LONGEST})
            for n, m in (("empty", 0), ("one", 1), ("tiles", 16), ("odd", 21))
            if not most or m <= most
        ),
        SUM,
        **{"inputs": lambda dims, rng: {"x": rng.random((dims["M"], dims["K"]), np.float32), "scratch": None}, **more},
    )


def run(world, function=good, others=(), stage="proven", **options):
    """Boot with a kernel and ask for it; ``others`` are (key, contract, function)."""
    offers = [("acme::sum", options.pop("contract", contract()), function, options)]
    offers += [(*other, {}) for other in others]
    contracts = {made.name: made for _, made, _, _ in offers}
    kernels = [
        world.spec(key, contract=made.name, backend=km.PythonKernel(run), **more) for key, made, run, more in offers
    ]
    plugin = world.plugin("acme_plugin", kernels=kernels, contracts=list(contracts.values()))
    return world.run(world.ask(*(key for key, *_ in offers)), {"acme": plugin}, stage=stage)


ONE = ("acme::sum_one", contract("acme_sum_one", most=1), good)
