"""Mutated, malformed or malicious traces give a UsageError or a refused report, and no other result."""

import copy
import json
from typing import Any

import kernel_muster as km
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.render.text import render_text
from kernel_muster.audit.replay.replay import replay
from kernel_muster.audit.replay.trace import parse_trace, read_trace

#: A trace with every key there is.
TRACE = {
    "version": "1.0",
    "target": {"arch": "sm_121a", "quant": "nvfp4"},
    "model": "tiny",
    "kernels": [
        {
            "module": "acme",
            "func": "mul",
            "archs": ["sm_90+"],
            "distribution": "acme-engine",
            "version": "3.1",
            "tier": "fast",
            "overrides": None,
            "replaces_module": None,
            "plugin": "acme",
            "contract": "acme_double",
            "backend": "cuda",
            "source_sha256": "00",
            "host_sha256": "aa",
            "aliases": ["acme::old"],
            "opt_in": "MUSTER_E_FAST",
        }
    ],
    "lookups": [
        {
            "module": "acme",
            "func": "add",
            "site": "engine.cpp:12",
            "kind": "required",
            "phase": "boot",
            "layer": "layers.0",
            "count": 2,
            "chain": [["acme", "add"], ["acme", "sub"]],
            "requested_by": None,
            "when": "always",
        },
        {"module": "acme", "func": "mul", "site": "engine.cpp:13", "kind": "optional", "phase": "boot"},
    ],
    "plugins": [
        {"name": "acme", "distribution": "acme-engine", "version": "3.1", "error": None, "status": "loaded",
         "value": "acme_engine", "keys": ["acme::mul"]},
    ],
    "findings": [
        {"code": "PLUGIN_EMPTY", "subject": "nil", "why": "no hook", "where": ["nil 1.0"], "remedies": ["uninstall it"],
         "log": "", "explains": []}
    ],
    "levers": {"MUSTER_DISABLE": None, "MUSTER_E_FAST": True},
    "declared_levers": [
        {"name": "MUSTER_E_FAST", "kind": "bool", "default": False, "minimum": None, "maximum": None, "choices": [],
         "conflicts": []}
    ],
    "requests": [{"lever": "MUSTER_E_FAST", "why": "no head", "layer": "layers.0", "site": "engine.cpp:14"}],
    "missing_layouts": [{"weight": "layers.0.w", "layout": "tiled", "readers": [["acme", "mul"]]}],
    "late_registrations": [{"plugin": "late", "site": "engine.cpp:15"}],
    "complete": True,
}  # fmt: skip

#: A trace refused for one reason alone, so any evasion shows: no plugin provides acme::add.
ONE_REASON = TRACE | {"requests": [], "missing_layouts": [], "late_registrations": []}

SETTINGS = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = [
    None, True, False, 0, -1, 2**63, 10**4000, 1.5, float("nan"), float("inf"), "", " ", "x" * 200_000, "\ud800",
    "a\x00b", "\x1b[31mred", "layers.\u00b2", "9" * 5000,
    "::", "acme::sin", [], {}, [[]], [None], {"": None}, {"a": {"b": 1}}, deep(900),
    [["acme", "mul"]], ["acme"], "required", "late", "cpu", "1.9", ["sm_90a", "sm_90a"], {"MUSTER_DISABLE": "a::b"},
]  # fmt: skip


def places(value, path=()):
    """Yield the path of every node of a JSON value but the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


PLACES = list(places(ONE_REASON))


def mutated(trace, path, change):
    """Return a copy with one node replaced, removed from its table, or with an unknown neighbour."""
    trace = copy.deepcopy(trace)
    parent = trace
    for part in path[:-1]:
        try:
            parent = parent[part]
        except (KeyError, IndexError, TypeError):
            return trace  # an earlier change took the place away
    kind, value = change
    try:
        if kind == "replace":
            parent[path[-1]] = value
        elif kind == "remove" and isinstance(parent, dict):
            parent.pop(path[-1], None)
        elif kind == "add" and isinstance(parent, dict):
            parent["unknown"] = value
    except (IndexError, TypeError):
        pass
    return trace


def judge(trace, manifest):
    """Return the refused report of a trace, or None for a UsageError. Anything else fails the test."""
    try:
        report = replay(parse_trace(trace), AuditOptions(), manifest=manifest)
    except km.UsageError as error:
        text = str(error)
        assert text.isascii()
        assert len(text) < 20_000
        return None
    render_text(report).encode()
    return report


changes = st.tuples(st.sampled_from(["replace", "replace", "remove", "add"]), st.sampled_from(HOSTILE))


def test_trace_that_is_mutated_here_is_refused_to_begin_with(world):
    report = judge(TRACE, world.manifest())
    assert {f.code for f in report.findings} >= {"MISSING", "REQUEST_NOT_HONORED", "LAYOUT_MISSING", "PLUGIN_EMPTY"}
    assert not report.passed


def test_trace_of_one_reason_has_one_reason(world):
    report = judge(ONE_REASON, world.manifest())
    assert [f.code for f in report.findings if f.severity == "refuse"] == ["MISSING"]


@pytest.mark.parametrize("trace", [TRACE, ONE_REASON], ids=["many", "one"])
def test_every_single_mutation_is_a_usage_error_or_refused(world, trace):
    manifest = world.manifest()
    accepted = 0
    for path in places(trace):
        for kind in ("replace", "remove", "add"):
            for value in HOSTILE if kind == "replace" else HOSTILE[:1]:
                report = judge(mutated(trace, path, (kind, value)), manifest)
                assert report is None or not report.passed, (path, kind, value)
                accepted += report is not None
    assert accepted > 100  # most are refused while parsing; enough must reach the rules


@SETTINGS
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), changes), min_size=2, max_size=4),
    st.sampled_from(["1.0", "1.9"]),
)
def test_several_mutations_are_a_usage_error_or_refused(world, steps, version):
    trace = ONE_REASON | {"version": version}
    for path, change in steps:
        trace = mutated(trace, path, change)
    report = judge(trace, world.manifest())
    assert report is None or not report.passed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(TRACE)) | st.text(), inner),
    max_leaves=20,
)


@SETTINGS
@given(json_values)
def test_any_json_at_all_is_a_usage_error(value):
    with pytest.raises(km.UsageError):
        parse_trace(value)


def read(tmp_path, raw):
    file = tmp_path / "trace.json"
    file.write_bytes(raw)
    return read_trace(file)


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_a_usage_error(tmp_path, raw):
    with pytest.raises(km.UsageError):
        read(tmp_path, raw)


@SETTINGS
@given(st.integers(0, len(json.dumps(TRACE)) - 1))
def test_truncated_trace_is_a_usage_error(tmp_path, length):
    with pytest.raises(km.UsageError):
        read(tmp_path, json.dumps(TRACE).encode()[:length])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xff\xfe{}", "cannot be read"),
        (json.dumps(TRACE).encode("utf-16"), "cannot be read"),
        (b'{"version": "1.0", "version": "1.0"}', "'version' stands twice"),
        (json.dumps(TRACE).replace('"count": 2', '"count": 2, "count": 1').encode(), "'count' stands twice"),
        (json.dumps(TRACE).replace('"count": 2', '"count": NaN').encode(), "NaN is not JSON"),
        (json.dumps(TRACE).replace('"count": 2', '"count": -Infinity').encode(), "-Infinity is not JSON"),
        (json.dumps(TRACE).replace('"count": 2', '"count": 1e999').encode(), "lookups[0].count"),
        (json.dumps(TRACE).replace('"count": 2', '"count": ' + "9" * 5000).encode(), "is not JSON"),
        (json.dumps(TRACE).replace('"count": 2', '"count": ' + "9" * 4000).encode(), "lookups[0].count"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"version":' * 100_000, "is not JSON"),
        (b"[" * 900 + b"]" * 900, "expected an object"),
        (b'{"version": "1.9", "later": ' + b"[" * 900 + b"]" * 900 + b"}", "is missing"),
        (b"", "is not JSON"),
        (b"null", "expected an object"),
        (b'{"version": "1.0"}' * 2, "is not JSON"),
    ],
)  # fmt: skip
def test_file_that_is_no_trace_is_a_usage_error(tmp_path, raw, message):
    with pytest.raises(km.UsageError) as caught:
        read(tmp_path, raw)
    assert message in str(caught.value)


def test_byte_order_mark_is_no_problem(tmp_path):
    assert read(tmp_path, b"\xef\xbb\xbf" + json.dumps(TRACE).encode()).model == "tiny"


@pytest.mark.parametrize("name", ["missing.json", ".", "/dev/null", "/dev/zero", "a\x00b"])
def test_path_that_is_no_regular_file_is_a_usage_error(tmp_path, name):
    with pytest.raises(km.UsageError):
        read_trace(tmp_path / name)


@pytest.mark.parametrize(("name", "said"), [(".", "is no regular file"), ("missing.json", "there is no such file")])
def test_path_of_no_trace_is_said_to_be_absent_only_if_it_is(tmp_path, name, said):
    with pytest.raises(km.UsageError, match=said):
        read_trace(tmp_path / name)


def test_every_problem_is_named_with_its_place():
    trace = copy.deepcopy(TRACE)
    trace["lookups"][0]["kind"] = "maybe"
    trace["kernels"][0]["tier"] = 3
    trace["target"]["arch"] = None
    with pytest.raises(km.UsageError) as caught:
        parse_trace(trace, "t.json")
    for part in ("t.json: 3 problems", "lookups[0].kind", "kernels[0].tier", "target.arch"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernels": None}, "kernels: expected a list, got None"),
        ({"modle": "x"}, "the trace: there is no key 'modle'; did you mean model?"),
        ({"lookups": [{"modul": "a", "func": "b", "site": "c", "kind": "optional"}]}, "did you mean module?"),
        ({"lookups": [{"func": "b", "site": "c", "kind": "optional"}]}, "lookups[0]: 'module' is missing"),
        (
            {"lookups": [{"module": "a", "func": "b", "site": "c", "kind": "optionl"}]},
            "lookups[0].kind: expected optional or required, got 'optionl'; did you mean optional?",
        ),
        ({"lookups": [{"module": 1, "func": "b", "site": "c", "kind": "optional"}]}, "expected text, got 1"),
        ({"target": {"arch": "sm_90a", "quant": "nvfp5"}}, "target.quant: 'nvfp5' is no quantisation"),
        ({"plugins": [{"name": "a", "distribution": "b", "error": 3}]}, "plugins[0].error: expected text, got 3"),
        ({"plugins": [{"name": "a", "distribution": "b", "error": [""]}]}, "error[0]: is empty"),
        ({"requests": [{"lever": "MUSTER_X", "why": ""}]}, "requests[0].why: is empty, got ''"),
        (
            {"findings": [{"code": "PLUGIN_EMPTY", "subject": "nil", "why": ""}]},
            "findings[0].why: is empty, got ''",
        ),
    ],
)
def test_what_is_wrong_is_said_in_sentences(change: dict[str, Any], said: str) -> None:
    trace = {"version": "1.0", "target": {"arch": "cpu"}, "kernels": [], "lookups": []}
    with pytest.raises(km.UsageError) as raised:
        parse_trace(trace | change, "t.json")
    assert said in str(raised.value)
    assert not any(
        word in str(raised.value) for word in ("Input should", "Extra inputs", "Field required", "Value error")
    )
