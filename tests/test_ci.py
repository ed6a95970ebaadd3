"""The packages of CI: the lowest versions in pyproject.toml."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def lowest(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / ".ci" / "lowest.py", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_dependency_is_installed_at_its_lower_bound() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    done = lowest(REPOSITORY / "pyproject.toml")
    pins = dict(line.split("==") for line in done.stdout.splitlines())
    assert len(pins) == len(project["dependencies"])
    assert pins["typer"] == "0.15.4"  # older ones break every command beside click 8.2


@pytest.mark.parametrize("requirement", ["typer", "typer<1", "typer~=0.15", "typer>0.15"])
def test_dependency_without_a_lower_bound_fails(tmp_path: Path, requirement: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(f'[project]\ndependencies = ["{requirement}"]\n')
    done = lowest(file)
    assert (done.returncode, "has no lower bound" in done.stderr) == (1, True)
