"""Broken plugins, really installed: each gives one finding with plugin, place and reason, and leaves no kernel."""

import json
import re
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.install

HEAD = """
import kernel_muster as km

def add_rows(x, residual):
    residual += x

def spec(key, contract="bf16_residual_add", **more):
    return km.KernelSpec(key=key, contract=contract, archs=("cpu",), backend=km.PythonKernel(add_rows), **more)

GOOD = spec(__name__ + "::good")
"""
KERNELS = """
@km.hookimpl
def muster_kernels():
    return (GOOD,)
"""
LEVERS = """
@km.hookimpl
def muster_levers():
"""


@dataclass(frozen=True)
class Broken:
    """A plugin, what it does wrong, and what the one finding about it must say."""

    name: str
    source: str
    code: str
    why: tuple[str, ...]
    log: tuple[str, ...] = ()
    where: str = ""  # a line of the source in the finding or its log
    status: str = "failed"
    value: str = ""  # of the entry point; default: the module
    group: str = "kernel_muster.v1"

    @property
    def distribution(self) -> str:
        return f"broken-{self.name.replace('_', '-')}"

    @property
    def entry(self) -> str:
        return self.value or self.name


BROKEN = (
    Broken(
        "import_error",
        "try:\n"
        "    import a_library_that_is_not_there\n"
        "except ImportError as error:\n"
        "    raise RuntimeError('install the library first') from error\n",
        "PLUGIN_LOAD_FAILED",
        ("its import failed: RuntimeError",),
        ("RuntimeError: install the library first", "because of ModuleNotFoundError: No module named 'a_library_that"),
        where="raise RuntimeError",
    ),
    Broken(
        "no_module",
        "",
        "PLUGIN_LOAD_FAILED",
        ("its import failed: ModuleNotFoundError",),
        ("No module named 'no_module.plugin'",),
        value="no_module.plugin",
    ),
    Broken(
        "exits_at_import",
        "import sys\nsys.exit('no licence found')\n",
        "PLUGIN_LOAD_FAILED",
        ("its import failed: SystemExit",),
        ("SystemExit: no licence found",),
        where="sys.exit",
    ),
    Broken(
        "syntax_error",
        "def broken(:\n",
        "PLUGIN_LOAD_FAILED",
        ("its import failed: SyntaxError",),
        ("SyntaxError",),
    ),
    Broken(
        "raises_in_hook",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    yield GOOD\n    {}['sm_90a']\n",
        "PLUGIN_LOAD_FAILED",
        ("hook muster_kernels failed: KeyError",),
        ("KeyError: 'sm_90a'",),
        where="{}['sm_90a']",
    ),
    Broken(
        "exits_in_hook",
        HEAD + KERNELS + LEVERS + "    raise SystemExit(3)\n",
        "PLUGIN_LOAD_FAILED",
        ("hook muster_levers failed: SystemExit",),
        ("SystemExit: 3",),
        where="raise SystemExit(3)",
    ),
    Broken(
        "misspelt_hook",
        HEAD + KERNELS + "@km.hookimpl\ndef muster_kernel():\n    return ()\n",
        "UNKNOWN_HOOK",
        ("muster_kernel is no hook", "did you mean muster_kernels"),
        where="@km.hookimpl\ndef muster_kernel()",
    ),
    Broken(
        "misspelt_unmarked",
        HEAD + KERNELS + "def muster_lever():\n    return ()\n",
        "UNKNOWN_HOOK",
        ("muster_lever is named like a hook", "did you mean muster_levers"),
        where="def muster_lever()",
    ),
    Broken(
        "unmarked_hook",
        HEAD + KERNELS + "def muster_levers():\n    return ()\n",
        "UNKNOWN_HOOK",
        ("muster_levers is not marked as a hook",),
        where="def muster_levers()",
    ),
    Broken(
        "wrapper",
        HEAD + "@km.hookimpl(wrapper=True)\ndef muster_kernels():\n    return (yield)\n",
        "BAD_SPEC",
        ("hookimpl muster_kernels uses wrapper: plain hookimpls only",),
    ),
    Broken(
        "old_wrapper",
        HEAD + "@km.hookimpl(hookwrapper=True)\ndef muster_kernels():\n    yield\n",
        "BAD_SPEC",
        ("hookimpl muster_kernels uses hookwrapper: plain hookimpls only",),
    ),
    Broken(
        "comes_first",
        HEAD + KERNELS.replace("hookimpl", "hookimpl(tryfirst=True)"),
        "BAD_SPEC",
        ("hookimpl muster_kernels uses tryfirst: plain hookimpls only",),
    ),
    Broken(
        "wrong_arguments",
        HEAD + "@km.hookimpl\ndef muster_kernels(target):\n    return (GOOD,)\n",
        "BAD_SPEC",
        ("target", "muster_kernels"),
    ),
    Broken(
        "a_class",
        HEAD + "class Plugin:\n    @km.hookimpl\n    def muster_kernels(self):\n        return (GOOD,)\n",
        "BAD_SPEC",
        ("the entry point names the class Plugin, not a module",),
        value="a_class:Plugin",
    ),
    Broken(
        "other_api",
        HEAD + KERNELS,
        "API_MISMATCH",
        ("kernel_muster.v2", "kernel_muster.v1", "it was not imported"),
        status="mismatched",
        group="kernel_muster.v2",
    ),
    Broken("no_hook", HEAD, "PLUGIN_EMPTY", ("it implements no hook",), status="loaded"),
    Broken(
        "nothing_given",
        HEAD + LEVERS + "    return ()\n",
        "PLUGIN_EMPTY",
        ("every hook returned nothing",),
        status="loaded",
    ),
    Broken(
        "hangs_at_import",
        "import time\ntime.sleep(3600)\n",
        "PLUGIN_LOAD_FAILED",
        ("still importing, or in a hook, after 1 s",),
        where="time.sleep(3600)",
    ),
    Broken(
        "hangs_in_hook",
        HEAD + "import time\n" + KERNELS + LEVERS + "    time.sleep(3600)\n",
        "PLUGIN_LOAD_FAILED",
        ("still importing, or in a hook, after 1 s",),
        where="time.sleep(3600)",
    ),
    Broken(
        "never_ends",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    while True:\n        yield GOOD\n",
        "BAD_SPEC",
        ("muster_kernels returned more than",),
    ),
    Broken(
        "gives_text",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    return 'acme::gemm'\n",
        "PLUGIN_LOAD_FAILED",
        ("hook muster_kernels failed: TypeError",),
        ("muster_kernels returned str, expected an iterable of KernelSpec",),
    ),
    Broken(
        "gives_garbage",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    return [GOOD, 42]\n",
        "BAD_SPEC",
        ("muster_kernels()[1]: expected KernelSpec, got int",),
    ),
    Broken(
        "garbage_contract_name",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    return [GOOD, spec(__name__ + '::bad', contract=None)]\n",
        "BAD_SPEC",
        ("muster_kernels()[1] garbage_contract_name::bad", "contract is None"),
    ),
    Broken(
        "garbage_override",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    return [GOOD, spec('silu::silu_mul', overrides=['x'])]\n",
        "BAD_SPEC",
        ("muster_kernels()[1] silu::silu_mul", "overrides is ['x']"),
    ),
    Broken(
        "garbage_key",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    return [GOOD, spec('Garbage.Key')]\n",
        "BAD_SPEC",
        ("muster_kernels()[1] Garbage.Key", "expected module::func"),
    ),
    Broken(
        "garbage_arch",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n"
        "    backend = km.PythonKernel(add_rows)\n"
        "    return [GOOD, km.KernelSpec(key='garbage_arch::bad', contract='silu_mul', archs=(), backend=backend)]\n",
        "BAD_SPEC",
        ("garbage_arch::bad", "archs is ()"),
    ),
    Broken(
        "garbage_builder",
        HEAD + KERNELS + "@km.hookimpl\ndef muster_models():\n"
        "    return [km.ModelBuilder('garbage', None, 'partial', print)]\n",
        "BAD_SPEC",
        ("muster_models()[0] garbage", "model_types is None"),
    ),
    Broken(
        "garbage_folder",
        HEAD + KERNELS + "from pathlib import Path\n@km.hookimpl\ndef muster_manifests():\n"
        "    return [Path(__file__).parent / 'no_such_folder']\n",
        "BAD_SPEC",
        ("muster_manifests()[0]", "no_such_folder is no folder"),
    ),
    Broken(
        "foreign_key",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n    return [GOOD, spec('residual_add::bf16_residual_ad')]\n",
        "BAD_SPEC",
        (
            "residual_add::bf16_residual_ad: nobody else provides",
            "begin with foreign_key",
            "did you mean residual_add::bf16_residual_add",
        ),
    ),
    Broken(
        "unknown_contract",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n"
        "    return [GOOD, spec('unknown_contract::bad', contract='bf16_residual_ad')]\n",
        "BAD_SPEC",
        ("unknown_contract::bad", "nobody registers the contract", "did you mean bf16_residual_add"),
    ),
    Broken(
        "overrides_nothing",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n"
        "    return [GOOD, spec('residual_add::bf16_residual_add', overrides='kernel-mustre')]\n",
        "BAD_OVERRIDE",
        ("residual_add::bf16_residual_add", "overrides='kernel-mustre'", "others that do: ", "kernel-muster"),
    ),
    Broken(
        "replaces_nothing",
        HEAD + "@km.hookimpl\ndef muster_kernels():\n"
        "    return [GOOD, spec('residual_add::bf16_residual_add', replaces_module=('residual_add', 'nobody'))]\n",
        "BAD_OVERRIDE",
        ("replaces_module names 'nobody'", "residual_add is provided by ", "kernel-muster"),
    ),
    Broken(
        "lever_of_others",
        HEAD + KERNELS + LEVERS + "    return [km.Lever(name='MUSTER_DISABLE', kind='bool', default=False, doc='x')]\n",
        "BAD_SPEC",
        ("lever MUSTER_DISABLE is declared 2 times",),
    ),
)

# A plugin that fails at its very last hook, after one item of each kind.
GIVES_ALL = (
    HEAD
    + KERNELS
    + """
from pathlib import Path

@km.hookimpl
def muster_contracts():
    return [km.Contract("gives_all", "x", km.Signature((km.TensorParam("out", "bf16", ("M",), "out"),)),
                        lambda arguments, dims: {}, (km.Case("one", {"M": 1}),), km.Tolerance(0, 0, "exact"))]

@km.hookimpl
def muster_manifests():
    return [Path(__file__).parent]

@km.hookimpl
def muster_models():
    return [km.ModelBuilder("gives_all", ("gives_all",), "partial", print)]

@km.hookimpl
def muster_audit_finished(report):
    pass

@km.hookimpl
def muster_levers():
    yield km.Lever(name="MUSTER_GIVES_ALL", kind="bool", default=False, doc="x")
"""
)


@pytest.fixture(scope="module")
def environment(make_environment, distribution):
    """One environment with every broken plugin, two that compete, one healthy one, and one installed twice."""
    made = [distribution(b.distribution, {f"{b.name}.py": b.source}, {b.name: b.entry}, "0.3", b.group) for b in BROKEN]
    made += [
        distribution("twin-one", {"twin_one.py": HEAD + KERNELS}, {"twin": "twin_one"}),
        distribution("twin-two", {"twin_two.py": HEAD + KERNELS}, {"twin": "twin_two"}, "2.0"),
        distribution("healthy-kernels", {"healthy.py": HEAD + KERNELS}, {"healthy": "healthy"}, "4.5"),
        distribution("gives-all", {"gives_all.py": GIVES_ALL + "    raise ValueError\n"}, {"gives_all": "gives_all"}),
    ]
    # Three plugins in a chain, each with a kernel under the contract of the previous one. The first one fails.
    made += [
        distribution(f"chain-{name}", {f"chain_{name}.py": source}, {f"chain_{name}": f"chain_{name}"})
        for name, source in _chain()
    ]
    environment = make_environment()
    environment.install_tiny(*made)
    twice = distribution("seen-twice", {"seen_twice.py": HEAD + KERNELS}, {"seen_twice": "seen_twice"})
    environment.install_tiny(twice)
    elsewhere = environment.root / "elsewhere"
    environment.install_tiny(twice, more=("--target", str(elsewhere)))
    (environment.site_packages / "elsewhere.pth").write_text(f"{elsewhere}\n")
    return environment


def _chain():
    contract = (
        "\n@km.hookimpl\ndef muster_contracts():\n"
        "    signature = km.Signature((km.TensorParam('x', 'bf16', ('M', 'H')),"
        " km.TensorParam('residual', 'bf16', ('M', 'H'), 'inout')))\n"
        "    return [km.Contract(__name__, 'x', signature, lambda a, d: {}, (km.Case('one', {'M': 1, 'H': 1}),),"
        " km.Tolerance(0, 0, 'exact'))]\n"
    )
    for name, before in (("a", "bf16_residual_add"), ("b", "chain_a"), ("c", "chain_b")):
        kernels = (
            f"\n@km.hookimpl\ndef muster_kernels():\n    return [spec(__name__ + '::good', contract={before!r})]\n"
        )
        yield name, HEAD + contract + kernels + (LEVERS + "    raise ValueError('x')\n" if name == "a" else "")


@pytest.fixture(scope="module")
def found(environment):
    return environment.discover(MUSTER_PLUGIN_TIMEOUT_S="1")


def _row(found, name):
    (row,) = (row for row in found["plugins"] if row["name"] == name)
    return row


def _findings(found, name):
    return [finding for finding in found["findings"] if finding["subject"] == name]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda b: b.name)
def test_plugin_broken_is_one_finding_with_code_distribution_place_and_cause(broken, found, environment):
    (finding,) = _findings(found, broken.name)
    assert finding["code"] == broken.code
    assert finding["where"][0] == f"{broken.distribution} 0.3 ({broken.entry})"
    for text in broken.why:
        assert text in finding["why"]
    for text in broken.log:
        assert text in finding["log"]
    assert finding["remedies"]
    if broken.where:
        file = environment.site_packages / f"{broken.name}.py"
        line = broken.source[: broken.source.index(broken.where)].count("\n") + 1
        shown = json.dumps([finding["where"], finding["log"]])
        assert f"{file}:{line}" in shown or f'{file}\\", line {line},' in shown


@pytest.mark.parametrize("broken", BROKEN, ids=lambda b: b.name)
def test_plugin_broken_is_listed_with_its_origin_and_state(broken, found, environment):
    row = _row(found, broken.name)
    assert (row["distribution"], row["version"], row["status"]) == (broken.distribution, "0.3", broken.status)
    assert (row["value"], row["location"]) == (broken.entry, str(environment.site_packages))


def test_plugins_broken_leave_nothing_behind(found):
    healthy = {row["name"] for row in found["plugins"] if row["status"] == "loaded"}
    third_party = {plugin for _, plugin, distribution in found["kernels"] if distribution != "kernel-muster"}
    assert third_party == {"healthy", "seen_twice"}
    assert not healthy & {broken.name for broken in BROKEN if broken.status != "loaded"}


def test_plugin_failing_in_its_last_hook_gives_nothing_of_what_came_before(found):
    assert _row(found, "gives_all")["status"] == "failed"
    for what in ("contracts", "builders", "levers", "observers"):
        assert not [name for name in found[what] if "gives_all" in name.lower()]
    assert _row(found, "gives_all")["location"] not in found["manifest_folders"]


def test_plugin_healthy_among_broken_ones_is_loaded(found):
    row = _row(found, "healthy")
    assert (row["distribution"], row["version"], row["status"]) == ("healthy-kernels", "4.5", "loaded")
    assert ["healthy::good", "healthy", "healthy-kernels"] in found["kernels"]
    assert _findings(found, "healthy") == []


def test_built_in_plugins_among_broken_ones_are_all_loaded(found):
    host = [row for row in found["plugins"] if row["distribution"] == "kernel-muster"]
    assert len(host) >= 10
    assert {row["status"] for row in host} == {"loaded"}


def test_two_distributions_with_one_plugin_name_are_both_refused(found):
    (finding,) = _findings(found, "twin")
    assert finding["code"] == "PLUGIN_DUPLICATE"
    assert [where.partition(" at ")[0] for where in finding["where"]] == [
        "twin-one 1.0 (twin_one)",
        "twin-two 2.0 (twin_two)",
    ]
    rows = [row for row in found["plugins"] if row["name"] == "twin"]
    assert [(row["distribution"], row["status"]) for row in rows] == [("twin-one", "failed"), ("twin-two", "failed")]
    assert not {"twin_one", "twin_two"} & set(found["imported"])


def test_plugin_whose_metadata_is_seen_twice_is_one_plugin_with_a_note(found, environment):
    row = _row(found, "seen_twice")
    assert row["status"] == "loaded"
    assert _findings(found, "seen_twice") == []
    (note,) = row["notes"]
    assert note.startswith("metadata seen 2 times: ")
    assert str(environment.site_packages) in note
    assert str(environment.root / "elsewhere") in note


def test_plugin_of_another_host_api_is_not_imported(found):
    assert "other_api" not in found["imported"]


def test_plugins_that_need_a_failed_plugins_contract_are_its_consequences(found):
    assert [_row(found, f"chain_{name}")["status"] for name in "abc"] == ["failed"] * 3
    (finding,) = _findings(found, "chain_a")
    assert [text.split()[1] for text in finding["explains"]] == ["chain_b", "chain_c"]
    assert _findings(found, "chain_b") == _findings(found, "chain_c") == []


def test_plugin_blocked_is_not_imported_and_has_no_finding(environment):
    script = (
        "import json, sys\n"
        "from kernel_muster.registry.discovery.discover import discover\n"
        f"names = {[broken.name for broken in BROKEN]!r}\n"
        "catalog = discover(blocked=[*names, 'gives_all', 'twin', 'chain_a', 'chain_b', 'chain_c'], timeout_s=1)\n"
        "print(json.dumps([[f.code for f in catalog.findings], [n for n in names if n in sys.modules]]))\n"
    )
    codes, imported = environment.python_json(script)
    assert (codes, imported) == ([], [])


def test_muster_plugins_lists_every_plugin_broken_or_healthy(environment, found):
    listed = environment.muster_json("plugins", code=1, MUSTER_PLUGIN_TIMEOUT_S="1")
    same = ("name", "distribution", "version", "status", "location", "notes")
    assert [[row[field] for field in same] for row in listed["plugins"]] == [
        [row[field] for field in same] for row in found["plugins"]
    ]
    said = {(finding["code"], finding["subject"]) for finding in listed["findings"]}
    assert said == {(finding["code"], finding["subject"]) for finding in found["findings"]}


def test_muster_plugins_as_text_names_every_plugin_and_cause(environment, found):
    done = environment.muster("plugins", MUSTER_PLUGIN_TIMEOUT_S="1")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for row in found["plugins"]:
        assert re.search(
            rf"^ +{row['name']} +{row['status']} +{row['distribution']} {row['version']} ", done.stdout, re.M
        )
    for broken in BROKEN:
        assert f"{broken.code} {broken.name}\n" in done.stdout
    assert "because of ModuleNotFoundError: No module named 'a_library_that_is_not_there'" in done.stdout


def test_audit_with_broken_plugins_refuses_with_all_of_them(environment):
    report = environment.muster_json("audit", "qwen3.6-27b", "--target", "cpu", code=1, MUSTER_PLUGIN_TIMEOUT_S="1")
    assert report["verdict"] == "refused"
    said = {finding["subject"] for finding in report["findings"]}
    assert {broken.name for broken in BROKEN} <= said
