"""The set hash: the same for the same kernels however they were found, and another one for any other set."""

import hashlib
import json
import random
import sys
from itertools import permutations
from types import ModuleType

import kernel_muster as km
import pytest

KEYS = ("acme::mul", "acme::add", "acme::sub")


def triple(x, out):
    out[...] = x * 3


class Backend:
    """A backend whose name, source and host code are given."""

    def __init__(self, name="python", source="00", host="aa"):
        self.name, self.source_sha256, self.host_sha256 = name, source, host

    def launch(self, arguments, dims, stream):
        raise NotImplementedError


def hash_of(world, *, version="1.0", name="acme-kernels", order=KEYS, asked=KEYS, target="cpu", **options):
    """Install acme in one version and boot with it alone."""
    options = {"backend": Backend()} | options
    world.distribution(name, world.acme(*order, **options), version, plugin="acme")
    path = str(world.sites[-1])
    outcome = world.run(world.ask(*asked), target=target)
    world.monkeypatch.setattr(sys, "path", [p for p in sys.path if p != path])
    assert outcome.report.passed, outcome.said
    return outcome.report.set_hash


def test_set_hash_is_a_sha256_and_the_same_in_every_boot(world):
    first = hash_of(world)
    assert len(first) == 64
    assert int(first, 16)
    assert hash_of(world) == first


def test_set_hash_is_that_of_the_sorted_rows(world):
    keys = [f"acme::k{number}" for number in range(20)]
    rows = [[key, "acme-kernels", "1.0", "python", "fast", ["cpu"], "00", "aa"] for key in sorted(keys)]
    expected = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    assert hash_of(world, order=keys, asked=keys) == expected


def test_set_hash_does_not_depend_on_the_spelling_of_a_distributions_name(world):
    assert hash_of(world) == hash_of(world, name="Acme_Kernels") != hash_of(world, name="acme-kernels-2")


def test_set_hash_does_not_depend_on_any_order(world):
    hashes = {
        hash_of(world, order=order, asked=random.Random(seed).sample(KEYS, 3))  # noqa: S311
        for seed, order in enumerate(permutations(KEYS))
    }
    assert len(hashes) == 1


def test_set_hash_does_not_depend_on_how_often_and_where_a_kernel_was_asked_for(world):
    plugins = {"acme": world.acme("acme::mul")}

    def often(boot):
        for number in range(3):
            boot.kernels.for_layer(f"layers.{number}").kernel("acme", "mul")

    once = world.run(world.ask("acme::mul"), plugins).report.set_hash
    assert world.run(often, plugins).report.set_hash == once


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.1"},
        {"name": "acme-fork"},
        {"backend": Backend(source="01")},
        {"backend": Backend(host="ab")},
        {"backend": Backend(name="numba")},
        {"archs": ("cpu", "sm_90a")},
        {"tier": "reference"},
        {"asked": KEYS[:2]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_set_hash_changes_with_what_the_set_is(world, change):
    assert hash_of(world, **change) != hash_of(world)


def test_set_hash_does_not_change_with_what_nobody_asked_for(world):
    more = (*KEYS, "acme::div")
    assert hash_of(world, order=more) == hash_of(world)


def test_source_of_a_python_kernel_is_part_of_the_set(tmp_path, world, monkeypatch):
    hashes = []
    for text in ("def f(x, out):\n    out[...] = x\n", "def f(x, out):\n    out[...] = x * 2\n"):
        file = tmp_path / f"source{len(hashes)}.py"
        file.write_text(text)
        namespace = {"__name__": f"source{len(hashes)}", "__file__": str(file)}
        exec(compile(text, str(file), "exec"), namespace)  # noqa: S102
        hashes.append(hash_of(world, backend=km.PythonKernel(namespace["f"])))
    assert hashes[0] != hashes[1]


PLAN = """
import kernel_muster as km
def made(scalar):
    return lambda bound, entries: km.LaunchPlan("k", (1, 1, 1), (bound.views["x"], scalar))
def prepare(weight):
    return weight
planner = made(1.0)
"""


def test_planner_and_prepare_are_part_of_the_set_and_of_a_trace_and_no_part_of_what_is_compiled(world, monkeypatch):
    hashes, digests = [], []
    for change in ("", "* 3", "planner = made(3.0)", "# prepare\n"):
        text = PLAN.replace("return weight", f"return weight {change}") if change == "* 3" else f"{PLAN}{change}"
        name = f"planned{len(hashes)}"
        module = ModuleType("acme_planned")
        file = world.folder / f"{name}.py"
        file.write_text(text)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "acme_planned", module)
        exec(compile(text, str(file), "exec"), vars(module))  # noqa: S102
        source = world.folder / "k.cu"
        source.write_text("// nothing\n")
        entry = km.EntryPoint("k", ("ptr", "f32"))
        backend = km.CudaKernel(source, (entry,), module.planner)
        spec = world.spec("acme::mul", archs=("sm_90a",), backend=backend, weight_layout="w", prepare=module.prepare)
        outcome = world.run(
            world.ask("acme::mul"), {"acme": world.plugin(kernels=[spec])}, target="sm_90a", stage="registered"
        )
        hashes.append(outcome.report.set_hash)
        digests.append(spec.backend.source_sha256)
        assert outcome.replay().set_hash == outcome.report.set_hash
    assert len(set(hashes)) == 4
    assert len(set(digests)) == 1


def test_expected_set_hash_passes_and_any_other_refuses(world):
    plugins = {"acme": world.acme(*KEYS)}
    known = world.run(world.ask(*KEYS), plugins).report.set_hash
    assert world.run(world.ask(*KEYS), plugins, expect_set_hash=known).report.passed
    outcome = world.run(world.ask(*KEYS[:2]), plugins, expect_set_hash=known)
    assert outcome.codes == ["SET_HASH_MISMATCH"]
    assert known in outcome.finding("SET_HASH_MISMATCH").why
    assert outcome.report.set_hash in outcome.finding("SET_HASH_MISMATCH").why


def test_replay_of_a_trace_has_the_set_hash_of_its_boot(world):
    outcome = world.run(world.ask(*KEYS), {"acme": world.acme(*KEYS)})
    assert outcome.replay(expect_set_hash=outcome.report.set_hash).passed
    assert outcome.replay().set_hash == outcome.report.set_hash
