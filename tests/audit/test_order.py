"""The verdict does not depend on the order of plugins, entry points, sys.path or lookups."""

import random
import sys
from dataclasses import replace
from itertools import permutations

import kernel_muster as km

SHUFFLES = 24


def shuffles(items, most=SHUFFLES):
    """Yield the items in order, reversed, and in some other orders, the same on every run."""
    yield list(items)
    yield list(reversed(items))
    for seed in range(most):
        yield random.Random(seed).sample(items, len(items))  # noqa: S311  (reproducible on purpose)


def told(report):
    """Return what a report says, less the logs, which hold line numbers of threads."""
    sites = [list(row.sites) for row in report.kernels]
    return [replace(f, log="") for f in report.findings], report.set_hash, report.verdict, report.kernels, sites


def build(boot, order=()):
    """Ask at one line each, in any order."""
    kernels = boot.kernels
    questions = [
        lambda: kernels.for_layer("layers.10").try_kernel("acme", "mul"),
        lambda: kernels.for_layer("layers.2").try_kernel("acme", "mul"),
        lambda: kernels.kernel("acme", "add", when="second"),
        lambda: kernels.kernel("acme", "add", when="first"),
        lambda: kernels.kernel("acme", "nothing"),
        lambda: kernels.try_kernel("acme", "nothing"),
        lambda: kernels.try_kernel("acme", "nothing"),
        lambda: kernels.first_of(("twin", "one"), ("acme", "gone"), ("acme", "mul")),
        lambda: kernels.first_of(("twin", "one"), ("acme", "mul")),
        lambda: kernels.try_kernel("acme", "turbo", requested_by="MUSTER_B"),
        lambda: kernels.try_kernel("acme", "turbo", requested_by="MUSTER_A"),
        lambda: kernels.try_kernel("acme", "twist", requested_by="MUSTER_A"),
        lambda: kernels.request_failed("MUSTER_A", "no head"),
        lambda: kernels.request_failed("MUSTER_A", "no tail"),
        lambda: kernels.layouts.want("w.1", "tiled", km.KernelKey("acme", "mul")),
        lambda: kernels.layouts.want("w.1", "tiled", km.KernelKey("acme", "add")),
        lambda: kernels.layouts.want("w.0", "tiled", km.KernelKey("acme", "add")),
    ]
    for position in order or range(len(questions)):
        questions[position]()
    return len(questions)


def test_verdict_is_the_same_for_every_order_of_lookups(world):
    plugins = {"acme": world.acme("acme::mul", "acme::add", "acme::add")}
    manifest = world.manifest()
    count = build(world.boot(plugins).__enter__())
    first, *others = [
        told(world.run(lambda boot, order=order: build(boot, order), plugins, manifest).report)
        for order in shuffles(range(count))
    ]
    assert {f.code for f in first[0]} == {
        "MISSING", "FALLBACK_TAKEN", "REQUEST_NOT_HONORED", "LAYOUT_MISSING", "DUPLICATE_KERNEL",
    }  # fmt: skip
    assert all(other == first for other in others)


def _many_distributions(world):
    """Install everything that may go wrong between distributions, and one that is sound."""

    def broken():
        raise RuntimeError("no driver")

    lever = km.Lever(name="MUSTER_SAME", kind="bool", default=False, doc="Declared by two.")
    spec, plugin = world.spec, world.plugin
    world.distribution("acme-kernels", world.acme("acme::mul", "acme::add"), plugin="acme")
    for name in ("fork-a", "fork-b"):
        fork = spec("acme::mul", overrides="acme-kernels")
        world.distribution(name, plugin(kernels=[fork], contracts=[], audit_finished=lambda report: None))
    for name in ("twin-one", "twin-two"):
        world.distribution(name, world.acme("twin::one"), plugin="twin")
    for name in ("lever-a", "lever-b"):
        world.distribution(name, plugin(levers=[lever]))
    world.distribution("broken", plugin(kernels=broken))
    world.distribution("orphan", plugin(kernels=[spec("orphan::mul", contract="lost")], contracts=[]))
    world.distribution("misspelt", plugin(kernel=[]))
    world.distribution("future", None, group="v2")
    world.distribution("empty", plugin())
    world.distribution("typo", plugin(kernels=[spec("acme::mull")], contracts=[]))


def test_verdict_is_the_same_for_every_order_of_the_path(world):
    _many_distributions(world)
    manifest = world.manifest()
    ours, rest = [str(site) for site in world.sites], [p for p in sys.path if p not in map(str, world.sites)]
    reports = []
    for order in shuffles(ours):
        world.monkeypatch.setattr(sys, "path", order + rest)
        reports.append(world.run(build, None, manifest).report)
    assert {"PLUGIN_DUPLICATE", "PLUGIN_LOAD_FAILED", "UNKNOWN_HOOK", "API_MISMATCH", "PLUGIN_EMPTY", "BAD_SPEC",
            "DUPLICATE_KERNEL", "OVERRIDDEN"} <= {f.code for f in reports[0].findings}  # fmt: skip
    assert all(told(report) == told(reports[0]) for report in reports)


def test_verdict_is_the_same_for_every_order_of_local_plugins_and_of_what_they_return(world):
    kernels = [
        world.spec("acme::mul", tier="reference"),
        world.spec("acme::mul"),
        world.spec("acme::add", aliases=("acme::nothing",)),
        world.spec("acme::sub", aliases=("acme::nothing_else",)),
    ]
    empty = world.plugin()
    manifest = world.manifest()
    reports = []
    for order in permutations(kernels):
        for names in permutations(("acme", "zero")):
            plugins = {"acme": world.plugin("acme_plugin", kernels=list(order)), "zero": empty}
            reports.append(world.run(build, {name: plugins[name] for name in names}, manifest).report)
    assert {"KEY_RENAMED", "PLUGIN_EMPTY"} <= {f.code for f in reports[0].findings}
    assert all(told(report) == told(reports[0]) for report in reports)


def test_verdict_is_the_same_for_every_order_of_entry_points_in_one_distribution(world):
    reports = []
    manifest = world.manifest()
    modules = {"acme": world.acme("acme::mul"), "broken": world.plugin(kernels=[42]), "other": world.plugin()}
    for name, module in modules.items():
        world.monkeypatch.setitem(sys.modules, f"order_{name}", module)
    path = list(sys.path)
    for number, order in enumerate(permutations(modules)):
        site = world.folder / f"order{number}"
        world.write_metadata(site, "many", "1.0", "acme", "order_acme")
        lines = "".join(f"{name} = order_{name}\n" for name in order)
        (site / "many-1.0.dist-info" / "entry_points.txt").write_text(f"[kernel_muster.v1]\n{lines}")
        world.monkeypatch.setattr(sys, "path", [str(site), *path])
        reports.append(world.run(build, None, manifest).report)
    assert {"BAD_SPEC", "PLUGIN_EMPTY"} <= {f.code for f in reports[0].findings}
    assert all(told(report) == told(reports[0]) for report in reports)
