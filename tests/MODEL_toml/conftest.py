from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_muster.MODEL_toml import Catalogue, load_manifest
from kernel_muster.registry.findings import Finding

MINIMAL = '[model]\nname = "tiny"\nquant = "nvfp4"\n'


@pytest.fixture
def minimal() -> str:
    return MINIMAL


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write ``<name>/MODEL.toml`` below a folder and return the file's path."""

    def write(text: str | bytes, name: str = "tiny") -> Path:
        file = tmp_path / name / "MODEL.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


@pytest.fixture
def problems(write: Callable[..., Path]) -> Callable[..., list[tuple[str, int, str]]]:
    """Load a text that must be refused; return subject, line and sentence of every finding."""

    def problems(text: str | bytes) -> list[tuple[str, int, str]]:
        file = write(text)
        manifest, findings = load_manifest(file)
        assert manifest is None
        assert findings
        return [_row(finding, file) for finding in findings]

    return problems


def _row(finding: Finding, file: Path) -> tuple[str, int, str]:
    assert finding.code == "BAD_MANIFEST"
    place, _, line = finding.where[0].rpartition(":")
    if place != str(file):
        return finding.subject.replace(str(file), "FILE"), 0, finding.why.replace(str(file), "FILE")
    return finding.subject.replace(str(file), "FILE"), int(line), finding.why.replace(str(file), "FILE")


@pytest.fixture
def catalogue(write: Callable[..., Path], tmp_path: Path) -> Callable[..., Catalogue]:
    """Make a catalogue of models given as ``name -> extra TOML`` below ``[model]``."""

    def catalogue(**models: str) -> Catalogue:
        for name, extra in models.items():
            write(f'[model]\nname = "{name}"\nquant = "nvfp4"\n{extra}', name)
        return Catalogue.from_folders([tmp_path])

    return catalogue
