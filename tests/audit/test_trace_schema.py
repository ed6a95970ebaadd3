"""The shipped schema of traces, against real traces and against the refusals of a replay."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from kernel_muster.audit.replay.trace import parse_trace, read_trace
from kernel_muster.audit.replay.trace_model import PARTS, Trace
from kernel_muster.audit.replay.trace_schema import SCHEMA_FILE, schema_text, trace_schema
from kernel_muster.registry.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
MINIMAL: dict[str, Any] = {
    "version": "1.0",
    "target": {"arch": "sm_121a", "quant": "nvfp4"},
    "model": "tiny",
    "kernels": [{"module": "acme", "func": "double"}],
    "lookups": [{"module": "acme", "func": "double", "site": "attn.rs:10", "kind": "required"}],
}


def validate(document: object) -> None:
    jsonschema.Draft202012Validator(trace_schema()).validate(document)


def test_schema_file_is_current() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()
    jsonschema.Draft202012Validator.check_schema(trace_schema())


def test_traces_of_real_boots_and_of_the_manual_are_valid(world: Any) -> None:
    outcome = world.run(world.ask("acme::double", "acme::missing"), {"acme": world.acme("acme::double")})
    document = json.loads(json.dumps(outcome.session.trace()))
    validate(document)
    parse_trace(document)
    page = (ROOT / "docs" / "audit-any-engine.md").read_text(encoding="utf-8")
    shown = [json.loads(text) for text in re.findall(r"```json[^\n]*\n(.*?)```", page, re.DOTALL)]
    traces = [one for one in shown if "lookups" in one]
    assert traces
    for one in traces:
        validate(one)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "2.0"},
        {"kernel": []},
        {"lookups": [{"module": "acme", "func": "double", "kind": "required"}]},
        {"lookups": [{**MINIMAL["lookups"][0], "kind": "wanted"}]},
        {"lookups": [{**MINIMAL["lookups"][0], "count": 0}]},
        {"kernels": "acme::double"},
        {"target": {}},
    ],
)
def test_schema_refuses_what_a_replay_refuses(change: dict[str, Any]) -> None:
    validate(MINIMAL)
    parse_trace(MINIMAL)
    with pytest.raises(jsonschema.ValidationError):
        validate(MINIMAL | change)
    with pytest.raises(UsageError):
        parse_trace(MINIMAL | change)


def test_trace_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(MINIMAL).encode())))
    assert read_trace("-").model == "tiny"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"{")))
    with pytest.raises(UsageError, match=r"^stdin: is not JSON"):
        read_trace("-")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match=r"^stdin: is not JSON"):
        read_trace("-")


def optional_fields() -> list[tuple[str, str]]:
    """Return every optional field of every table, each with the table that holds it."""
    tables = {"": Trace, **PARTS}
    return [
        (name, field) for name, table in tables.items() for field, info in table.model_fields.items()
        if not info.is_required()
    ]  # fmt: skip


WHOLE: dict[str, Any] = MINIMAL | {
    "plugins": [{"name": "acme", "distribution": "acme"}],
    "findings": [{"code": "PLUGIN_EMPTY", "subject": "acme", "why": "no hook"}],
    "declared_levers": [{"name": "MUSTER_E"}],
    "requests": [{"lever": "MUSTER_E", "why": "no head"}],
    "missing_layouts": [{"weight": "w", "layout": "tiled", "readers": [["acme", "double"]]}],
    "late_registrations": [{"plugin": "late", "site": "engine.cpp:15"}],
    "tuning": {"table": "t"},
}


def with_null(trace: dict[str, Any], table: str, field: str) -> dict[str, Any]:
    if not table:
        return trace | {field: None}
    rows = trace[table]
    return trace | {table: [row | {field: None} for row in rows] if isinstance(rows, list) else rows | {field: None}}


@pytest.mark.parametrize(("table", "field"), optional_fields())
def test_null_in_an_optional_field_means_that_it_is_absent(table: str, field: str) -> None:
    assert set(WHOLE) >= set(PARTS)
    plain = {name: value for name, value in WHOLE.items() if name != field} if not table else WHOLE
    if (table, field) == ("target", "quant"):
        plain = WHOLE | {"target": {"arch": "sm_121a"}}
    changed = with_null(plain, table, field)
    validate(changed)
    assert parse_trace(changed) == parse_trace(plain)
    assert parse_trace(changed | {"version": "1.9"}) == parse_trace(plain | {"version": "1.9"})


def test_null_in_a_field_that_must_be_there_is_refused() -> None:
    for field in ("version", "target", "kernels", "lookups"):
        with pytest.raises(UsageError):
            parse_trace(MINIMAL | {field: None})
        with pytest.raises(jsonschema.ValidationError):
            validate(MINIMAL | {field: None})
    for change in (
        {"lookups": [MINIMAL["lookups"][0] | {"site": None}]},
        {"target": {"arch": None}},
        {"plugins": [None]},
    ):
        with pytest.raises(UsageError):
            parse_trace(MINIMAL | change)
        with pytest.raises(jsonschema.ValidationError):
            validate(MINIMAL | change)


@pytest.mark.parametrize("version", ["01.1", "1.01", "1", "1.1.0", " 1.1", "+1.1", "1.\u0661", "2.0"])
def test_schema_refuses_a_version_that_a_replay_refuses(version: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(MINIMAL | {"version": version})
