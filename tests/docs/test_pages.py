"""The manual is complete, its generated parts are current, and its links lead somewhere."""

import re
from dataclasses import fields
from pathlib import Path

import kernel_muster as km
import pytest
from kernel_muster.audit.report import Counts, FindingRow, KernelRow, Report
from kernel_muster.registry.contract.dtypes import DTYPE_NAMES
from kernel_muster.registry.contract.specs import STAGES
from kernel_muster.registry.findings import CODES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HEADINGS = ["Trigger", "Example", "Remedy", "Test"]
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"```.*?^```$", re.DOTALL | re.MULTILINE)


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives headings."""
    titles = _HEADING.findall(_CODE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_generated_parts_are_current(page, generate):
    assert generate.generated(page) == page.read_text(encoding="utf-8"), "run python docs/generate.py"


def test_generated_tables_close_every_code_span(page, generate):
    for part in generate._PART.finditer(page.read_text(encoding="utf-8")):
        assert [line for line in part[2].splitlines() if line.startswith("|") and line.count("`") % 2] == []


def test_pages_show_no_set_hash_of_some_day(page):
    assert not re.search(r"--expect-set-hash [0-9a-f]{64}", page.read_text(encoding="utf-8"))


def test_links_lead_somewhere(page):
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page}: {link}"


def test_every_page_is_reachable_from_the_readme(manual):
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
        waiting += [
            (page.parent / link.split("#")[0]).resolve() for link in links if not link.startswith(("http", "#"))
        ]
    assert set(manual.values()) <= seen


def test_finding_codes_and_pages_are_the_same():
    assert {file.stem for file in (DOCS / "findings").glob("*.md")} == {*CODES, "README"}


@pytest.mark.parametrize("code", CODES)
def test_finding_page_has_every_part(code):
    text = read(f"findings/{code}.md")
    assert text.startswith(f"# {code}\n")
    assert [title for title in _HEADING.findall(_CODE.sub("", text)) if title != code] == HEADINGS
    parts = re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]
    assert all(len(part.split()) >= 4 for part in parts), "a part is empty"
    assert f" {code} " in parts[1]


def test_every_lever_has_an_entry(generate):
    titles = _HEADING.findall(read("levers.md"))
    assert [lever.name for lever in generate.built_in_levers() if lever.name not in titles] == []


def test_every_command_and_option_is_documented(generate):
    text = read("command.md")
    for name, command in generate.commands().items():
        (part,) = [p for p in text.split("\n## ")[1:] if p.splitlines()[0] == name]
        part = part.replace("\\|", "|")  # a bar in a table's cell
        assert [o for p in generate.parameters(command) for o in p.names if f"`{o}`" not in part] == []


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("write-a-plugin.md", [f.name for kind in (km.KernelSpec, km.Contract, km.Case) for f in fields(kind)]),
        ("write-a-plugin.md", sorted(DTYPE_NAMES)),
        ("write-a-plugin.md", [f.name for f in fields(km.Signature)]),
        ("levers.md", [f.name for f in fields(km.Lever)]),
        ("add-a-model.md", [f.name for f in fields(km.ModelBuilder)]),
        ("read-a-report.md", [f.name for kind in (Report, FindingRow, KernelRow, Counts) for f in fields(kind)]),
        ("read-a-report.md", list(STAGES)),
        ("api.md", [name for name in km.__all__ if name != "__version__"]),
    ],
)
def test_hand_written_lists_are_complete(name, listed):
    text = read(name)
    assert [one for one in listed if f"`{one}`" not in text] == []


def test_dependencies_all_have_their_reason(generate):
    names = {re.match(r"[\w.-]+", one)[0] for rows in generate.declared_requirements().values() for one in rows}
    reasons = read("dependencies.md").split("## Ranges")[0]
    assert [name for name in sorted(names - {"kernel-muster"}) if f"`{name}`" not in reasons] == []
