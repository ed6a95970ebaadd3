"""The work of discovery grows in proportion to the number of plugins and of their registrations."""

from types import ModuleType

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry import suggestions
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.catalog import Catalog, PluginRow
from work import growth

PLUGINS = 30


def contract(name):
    signature = km.Signature((km.TensorParam("out", "f32", ("M",), role="out"),))
    return km.Contract(
        name=name, summary="zeros", signature=signature, cases=(km.Case("one", {"M": 1}),),
        tolerance=km.Tolerance(0, 0, "zeros are exact"), reference=lambda arguments, dims: {"out": np.zeros(dims["M"])},
    )  # fmt: skip


def spec(key, contract="c", **options):
    return km.KernelSpec(key=key, contract=contract, archs=("cpu",), backend=km.PythonKernel(print), **options)


def plugin(contracts=(), kernels=()):
    module = ModuleType("acme_module")
    for hook, items in (("muster_contracts", contracts), ("muster_kernels", kernels)):
        setattr(module, hook, km.hookimpl(lambda items=items: items))
    return module


def chain(size):
    """Each plugin implements the contract of the one before it; the first fails."""
    last = {f"p{at:03}": plugin([contract(f"c{at}")], [spec(f"p{at:03}::f", f"c{at - 1}")]) for at in range(1, size)}
    return {"p000": plugin([contract("c0")], [spec("no key")])} | last


WORLDS = {
    "contracts that fail one after the other": chain,
    "plugins with keys of nobody": lambda size: {
        "p": plugin([contract("c")], [spec("p::f")]),
        **{f"p{at:03}": plugin(kernels=[spec(f"q{at:03}::f")]) for at in range(size)},
    },
    "plugins with contracts of nobody": lambda size: {
        f"p{at:03}": plugin(kernels=[spec(f"p{at:03}::f", f"c{at:03}")]) for at in range(size)
    },
    "one plugin with contracts of nobody": lambda size: {
        "p": plugin(kernels=[spec(f"p::f{at:03}", f"c{at:03}") for at in range(size)])
    },
    "one plugin that waits for levers of nobody": lambda size: {
        "p": plugin([contract("c")], [spec(f"p::f{at:03}", opt_in=f"MUSTER_E{at:03}") for at in range(size)])
    },
    "old names of other modules": lambda size: {
        "p": plugin([contract("c")], [spec(f"p::f{at:03}", aliases=(f"q::f{at:03}",)) for at in range(size)])
    },
    "plugins that fail, and plugins without their contracts": lambda size: {
        **{f"p{at:03}": plugin(kernels=[spec("no key")]) for at in range(size)},
        **{f"q{at:03}": plugin(kernels=[spec(f"q{at:03}::f", f"c{at:03}")]) for at in range(size)},
    },
    "overrides of nobody": lambda size: {
        "p": plugin([contract("c")], [spec("p::f")]),
        **{f"p_{at:03}": plugin(kernels=[spec("p::f", overrides=f"x{at:03}")]) for at in range(size)},
    },
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_discovery_costs_in_proportion_to_what_there_is(world, monkeypatch):
    monkeypatch.setattr(suggestions, "MOST_COMPARED", 4)  # the limit is reached at 30 plugins
    discover(path=[], local=world(2))
    # Each plugin has threads of its own, and waiting for one takes a few instructions more or fewer.
    assert growth(lambda size: lambda: discover(path=[], local=world(size)), PLUGINS) < 2.2


def test_chain_of_failures_is_one_finding_with_every_plugin_that_it_takes_along():
    catalog = discover(path=[], local=chain(5))
    (finding,) = catalog.findings
    assert (finding.code, finding.subject) == ("BAD_SPEC", "p000")
    assert finding.explains == tuple(
        f"plugin p{at:03} needs the contract c{at - 1} of p{at - 1:03}, which failed" for at in range(1, 5)
    )
    assert {row.status for row in catalog.plugins} == {"failed"}


def test_provider_that_did_not_load_is_found_without_looking_at_all_plugins(monkeypatch):
    compared = []
    monkeypatch.setattr(PluginRow, "owns_module", lambda row, module: compared.append(module))
    rows = [PluginRow(f"p{at}", "d", "1", "blocked", keys=(KernelKey(f"k{at}", "f"),)) for at in range(1000)]
    catalog = Catalog(tuple(rows))
    assert catalog.absent_provider(KernelKey("k7", "f")).name == "p7"
    assert catalog.absent_provider(KernelKey("p7_and_more", "f")).name == "p7"
    assert catalog.absent_provider(KernelKey("p7x", "f")) is None
    assert compared == []


def test_provider_that_did_not_load_is_the_first_of_several():
    rows = [PluginRow(name, "d", "1", "failed") for name in ("a_b", "a", "a")]
    assert Catalog(tuple(rows)).absent_provider(KernelKey("a_b_c", "f")) is rows[0]
    assert Catalog(tuple(rows[1:])).absent_provider(KernelKey("a_b_c", "f")) is rows[1]
    assert Catalog(tuple(rows[::-1])).absent_provider(KernelKey("a_b_c", "f")) is rows[2]
