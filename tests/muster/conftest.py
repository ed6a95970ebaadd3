"""The real command in this process, with plugins whose distributions lie on sys.path."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from itertools import count
from pathlib import Path
from typing import Any

import kernel_muster as km
import pytest
from kernel_muster.bench import floor
from kernel_muster.bench.race import race
from kernel_muster.bench.timing import Timed
from kernel_muster.cli.app import run
from kernel_muster.registry.backends.cache import BuildCache
from kernel_muster.registry.backends.request import Compiled
from kernel_muster.registry.findings import Finding
from kernel_muster.registry.launch.runners import HostRunner

_SERIAL = count()
BUILT_IN = tuple(e.name for e in distribution("kernel-muster").entry_points if e.group == "kernel_muster.v1")

# A plugin with three kernels and the builder of a model with configurable lookups.
PLUGIN = """
import kernel_muster as km

ASKED = {asked!r}


def double(x, out):
    out[...] = x * 2


@km.hookimpl
def muster_contracts():
    signature = km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out")))
    return [km.Contract(
        name="acme_double", summary="out = 2 * x", signature=signature,
        reference=lambda arguments, dims: {{"out": arguments["x"].astype("f8") * 2}},
        cases=(km.Case("one", {{"M": 1}}),), tolerance=km.Tolerance(0, 0, "exact"),
    )]


@km.hookimpl
def muster_kernels():
    return [
        km.KernelSpec(key=key, contract="acme_double", archs=archs, backend=km.PythonKernel(double), **options)
        for key, archs, options in {kernels!r}
    ]


@km.hookimpl
def muster_models():
    return [km.ModelBuilder("acme", ("acme_type",), "production", build)]


@km.hookimpl
def muster_levers():
    return [km.Lever(
        name="MUSTER_NO_ACME", kind="bool", default=False, doc="Drop it.",
        evidence="GB10 (sm_121a, 48 SMs): 20 1.74x", effects={{True: "acme dropped", False: "kernel kept"}},
    )]


def build(manifest, kernels, weights=None):
    print("a builder that prints")
    for layer in range(40):
        for key in ASKED:
            kernels.for_layer(f"layers.{{layer}}.ffn").try_kernel(*key.split("::"))
    {after}
"""
KERNELS = (
    ("acme::double", ("cpu",), {}),
    ("acme::hopper", ("sm_90a",), {}),
    ("acme::twice", ("cpu",), {"aliases": ("acme::old_twice",)}),
)
MANIFEST = '[model]\nname = "{name}"\nquant = "nvfp4"\nmodel_type = "acme_type"\n{more}\n'


@dataclass(frozen=True)
class Ran:
    """What one run of the command gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Cli:
    """The command, and a folder to put things for it into."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Ran:
        """Run the command in this process."""
        self.capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = self.capsys.readouterr()
        return Ran(code, out, err)

    def process(self, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run the command in a process of its own, where the same plugins are found."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, **options.pop("env", {})}
        command = [sys.executable, "-m", "kernel_muster", *map(str, arguments)]
        options = {"cwd": self.folder, "capture_output": True, **options}
        return subprocess.run(command, text=True, timeout=120, env=environment, **options)

    def install(self, source: str, name: str = "acme", version: str = "1.0") -> str:
        """Put a distribution with one plugin module on sys.path; return the module's name."""
        module = f"{name}_plugin_{next(_SERIAL)}"
        site = self.folder / f"site_{module}"
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[kernel_muster.v1]\n{name} = {module}\n")
        self.monkeypatch.syspath_prepend(str(site))
        return module

    def acme(self, *asked: str, kernels: Any = KERNELS, after: str = "return None") -> str:
        """Install the plugin whose model asks for some keys."""
        return self.install(PLUGIN.format(asked=asked, kernels=kernels, after=after))

    def manifest(self, more: str = "", name: str = "tiny") -> Path:
        """Write a manifest of the plugin's model."""
        file = self.folder / f"manifests{next(_SERIAL)}" / name / "MODEL.toml"
        file.parent.mkdir(parents=True)
        file.write_text(MANIFEST.format(name=name, more=more))
        return file


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    for name in os.environ:
        if name.startswith("MUSTER_"):
            monkeypatch.delenv(name)
    return Cli(tmp_path, monkeypatch, capsys)


@pytest.fixture
def audit(cli: Cli) -> Callable[..., Ran]:
    """Audit the plugin's model on cpu, without the built-in plugins."""

    def audit(*arguments: object, manifest: Path | None = None, target: str | None = "cpu") -> Ran:
        where = () if target is None else ("--target", target)
        blocked = [part for name in BUILT_IN for part in ("--no-plugin", name)]
        return cli("audit", "--manifest", manifest or cli.manifest(), *where, *blocked, *arguments)

    return audit


@dataclass(frozen=True)
class Ab:
    """``muster ab`` with what keeps it short: few tokens, one run, short prompts (a host reads rows one by one)."""

    cli: Cli
    quick: tuple[str, ...] = ("--target", "cpu", "--tokens", "8", "--repeats", "1", "--drafts", "0")
    texts: tuple[str, ...] = ("abc", "bde", "cfg", "dhi")

    def prompts(self, count: int) -> tuple[str, ...]:
        """Return the options that give so many of them."""
        return tuple(part for text in self.texts[:count] for part in ("--prompt", text))

    def __call__(self, *arguments: object, model: str = "qwen3.6-27b", sequences: str = "1,2") -> Ran:
        """Compare on one model, with a prompt a sequence unless others are given."""
        most = max(int(part) for part in sequences.split(","))
        prompts = () if "--prompt" in arguments else self.prompts(most)
        return self.cli("ab", model, *self.quick, *prompts, "--sequences", sequences, *arguments)


@pytest.fixture
def ab(cli: Cli) -> Ab:
    return Ab(cli)


@pytest.fixture
def unkept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Finding:
    """Let every boot on the host end as if its builds had met a cache that keeps nothing."""
    cache = BuildCache(tmp_path / "cubins")
    (cache.folder / f"{'0' * 64}.cubin").mkdir()
    cache.get_or_build("0" * 64, lambda: Compiled(b"", ""))
    (finding,) = cache.findings()
    monkeypatch.setattr(HostRunner, "findings", lambda runner: (finding,))
    return finding


class HostTimer:
    """Times nothing: each graph takes as long as its first launch says, or 2 us."""

    stream = None

    def capture(self, launches: Any, times: int) -> Any:
        return launches

    capture_torch = capture

    def race(self, graphs: Any, rounds: int) -> Any:
        return {who: Timed(getattr(launches[0], "us", 2.0), 1.0, 3.0, 0.0, 1) for who, (launches, _) in graphs.items()}


@pytest.fixture
def raced_on_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what measures a problem without a device: its rows by contestant."""
    monkeypatch.setattr("kernel_muster.bench.race._synchronize", lambda who: None)
    return lambda problem: {row.contestant: row for row in race(HostTimer(), "bench", problem)}  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def measurable() -> Any:
    """Return the host's kernels, with the floors that a measurement adds."""
    return km.open_registry("cpu", levers={}, local_plugins={floor.NAME: floor})


@pytest.fixture
def check(cli: Any) -> Any:
    """Install a plugin of this source and check it; return the run and its JSON."""

    def check(text: str, *options: object, name: str = "acme") -> Any:
        cli.install(text, name)
        ran = cli("plugin", "check", name, "--format", "json", *options)
        assert ran.code in (0, 1), ran.err
        assert ran.code == int(ran.json["verdict"] == "refused")
        return ran.json

    return check
