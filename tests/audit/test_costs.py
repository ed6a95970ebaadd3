"""The work of judging a trace grows in proportion to its size, for any kind of row.

The tests count instructions, which are the same on every machine. Doubling the size doubles the growth exactly, so
a loop over all pairs shows at forty rows.
"""

from collections.abc import Callable
from typing import Any

import pytest
from kernel_muster.audit.diff import compare, render_diff
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.render.text import render_text
from kernel_muster.audit.replay.replay import replay
from kernel_muster.audit.replay.trace import parse_trace
from kernel_muster.registry import suggestions
from work import growth

Rows = list[dict[str, Any]]
Case = Callable[[int], dict[str, Any]]
ROWS = 40
#: A hundred pairs of lines for each of 40 rows add 5% to the growth.
LINEAR = 2.01


def many(count: int, make: Callable[[int], dict[str, Any]]) -> Rows:
    return [make(number) for number in range(count)]


def kernel(module: str = "m", func: str = "f", **more: Any) -> dict[str, Any]:
    return {"module": module, "func": func, **more}


def lookup(module: str = "m", func: str = "f", **more: Any) -> dict[str, Any]:
    return {"module": module, "func": func, "site": "engine.cpp:1", "kind": "optional", **more}


def plugin(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "distribution": f"{name}-engine", **more}


def lever(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


def ring(n: int, i: int) -> str:
    return f"d{(i + 1) % n}"


CASES: dict[str, Case] = {
    "failed plugins, each with its miss": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}", error="boom")),
        "lookups": many(n, lambda i: lookup(f"p{i}_x")),
    },
    "failed plugins, and misses of nobody's keys": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}", error="boom")),
        "lookups": many(n, lambda i: lookup(f"q{i}_x")),
    },
    "failed plugins that no finding names": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}", status="failed")),
        "findings": many(n, lambda i: {"code": "PLUGIN_LOAD_FAILED", "subject": f"q{i}", "why": "boom"}),
    },
    "one failed plugin with all the keys": lambda n: {
        "plugins": [plugin("p", error="boom", keys=[f"z{i}::f" for i in range(n)])],
        "lookups": many(n, lambda i: lookup(f"z{i}")),
    },
    "one plugin with many errors": lambda n: {"plugins": [plugin("p", error=[f"boom {i}" for i in range(n)])]},
    "blocked plugins": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}", status="blocked", keys=[f"z{i}::f"])),
        "lookups": many(n, lambda i: lookup(f"z{i}")),
    },
    "plugins of one name": lambda n: {"plugins": many(n, lambda i: plugin("p", distribution=f"d{i}", status="loaded"))},
    "equal kernels of one key": lambda n: {"kernels": many(n, lambda i: kernel(distribution=f"d{i}"))},
    "kernels of one key for another architecture": lambda n: {
        "kernels": many(n, lambda i: kernel(distribution=f"d{i}", archs=["sm_90a"])),
    },
    "preferred among equal kernels": lambda n: {
        "kernels": many(n, lambda i: kernel(distribution=f"d{i}")),
        "levers": {"MUSTER_PREFER": "m::f=d5"},
    },
    "circle of overrides": lambda n: {
        "kernels": many(n, lambda i: kernel(distribution=f"d{i}", overrides=ring(n, i))),
    },
    "overrides of nobody": lambda n: {
        "kernels": many(n, lambda i: kernel(distribution=f"d{i}", overrides=f"x{i}")),
    },
    "replaced modules": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}", distribution=f"d{i}", replaces_module=["m", ring(n, i)])),
        "lookups": many(n, lambda i: lookup(func=f"f{i}")),
    },
    "modules that nobody has": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}", distribution=f"d{i}", replaces_module=["m", f"x{i}"])),
    },
    "old names of one key": lambda n: {
        "kernels": [kernel(aliases=[f"a::f{i}" for i in range(n)])],
        "lookups": many(n, lambda i: lookup("a", f"f{i}")),
    },
    "one old name of many keys": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}", aliases=["a::f"], distribution=f"d{i}")),
    },
    "contracts of one key": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}")),
        "kernels": many(n, lambda i: kernel(plugin=f"p{i}", contract=f"c{i}", distribution=f"d{i}")),
        "lookups": many(n, lambda i: lookup(requested_by=f"x{i}")),
    },
    "contracts of many keys": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}")),
        "kernels": many(n, lambda i: kernel(func=f"f{i}", plugin=f"p{i}", contract=f"c{i}")),
        "lookups": many(n, lambda i: lookup(func=f"f{i}")),
    },
    "malformed kernels": lambda n: {"kernels": many(n, lambda i: kernel("M", distribution=f"d{i}"))},
    "kernels of tier reference": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}", tier="reference")),
        "lookups": many(n, lambda i: lookup(func=f"f{i}")),
    },
    "one chain": lambda n: {"lookups": [lookup(func="f0", chain=[["m", f"f{i}"] for i in range(n)])]},
    "chains of three": lambda n: {
        "lookups": many(n, lambda i: lookup(func=f"f{i}", chain=[["m", f"f{i}"], ["m", f"f{i + 1}"], ["m", "g"]])),
    },
    "sites and layers of one key": lambda n: {
        "lookups": many(n, lambda i: lookup(site=f"engine.cpp:{i}", layer=f"layers.{i}", when=f"case {i}")),
    },
    "requests of one key": lambda n: {"lookups": many(n, lambda i: lookup(requested_by=f"x{i}"))},
    "late misses": lambda n: {"lookups": [lookup(), *many(n, lambda i: lookup("x", f"f{i}", phase="late"))]},
    "late registrations": lambda n: {"late_registrations": many(n, lambda i: {"plugin": "p", "site": f"s{i}"})},
    "failed requests": lambda n: {"requests": many(n, lambda i: {"lever": "x", "why": f"w{i}", "layer": f"l.{i}"})},
    "missing layouts": lambda n: {
        "missing_layouts": many(n, lambda i: {"weight": f"w{i}", "layout": "l", "readers": [["m", "f"]]}),
    },
    "preferences": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}")),
        "levers": {"MUSTER_PREFER": ",".join(f"m::f{i}=d" for i in range(n))},
    },
    "levers that exclude one": lambda n: {
        "declared_levers": [
            lever("MUSTER_ONE", kind="bool"),
            *many(n, lambda i: lever(f"MUSTER_E{i}", kind="bool", conflicts=["MUSTER_ONE"])),
        ],
        "levers": {"MUSTER_ONE": True} | {f"MUSTER_E{i}": True for i in range(n)},
    },
    "levers of a table": lambda n: {
        "declared_levers": many(n, lambda i: lever(f"MUSTER_E{i}", kind="int", default=0, tuning="same_bits")),
        "levers": {f"MUSTER_E{i}": 1 for i in range(n)},
        "tuning": {"table": "t", "levers": {f"MUSTER_E{i}": 1 for i in range(n)}, "stale": [f"s{i}" for i in range(n)]},
    },
}


def judging(world: Any, case: Case, size: int) -> Callable[[], object]:
    """Return the whole judgement of a trace: its replay, the text of its report, and a diff of two such reports."""
    plain = {"version": "1.1", "target": {"arch": "sm_121a", "quant": "nvfp4"}, "model": "tiny"}
    trace = parse_trace(plain | {"kernels": [kernel()], "lookups": [lookup()]} | case(size))
    manifest = world.manifest()

    def call() -> None:
        report = replay(trace, AuditOptions(), manifest=manifest)
        render_text(report, verbose=True)
        render_diff(compare(report, report))

    return call


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_judgement_of_a_trace_costs_in_proportion_to_its_size(world, case):
    judging(world, case, 2)()  # imports and compiles everything once
    assert growth(lambda size: judging(world, case, size), ROWS) < LINEAR


SPELT: dict[str, Case] = {
    "failed plugins and unknown levers": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}", error="boom")),
        "levers": {f"MUSTER_E{i}": "1" for i in range(n)},
    },
    "unknown levers among others": lambda n: {
        "declared_levers": many(n, lambda i: lever(f"MUSTER_E{i}")),
        "levers": {f"MUSTER_X{i}": "1" for i in range(n)},
    },
    "near misses": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"kernel_func_{i}")),
        "lookups": many(n, lambda i: lookup(func=f"kernel_fonc_{i}")),
    },
    "one function in many modules": lambda n: {
        "kernels": many(n, lambda i: kernel(f"m{i}")),
        "lookups": many(n, lambda i: lookup(f"x{i}")),
    },
    "a module in the place of the function": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}")),
        "lookups": many(n, lambda i: lookup(f"x{i}", "m")),
    },
    "third-party plugins that nothing asks for": lambda n: {
        "plugins": many(n, lambda i: plugin(f"p{i}")),
        "kernels": many(n, lambda i: kernel(func=f"f{i}", plugin=f"p{i}", distribution=f"p{i}-engine")),
        "lookups": many(n, lambda i: lookup("x", f"ff{i}")),
    },
    "one plugin with keys that nothing asks for": lambda n: {
        "plugins": [plugin("p", distribution="d")],
        "kernels": many(n, lambda i: kernel(func=f"f{i}", plugin="p", distribution="d")),
        "lookups": many(n, lambda i: lookup(func=f"g{i}")),
    },
    "disabled keys that nobody registers": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}")),
        "levers": {"MUSTER_DISABLE": ",".join(f"x::g{i}" for i in range(n))},
    },
    "malformed keys": lambda n: {
        "kernels": many(n, lambda i: kernel(func=f"f{i}")),
        "levers": {"MUSTER_DISABLE": ",".join(f"m.f{i}" for i in range(n))},
    },
}


@pytest.mark.parametrize("case", SPELT.values(), ids=SPELT)
def test_suggestions_cost_in_proportion_to_the_size_of_a_trace(world, case, monkeypatch):
    monkeypatch.setattr(suggestions, "MOST_COMPARED", 4)  # the limit is reached at 40 rows
    judging(world, case, 2)()
    assert growth(lambda size: judging(world, case, size), ROWS) < 2.3  # names differ in length
