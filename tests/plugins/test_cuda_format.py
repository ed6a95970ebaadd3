"""The CUDA sources keep the layout of ``.clang-format``, comments within its 120 columns."""

import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("plugins/**/*.cu*"), *ROOT.glob("muster/**/*.cu*")])
# The wheel puts the executable beside the interpreter.
CLANG_FORMAT = Path(sys.executable).with_name("clang-format")


def formatted(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLANG_FORMAT, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, check=False)


def test_every_cuda_source_is_formatted() -> None:
    assert len(SOURCES) > 50
    done = formatted("--dry-run", "--Werror", *SOURCES)
    apply = f"apply: {CLANG_FORMAT} -i {' '.join(str(source.relative_to(ROOT)) for source in SOURCES)}"
    assert done.returncode == 0, f"{done.stderr}\n{apply}"


def test_source_that_is_laid_out_otherwise_is_found(tmp_path: Path) -> None:
    source = tmp_path / "one.cu"
    source.write_text("__global__ void one( ) { }\n", encoding="utf-8")
    (tmp_path / ".clang-format").write_text((ROOT / ".clang-format").read_text(encoding="utf-8"), encoding="utf-8")
    assert formatted("--dry-run", "--Werror", source).returncode == 1


def test_no_line_of_a_cuda_source_is_over_120_columns() -> None:
    long = [
        f"{source.relative_to(ROOT)}:{number}"
        for source in SOURCES
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []


def header(source: Path) -> str:
    """Return the comment at the top of a source."""
    lines = takewhile(lambda line: line.startswith("//"), source.read_text(encoding="utf-8").splitlines())
    return " ".join(" ".join(line.removeprefix("//") for line in lines).split())


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: f"{one.parent.name}-{one.name}")
def test_header_of_a_source_has_its_launcher_or_user_and_its_architectures(source: Path) -> None:
    text = header(source)
    if source.suffix == ".cu":
        assert re.search(r"\bLaunched by \w+\.py\b", text)
    elif source.parent.name != "_cuda":
        assert re.search(r"\b([Ll]aunched|[Uu]sed|[Ii]ncluded) by \w+", text)
    else:
        assert text
        return  # of any family; an instruction that an architecture lacks has its PTX ISA there
    assert re.search(r"\bsm_\d+", text)
