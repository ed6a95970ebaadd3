"""The sizes of rooms: a newcomer finds a module among few, and reads it in one sitting."""

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("registry", "plugins", "models", "MODEL_toml", "audit", "muster")
MOST_LINES, MOST_CUDA_LINES, MOST_MODULES = 400, 600, 16
MODULES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.cu*") if file.is_file())


def test_there_is_something_to_measure() -> None:
    assert len(MODULES) > 300
    assert len(SOURCES) > 60


@pytest.mark.parametrize(("files", "most"), [(MODULES, MOST_LINES), (SOURCES, MOST_CUDA_LINES)])
def test_no_file_is_longer_than_the_limit(files: list[Path], most: int) -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {file: length for file, length in lengths.items() if length > most} == {}


def test_no_package_holds_more_modules_than_the_limit() -> None:
    counts = Counter(file.parent.relative_to(ROOT) for file in MODULES if file.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}
