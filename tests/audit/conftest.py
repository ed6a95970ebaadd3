"""Small worlds for boots: in-process plugins, distributions on disk, manifests, and fake builders."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import distribution
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.replay.replay import replay
from kernel_muster.audit.replay.trace import parse_trace
from kernel_muster.audit.report import FindingRow, Report
from kernel_muster.registry.findings import CODES
from kernel_muster.registry.keys import parse_key

BUILT_IN = tuple(e.name for e in distribution("kernel-muster").entry_points if e.group == "kernel_muster.v1")
_SERIAL = count()


def double(x: Any, out: Any) -> None:
    out[...] = x * 2


def contract(name: str = "acme_double") -> km.Contract:
    return km.Contract(
        name=name,
        summary="out = 2 * x",
        signature=km.Signature((km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out"))),
        reference=lambda arguments, dims: {"out": np.asarray(arguments["x"], np.float64) * 2},
        cases=(km.Case("one", {"M": 1}),),
        tolerance=km.Tolerance(0, 0, "one multiplication by two is exact"),
    )


def spec(key: str, **options: Any) -> km.KernelSpec:
    options = {"contract": "acme_double", "archs": ("cpu",), "backend": km.PythonKernel(double)} | options
    return km.KernelSpec(key=key, **options)


def plugin(name: str = "a_plugin", **hooks: Any) -> ModuleType:
    """Make a plugin module: ``kernels``, ``contracts``, ``levers``, ``manifests``, ``models`` and ``audit_finished``.

    A value is what the hook returns; a function is the hook itself.
    """
    module = ModuleType(name)
    if "kernels" in hooks and "contracts" not in hooks:
        hooks["contracts"] = [contract()]
    for hook, value in hooks.items():
        function = value if callable(value) else (lambda value=value: value)
        function.__name__ = f"muster_{hook}"
        setattr(module, f"muster_{hook}", km.hookimpl(function))
    return module


def acme(*keys: str, **options: Any) -> ModuleType:
    """Make a plugin that offers some keys alike."""
    return plugin("acme_plugin", kernels=[spec(key, **options) for key in keys])


def tuning_table(kernels: dict[str, str], edges: dict[str, int], **more: Any) -> dict[str, Any]:
    """Return a table as ``muster tune`` writes it, of a device that has no kernel of its own."""
    span = {"least": 16, "most": 1024}
    arms = ("gemv", "t", "hopper")
    places = [dict.fromkeys(("features", "depth", "rows"), size) for size in span.values()]
    edge = {"built_in": 32, "below": "t", "above": "k64", "loss": 0.01, "spread": 0.002, "figures": ["16 x 64: 2 / 1"]}
    return {
        "schema": "kernel-muster/tuning",
        "version": "1.0",
        "device": {
            "name": "Acme A1", "arch": "sm_90a", "multiprocessors": 4, "driver": "13.0", "cuda": "NVRTC 13.0",
        },
        "date": "2026-11-29",
        "command": "muster tune",
        "method": "made up for a test",
        "muster_version": "0",
        "kernels": kernels or {"acme::mul": "0" * 64},
        "covers": {"rows": span, "features": span, "depth": span},
        "edges": [{"lever": name, "value": value, **edge} for name, value in edges.items()],
        "timings": [{**place, "us": dict.fromkeys(arms, 1.5), "spread": dict.fromkeys(arms, 0.01)} for place in places],
    } | more  # fmt: skip


def ask(*keys: str) -> Callable[[km.BootSession], None]:
    """Return a builder that looks each key up as optional."""

    def build(boot: km.BootSession) -> None:
        for key in keys:
            boot.kernels.try_kernel(*key.split("::"))

    return build


@dataclass
class Outcome:
    """A boot that is over: its report, the exception that left the block, and the session."""

    session: km.BootSession
    error: BaseException | None = None
    late_report: Report | None = None

    @property
    def report(self) -> Report:
        return self.late_report or self.session.report

    def judged_late(self, **asked: Any) -> "Outcome":
        """Return this outcome with what happened after the seal in its report; both accounts of it must agree."""
        self.late_report = self.replay(**asked)
        said = [(f.code, f.subject, f.where, f.layers) for f in self.session.late_findings()]
        assert said == [
            (f.code, f.subject, f.where, f.layers) for f in self.report.findings if CODES[f.code].group == "late"
        ]
        return self

    def replay(self, **asked: Any) -> Report:
        """Judge this boot again from nothing but its own trace, as JSON, and its manifest."""
        trace = parse_trace(json.loads(json.dumps(self.session.trace())))
        return replay(trace, AuditOptions(**asked), manifest=self.session.manifest.path)

    @property
    def codes(self) -> list[str]:
        return sorted(f.code for f in self.report.findings)

    @property
    def said(self) -> str:
        return "\n".join(f"{f.code} {f.subject}: {f.why}" for f in self.report.findings)

    def finding(self, code: str) -> FindingRow:
        (found,) = [f for f in self.report.findings if f.code == code]
        return found


@dataclass
class World:
    """What a test may put together: ``world.run(build, plugins, manifest)`` is one boot."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    plugin = staticmethod(plugin)
    acme = staticmethod(acme)
    spec = staticmethod(spec)
    contract = staticmethod(contract)
    ask = staticmethod(ask)
    tuning_table = staticmethod(tuning_table)
    built_in: tuple[str, ...] = BUILT_IN
    sites: list[Path] = field(default_factory=list)

    def manifest(self, text: str = "", name: str = "tiny", model: str = "") -> Path:
        """Write a manifest: ``model`` goes into ``[model]``, ``text`` after it."""
        file = self.folder / f"manifest{next(_SERIAL)}" / name / "MODEL.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'[model]\nname = "{name}"\nquant = "nvfp4"\n{model}\n{text}')
        return file

    def distribution(
        self, name: str, module: ModuleType | None, version: str = "1.0", *, plugin: str = "", group: str = "v1"
    ) -> Path:
        """Put the metadata of a distribution on sys.path; its module is already in sys.modules."""
        value = f"{name.replace('-', '_')}_{next(_SERIAL)}"
        if module is not None:
            self.monkeypatch.setitem(sys.modules, value, module)
        site = self.write_metadata(self.folder / f"site{next(_SERIAL)}", name, version, plugin or name, value, group)
        self.monkeypatch.syspath_prepend(str(site))
        self.sites.append(site)
        return site

    @staticmethod
    def write_metadata(site: Path, name: str, version: str, plugin: str, value: str, group: str = "v1") -> Path:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[kernel_muster.{group}]\n{plugin} = {value}\n")
        return site

    def boot(
        self, local: dict[str, object] | None = None, manifest: Path | str | None = "", **options: Any
    ) -> km.BootSession:
        """Open a boot on cpu with these in-process plugins and none of the built-in ones."""
        if isinstance(manifest, str):
            manifest = self.manifest(manifest)
        blocked = [*self.built_in, *options.pop("no_plugins", ())]
        options = {"target": "cpu", "levers": {}} | options
        return km.boot(manifest=manifest, local_plugins=local or {}, no_plugins=blocked, **options)

    def run(
        self,
        build: Callable[[km.BootSession], object],
        local: dict[str, object] | None = None,
        manifest: Path | str | None = "",
        **options: Any,
    ) -> Outcome:
        """Boot, build inside the block, and return how it ended."""
        session = self.boot(local, manifest, **options)
        try:
            with session:
                build(session)
        except km.BootRefused as error:
            return Outcome(session, error)
        return Outcome(session, None)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.fixture
def rows() -> Callable[[Iterable[FindingRow]], list[tuple[object, ...]]]:
    """Return what must be equal in two reports that say the same."""

    def rows(findings: Iterable[FindingRow]) -> list[tuple[object, ...]]:
        return sorted((f.code, f.subject, f.where, f.layers, f.explains) for f in findings)

    return rows


@pytest.fixture(scope="module")
def handle_of() -> Callable[[object], km.Handle]:
    session = km.open_registry("cpu", levers={})._session
    return lambda key: session.handle_of(parse_key(str(key)))
