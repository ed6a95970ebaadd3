"""The content of the project's wheel: all code and data of the tree under kernel_muster, and nothing beside it."""

import configparser
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.install

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("registry", "MODEL_toml", "plugins", "models", "audit")
FACE = "muster"
_LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")


def _pip(*arguments: str | Path, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what is built: no build/ or egg-info lands in the repository, and none of an older build counts."""
    copy = tmp_path_factory.mktemp("source")
    for folder in (*FOLDERS, FACE):
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=_LEFTOVERS)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def expected(source) -> set[str]:
    """Every file of the tree, by its path in the wheel."""
    places = {FACE: "kernel_muster", **{folder: f"kernel_muster/{folder}" for folder in FOLDERS}}
    return {
        f"{place}/{file.relative_to(source / folder).as_posix()}"
        for folder, place in places.items()
        for file in (source / folder).rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def wheel(source, expected, tmp_path_factory) -> Path:
    """The wheel, built offline with the environment's own setuptools; ``expected`` first: building adds files.

    An older build left a module that the tree does not have any more.
    """
    left = source / "build/lib/kernel_muster/registry/left_by_an_older_build.py"
    left.parent.mkdir(parents=True)
    left.touch()
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, ".", cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def members(wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def _info(members: dict[str, bytes], name: str) -> str:
    (content,) = (data for path, data in members.items() if re.fullmatch(rf"[^/]+\.dist-info/{name}", path))
    return content.decode()


def test_wheel_holds_every_file_of_the_tree_and_no_other(members, expected):
    held = {name for name in members if ".dist-info/" not in name}
    assert sorted(expected - held) == []
    assert sorted(held - expected) == []


def test_wheel_holds_each_kind_of_file(members):
    for pattern in (
        r"kernel_muster/registry/keys\.py",
        r"kernel_muster/plugins/[a-z0-9_]+/__init__\.py",
        r"kernel_muster/MODEL_toml/[^/]+/MODEL\.toml",
        r"kernel_muster/MODEL_toml/manifest\.schema\.json",
        r"kernel_muster/audit/[a-z]+/[a-z]+\.schema\.json",
        r"kernel_muster/__main__\.py",
        r"kernel_muster/py\.typed",
    ):
        assert any(re.fullmatch(pattern, name) for name in members), pattern


def test_wheel_files_are_the_trees_bytes(members, source):
    for name in ("registry/keys.py", "MODEL_toml/qwen3.6-27b/MODEL.toml"):
        assert members[f"kernel_muster/{name}"] == (source / name).read_bytes()


def test_wheel_top_level_is_kernel_muster_alone(members):
    assert {name.partition("/")[0] for name in members if ".dist-info/" not in name} == {"kernel_muster"}
    assert _info(members, "top_level.txt").split() == ["kernel_muster"]
    assert not [name for name in members if name.startswith("kernel_muster/") and "/tests/" in name]


def test_wheel_entry_points_are_the_projects_and_name_modules_it_holds(members, project):
    parser = configparser.ConfigParser(delimiters="=")
    parser.optionxform = str  # names are case-sensitive
    parser.read_string(_info(members, "entry_points.txt"))
    plugins = dict(parser["kernel_muster.v1"])
    assert plugins == project["project"]["entry-points"]["kernel_muster.v1"]
    assert dict(parser["console_scripts"]) == project["project"]["scripts"]
    for value in (*plugins.values(), *project["project"]["scripts"].values()):
        path = value.partition(":")[0].replace(".", "/")
        assert f"{path}.py" in members or f"{path}/__init__.py" in members, value


def test_wheel_registers_every_built_in_family(members):
    text = _info(members, "entry_points.txt")
    folders = {match[1] for name in members if (match := re.match(r"kernel_muster/plugins/([a-z0-9][^/]*)/", name))}
    assert len(folders) >= 9
    for folder in folders:
        assert f"= kernel_muster.plugins.{folder}\n" in text


def test_wheel_metadata_has_licence_version_and_python(members, project):
    metadata = email.message_from_string(_info(members, "METADATA"))
    version = re.search(r'__version__ = "(.+)"', (REPOSITORY / "muster/_version.py").read_text())[1]
    assert (metadata["Name"], metadata["Version"]) == ("kernel-muster", version)
    assert metadata["Requires-Python"] == project["project"]["requires-python"]
    assert metadata["License-Expression"] == project["project"]["license"] == "Apache-2.0"
    assert _info(members, r"(licenses/)?LICENSE").encode() == (REPOSITORY / "LICENSE").read_bytes()
    assert set(metadata.get_all("Provides-Extra")) == set(project["project"]["optional-dependencies"])


_AUDIT = """
import json
import kernel_muster as km
with km.boot("qwen3.6-27b", target="cpu", levers={}) as boot:
    km.build_model(boot.manifest, boot.kernels)
print(json.dumps([km.__file__, boot.report.verdict, boot.report.counts.keys]))
"""


def test_wheel_installed_away_from_the_tree_audits_a_model(wheel, tmp_path):
    installed = tmp_path / "installed"
    _pip("install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", installed, wheel, cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _AUDIT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, verdict, keys = json.loads(done.stdout)
    assert Path(file).parent == installed / "kernel_muster"
    assert verdict == "passed"
    assert keys >= 30
