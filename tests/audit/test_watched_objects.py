"""A plugin's objects are looked at only where their code is watched: it may raise, exit, interrupt or hang."""

import importlib
import sys
import time
from types import ModuleType

import kernel_muster as km
import pytest

SECONDS = 0.3
ENDINGS = {
    "exits": "raise SystemExit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "raises": "raise RuntimeError('no')",
    "hangs": "import time; time.sleep(30)",
}


@pytest.fixture
def boot(world):
    """Boot with one plugin and a short time limit; what ends it must be the report."""

    def boot(plugin, key="acme::a", **options):
        started = time.monotonic()
        levers = {"MUSTER_PLUGIN_TIMEOUT_S": "1"}
        outcome = world.run(world.ask(key), {"acme": plugin}, levers=levers, **options)
        assert time.monotonic() - started < 10
        return outcome

    return boot


def evil(kind, text):
    """Return an object of a class whose code ends in a way of its own."""
    space = {"__name__": "acme"}
    exec(f"class Evil:\n    {text} {ENDINGS[kind]}\n", space)  # noqa: S102
    return space["Evil"]()


@pytest.mark.parametrize("kind", ENDINGS)
@pytest.mark.parametrize("method", ["def __getattribute__(self, name):", "def __dir__(self):"])
def test_local_plugin_whose_class_ends_as_it_likes_is_a_finding(boot, kind, method):
    outcome = boot(evil(kind, method))
    assert "PLUGIN_LOAD_FAILED" in outcome.codes, outcome.said


@pytest.mark.parametrize("kind", ENDINGS)
def test_module_getattr_does_not_run_for_a_digest(world, boot, kind, monkeypatch):
    space = {}
    exec(f"def __getattr__(name):\n    if name != '__path__': raise AttributeError(name)\n    {ENDINGS[kind]}\n", space)  # noqa: S102
    module = ModuleType("acme_quiet")
    module.__dict__.update(__getattr__=space["__getattr__"])
    exec("def kernel(x, out):\n    out[...] = x\n", module.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "acme_quiet", module)
    spec = world.spec("acme::a", backend=km.PythonKernel(module.kernel), prepare=None)
    assert boot(world.plugin("acme_plugin", kernels=[spec])).report.passed


@pytest.mark.parametrize("kind", ENDINGS)
def test_backend_whose_digest_ends_as_it_likes_is_a_finding_of_its_plugin(world, boot, kind):
    space = {}
    exec(  # noqa: S102
        "class Backend:\n    name = 'own'\n    def launch(self, arguments, dims, stream): pass\n"
        f"    @property\n    def source_sha256(self):\n        {ENDINGS[kind]}\n",
        space,
    )
    outcome = boot(world.plugin("acme_plugin", kernels=[world.spec("acme::a", backend=space["Backend"]())]))
    finding = outcome.finding("COMPILE_FAILED")
    assert finding.subject == "acme::a"
    if kind in ("interrupts", "hangs"):
        assert "plugin acme" in finding.why


@pytest.mark.parametrize("kind", ENDINGS)
def test_backend_whose_name_changes_its_mind_is_called_by_its_first(world, boot, kind):
    space = {"asked": []}
    exec(  # noqa: S102
        "class Backend:\n    source_sha256 = '0' * 64\n    def launch(self, arguments, dims, stream): pass\n"
        "    @property\n    def name(self):\n        asked.append(1)\n        if len(asked) == 1: return 'own'\n"
        f"        {ENDINGS[kind]}\n",
        space,
    )
    outcome = boot(world.plugin("acme_plugin", kernels=[world.spec("acme::a", backend=space["Backend"]())]))
    assert [row.backend for row in outcome.report.kernels] == ["own"]


@pytest.mark.parametrize("kind", ENDINGS)
def test_signature_of_a_function_that_ends_as_it_likes_is_a_finding(world, boot, kind):
    def kernel(x, out):
        out[...] = x

    class Shown:
        pass

    space = {}
    exec(f"class Evil:\n    def __iter__(self):\n        {ENDINGS[kind]}\n    parameters = property(__iter__)\n", space)  # noqa: S102
    kernel.__signature__ = space["Evil"]()
    kernel.__wrapped__ = evil(kind, "def __getattribute__(self, name):")
    plugin = world.plugin("acme_plugin", kernels=[world.spec("acme::a", backend=km.PythonKernel(kernel))])
    outcome = boot(plugin)
    assert outcome.report.verdict in ("passed", "refused")  # a report in any case


@pytest.mark.parametrize("kind", ["raises", "interrupts", "hangs"])
def test_exception_whose_text_ends_as_it_likes_is_a_finding(world, boot, kind):
    space = {}
    exec(f"class Evil(Exception):\n    def __str__(self):\n        {ENDINGS[kind]}\n", space)  # noqa: S102

    class Plugin:
        @km.hookimpl
        def muster_kernels(self):
            raise space["Evil"]

    assert boot(Plugin()).finding("PLUGIN_LOAD_FAILED").subject == "acme"


def test_endless_sequence_in_a_closure_ends(world, boot):
    class Endless(list):
        def __iter__(self):
            while True:
                yield 1

    held = Endless([1])

    def kernel(x, out):
        out[...] = held

    spec = world.spec("acme::a", backend=km.PythonKernel(kernel), prepare=None)
    assert boot(world.plugin("acme_plugin", kernels=[spec])).report.verdict in ("passed", "refused")


SOURCE = "import numpy as np\nSCALE = {scale}\n\ndef kernel(x, out):\n    out[...] = x * {inline}\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write and import a module, and return it with a function that writes it anew."""
    file = tmp_path / "acme_edited.py"

    def write(scale=1.0, inline=1.0):
        file.write_text(SOURCE.format(scale=scale, inline=inline))
        importlib.invalidate_caches()

    write()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("acme_edited")
    yield module, write
    sys.modules.pop("acme_edited", None)


def plugin_of(world, module):
    return world.plugin("acme_plugin", kernels=[world.spec("acme::a", backend=km.PythonKernel(module.kernel))])


@pytest.mark.parametrize("change", [{"inline": 3.0}, {"scale": 3.0}])
def test_module_whose_file_was_edited_after_its_import_is_refused(world, boot, module, change):
    module, write = module
    write(**change)
    finding = boot(plugin_of(world, module)).finding("COMPILE_FAILED")
    assert "was changed after acme_edited was imported" in finding.why


def test_reloaded_module_has_the_digest_of_its_new_source(world, boot, module):
    module, write = module
    before = boot(plugin_of(world, module)).report
    write(inline=3.0)
    module = importlib.reload(module)
    after = boot(plugin_of(world, module)).report
    assert (before.verdict, after.verdict) == ("passed", "passed")
    assert before.set_hash != after.set_hash


def test_edit_between_two_boots_does_not_change_the_digest_of_what_runs(world, boot, module):
    module, write = module
    before = boot(plugin_of(world, module)).report
    write(inline=3.0)
    assert boot(plugin_of(world, module)).report.set_hash == before.set_hash
