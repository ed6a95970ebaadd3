"""Temporary environments with installed distributions.

An environment sees the packages of the tests' own environment, so it downloads no package. Its installations vanish
with it. `muster` and a discovery probe run in it as subprocesses.
"""

import base64
import hashlib
import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
GROUP = "kernel_muster.v1"
_PIP_INSTALL = ("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile")
_TIMEOUT_S = 120

# Discovery as JSON, without the report or the command between the test and the registry.
_PROBE = """
import json, os, sys
from dataclasses import asdict
from kernel_muster.audit.opening import BootRequest, discover_for

catalog = discover_for(BootRequest(levers=dict(os.environ)))
print(json.dumps({
    "plugins": [asdict(row) for row in catalog.plugins],
    "findings": [asdict(finding) for finding in catalog.findings],
    "kernels": [[r.spec.key, r.provider.plugin, r.provider.distribution] for r in catalog.kernels],
    "contracts": sorted(catalog.contracts),
    "builders": [builder.name for builder in catalog.builders],
    "levers": [lever.name for lever in catalog.levers],
    "manifest_folders": [str(folder) for folder in catalog.manifest_folders],
    "observers": [name for name, _ in catalog.observers],
    "imported": sorted(sys.modules),
}))
"""


@dataclass(frozen=True)
class Distribution:
    """A tiny distribution made from strings: files by path, and entry points by name."""

    name: str
    files: Mapping[str, str]
    entry_points: Mapping[str, str]
    version: str = "1.0"
    group: str = GROUP

    def write_wheel(self, folder: Path) -> Path:
        """Write a wheel (binary distribution format 1.0) and return its path."""
        stem = f"{self.name.replace('-', '_')}-{self.version}"
        points = "".join(f"{name} = {value}\n" for name, value in self.entry_points.items())
        members = {
            **self.files,
            f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n",
            f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{stem}.dist-info/entry_points.txt": f"[{self.group}]\n{points}",
        }
        record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in members.items())
        members[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n"
        wheel = folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in members.items():
                archive.writestr(path, text)
        return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class Environment:
    """A virtual environment of one test or module."""

    root: Path

    @property
    def site_packages(self) -> Path:
        """Where its distributions go."""
        paths = sysconfig.get_paths("venv", {"base": str(self.root), "platbase": str(self.root)})
        return Path(paths["purelib"])

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / ("Scripts" if os.name == "nt" else "bin") / "python"

    def run(self, *arguments: str | Path, **levers: str) -> subprocess.CompletedProcess[str]:
        """Run its interpreter outside the repository, with no other levers than the given ones."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "PIP_"))}
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            cwd=self.root,
            env={**variables, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "120", **levers},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )

    def install(self, *sources: Path, more: tuple[str, ...] = ()) -> None:
        """Install wheels or source folders with pip, offline."""
        done = self.run(*_PIP_INSTALL, *more, *sources)
        assert done.returncode == 0, done.stdout + done.stderr

    def install_tiny(self, *made: Distribution, more: tuple[str, ...] = ()) -> None:
        """Make wheels of tiny distributions and install them, all at once."""
        folder = self.root / "wheels"
        folder.mkdir(exist_ok=True)
        self.install(*(distribution.write_wheel(folder) for distribution in made), more=more)

    def muster(self, *arguments: str | Path, **levers: str) -> subprocess.CompletedProcess[str]:
        """Run the muster command."""
        return self.run("-m", "kernel_muster", *arguments, **levers)

    def muster_json(self, *arguments: str | Path, code: int = 0, **levers: str) -> Any:
        """Run the muster command and return its JSON, after checking its exit code."""
        done = self.muster(*arguments, "--format", "json", **levers)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return json.loads(done.stdout)

    def discover(self, **levers: str) -> Any:
        """Return what discovery finds."""
        return self.python_json(_PROBE, **levers)

    def python_json(self, script: str, **levers: str) -> Any:
        """Run a script and return the JSON that it prints."""
        done = self.run("-c", script, **levers)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Environment]:
    """Make an environment that sees the packages of this one, editable installs included."""
    parents = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    parents |= {entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")}

    def make() -> Environment:
        environment = Environment(tmp_path_factory.mktemp("environment"))
        venv.create(environment.root, with_pip=importlib.util.find_spec("pip") is None)
        lines = [f"import site; site.addsitedir({entry!r})\n" for entry in sorted(parents) if Path(entry).is_dir()]
        (environment.site_packages / "_parent.pth").write_text("".join(lines))
        return environment

    return make


@pytest.fixture(scope="session")
def copy_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Copy an example, so that building it leaves the repository as it is."""

    def copy(name: str) -> Path:
        target = tmp_path_factory.mktemp("examples") / name
        ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        return Path(shutil.copytree(REPOSITORY / "examples" / name, target, ignore=ignored))

    return copy


@pytest.fixture(scope="session")
def distribution() -> type[Distribution]:
    """Return the class that makes tiny distributions."""
    return Distribution
