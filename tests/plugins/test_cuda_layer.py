"""Instructions that C++ lacks have one wrapper each, in ``plugins/_cuda``: kernels call these."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYER = ROOT / "plugins" / "_cuda"
SOURCES = sorted([*ROOT.glob("plugins/**/*.cu*"), *ROOT.glob("muster/**/*.cu*")])
# Asynchronous copies, barriers, matrices, clusters, launches, caches and addresses. Arithmetic and plain loads may
# stand in the file of their algorithm.
KINDS = (
    "cp.async", "mbarrier", "ldmatrix", "stmatrix", "movmatrix", "mma.sync", "wgmma", "setmaxnreg", "bar.sync",
    "bar.arrive", "barrier", "mapa", "st.async", "ld.shared", "st.shared", "griddepcontrol", "fence", "createpolicy",
    "prefetch", "atom", "red", "nanosleep", "cvta", "__cvta_generic_to_shared",
)  # fmt: skip
_INSTRUCTION = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, KINDS))})(?![a-z])[\w.:]*")


def _strings(text: str) -> str:
    """Return the string literals of a text."""
    return " ".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text))


def statements(text: str) -> Iterator[str]:
    """Yield the text of each inline PTX statement, and of each conversion of an address."""
    text = re.sub(r"//[^\n]*", "", text)
    for found in re.finditer(r"\basm\b(?:\s+volatile)?\s*\(|#define(?:\\\n|[^\n])*", text):
        if found[0].startswith("#"):
            yield _strings(found[0])
            continue
        end, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield _strings(text[found.end() : end])
    yield from re.findall(r"__cvta_\w+", text)


def instructions(text: str) -> set[str]:
    """Return the instructions of these kinds in a source."""
    return {found[0] for one in statements(text) for found in _INSTRUCTION.finditer(one)}


def test_instructions_of_a_source_are_found() -> None:
    text = (
        'void f(u32 at) {\n  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at)); // mbarrier.init\n}'
    )
    assert instructions(text) == {"cp.async.cg.shared.global"}
    assert instructions('#define M(A) \\\n  "mma.sync.aligned.m16n8k16 {" A "};"\n') == {"mma.sync.aligned.m16n8k16"}
    assert instructions("return (u32)__cvta_generic_to_shared(p);") == {"__cvta_generic_to_shared"}
    assert instructions('asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d));') == set()


@pytest.mark.parametrize("source", [one for one in SOURCES if LAYER not in one.parents], ids=lambda one: one.name)
def test_kernel_takes_its_instructions_from_the_layer(source: Path) -> None:
    assert instructions(source.read_text(encoding="utf-8")) == set()


def test_each_instruction_of_the_layer_stands_in_one_header() -> None:
    places: dict[str, list[str]] = {}
    for header in sorted(LAYER.glob("*.cuh")):
        for name in instructions(header.read_text(encoding="utf-8")):
            places.setdefault(name, []).append(header.name)
    assert len(places) > 30
    # mma.sync stands in the decode of NVFP4 too: one statement with it (nvfp4_mma.cuh).
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert shared == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": ["mma.cuh", "nvfp4_mma.cuh"]}


# Names of several sources that mean one thing: a tile configuration, an online softmax, a pipeline of TMA stages, the
# layout of a fused projection.
OF_SEVERAL = {"HeadLayout", "Softmax", "TileConfig", "TmaPipeline", "WgmmaConfig"}


def test_struct_of_a_source_has_the_name_of_no_other_thing() -> None:
    places: dict[str, set[str]] = {}
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        for name in re.findall(r"^struct (?:alignas\(\d+\) )?(\w+)\b(?!<)[^;]*?\{", text, re.MULTILINE):
            places.setdefault(name, set()).add(str(source.relative_to(ROOT)))
    assert len(places) > 100
    assert {name for name, where in places.items() if len(where) > 1} == OF_SEVERAL
