"""The shipped schema of traces, against real ones and against what a replay refuses."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from kernel_muster.audit.replay.trace import parse_trace, read_trace
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
