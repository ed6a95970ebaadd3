"""Property tests: no content of a manifest or a config raises an exception, and no error passes."""

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.MODEL_toml import Catalogue, load_manifest, manifest_folder
from kernel_muster.MODEL_toml.crosscheck import cross_problems
from kernel_muster.MODEL_toml.locate import key_lines
from kernel_muster.MODEL_toml.problems import validated
from kernel_muster.registry.errors import UsageError

GOOD = (
    (manifest_folder() / "qwen3.6-35b-a3b" / "MODEL.toml").read_text()
    + """
[expected_absent.w4a16.w4a16_gemm_t_p3]
reason = "a long form"
archs = ["sm_100a"]
quants = ["nvfp4"]
levers = ["MUSTER_X=1"]
until = 2027-06-30
[expected_present.moe]
moe_sort_by_expert = "main path"
[target.sm_90a.expected_absent.w4a4]
other = "no FP4 tensor cores"
"""
)
PARSED = tomli.loads(GOOD)
# Strings are valid in some places, so mutations use types that are wrong everywhere.
NEVER_RIGHT = st.sampled_from([1.5j, b"x", [[]], [{}], {"": {"": {}}}, -1, 2**70, float("nan"), object()])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
CONFIG_KEYS = st.sampled_from(
    ["model_type", "hidden_size", "text_config", "rope_parameters", "rope_scaling", "mrope_interleaved"]
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield (*path, name)
        yield from leaves(inner, (*path, name))


PATHS = sorted(leaves(PARSED), key=str)


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return Catalogue.from_folders([manifest_folder()])


def load(raw: bytes) -> bool:
    """Load and check what load_manifest promises: a manifest or findings, never both, all of them printable."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "MODEL.toml"
        file.write_bytes(raw)
        manifest, findings = load_manifest(file)
    assert (manifest is None) == bool(findings)
    for finding in findings:
        assert finding.code == "BAD_MANIFEST"
        assert finding.where
        assert finding.why.isprintable()
        assert all(remedy.isprintable() for remedy in finding.remedies)
    return manifest is not None


def test_the_manifest_that_is_mutated_is_good() -> None:
    assert load(GOOD.encode())


@given(path=st.sampled_from(PATHS), value=NEVER_RIGHT)
@settings(max_examples=200, deadline=None)
def test_a_value_of_a_wrong_type_is_never_accepted(path: tuple[Any, ...], value: Any) -> None:
    data = copy.deepcopy(PARSED)
    table: Any = data
    for part in path[:-1]:
        table = table[part]
    table[path[-1]] = value
    document, _, problems = validated(data)
    assert [*problems, *cross_problems(data)]
    assert document is None or cross_problems(data)


@given(
    path=st.sampled_from([path for path in PATHS if not isinstance(path[-1], int)]),
    name=st.text(min_size=1, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_an_unknown_key_beside_a_known_one_is_never_accepted(path: tuple[Any, ...], name: str) -> None:
    if path[0] in ("defaults", "expected_absent", "expected_present", "target") and len(path) < 4:
        return  # there the keys are names, and a new one may be right
    data = copy.deepcopy(PARSED)
    table: Any = data
    for part in path[:-1]:
        table = table[part]
    if f"zz{name}" in table:
        return
    table[f"zz{name}"] = 1
    assert validated(data)[0] is None


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_manifest_with_bytes_changed_never_raises(data: st.DataObject) -> None:
    raw = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw) - 1))
        raw[start : start + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    load(bytes(raw))


@given(st.lists(st.sampled_from(GOOD.splitlines()), max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_manifest_with_lines_shuffled_never_raises(lines: list[str]) -> None:
    load("\n".join(lines).encode())


TOKENS = [
    "[",
    "]",
    "[[",
    "]]",
    "{",
    "}",
    "=",
    ",",
    ".",
    "\n",
    " ",
    "#",
    '"',
    "'",
    '"""',
    "'''",
    "\\",
    "a",
    "model",
    "1",
    "é",
]


@given(st.lists(st.sampled_from(TOKENS), max_size=25).map("".join))
@settings(max_examples=500, deadline=None)
def test_key_lines_finds_every_path_of_whatever_toml_parses(text: str) -> None:
    load(text.encode())
    try:
        parsed = tomli.loads(text)
    except tomli.TOMLDecodeError:
        return
    assert set(key_lines(text)) == set(leaves(parsed))


@given(
    st.dictionaries(
        CONFIG_KEYS | st.text(max_size=5), JSON | st.dictionaries(CONFIG_KEYS, JSON, max_size=4), max_size=5
    ),
    st.text(max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_any_config_resolves_to_a_manifest_or_a_finding(
    shipped: Catalogue, config: dict[str, Any], reference: str
) -> None:
    for given_reference in (None, reference):
        resolution = shipped.resolve_config(config, given_reference)
        assert (resolution.manifest is None) != (resolution.finding is None)
        assert resolution.finding is None or resolution.finding.why.isprintable()


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_config_file_resolves_or_is_a_usage_error(shipped: Catalogue, raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_bytes(raw)
        try:
            assert shipped.resolve_config(file).manifest is None
        except UsageError:
            return
