"""The glossary's replaced words stay out of the CUDA sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Replaced words")[2]
REPLACED = re.findall(r"^\| ([\w ]+) \| ", ROWS, re.MULTILINE)[1:]  # without the header
SOURCES = sorted([*ROOT.glob("plugins/**/*.cu*"), *ROOT.glob("muster/**/*.cu*")])


def test_glossary_lists_replaced_words_and_there_are_sources() -> None:
    assert len(REPLACED) >= 2
    assert len(SOURCES) > 50


@pytest.mark.parametrize("word", REPLACED)
def test_replaced_word_stands_in_no_cuda_source(word: str) -> None:
    found = [
        f"{source.relative_to(ROOT)}:{number}"
        for source in SOURCES
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(rf"(?i)(?<![a-z]){word}(?![a-z])", line)
    ]
    assert found == []
