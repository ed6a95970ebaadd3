"""The JSON report: its content, its schema, and the way back."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kernel_muster.audit.render.json_report import (
    SCHEMA_FILE,
    parse_report,
    read_report,
    render_json,
    report_schema,
    schema_text,
)
from kernel_muster.audit.report import Report
from kernel_muster.registry.errors import UsageError


@pytest.fixture
def refused(world: Any) -> Report:
    build = world.ask("acme_plugin::double", "acme_plugin::missing")
    return world.run(build, {"acme_plugin": world.acme("acme_plugin::double")}).report


@pytest.fixture
def reports(world: Any, refused: Report) -> list[Report]:
    """One refused, one passed, one degraded, one refused on entry, one whose builder failed."""
    local = {"acme_plugin": world.acme("acme_plugin::double")}
    allowed = {"dangerously_allow_unresolved": ["acme_plugin::missing"]}

    def fail(boot: Any) -> None:
        boot.kernels.try_kernel("acme_plugin", "double")
        raise RuntimeError("the builder failed")

    unfinished = world.boot(local)
    with pytest.raises(RuntimeError), unfinished:
        fail(unfinished)
    return [
        refused,
        world.run(world.ask("acme_plugin::double"), local).report,
        world.run(world.ask("acme_plugin::double", "acme_plugin::missing"), local, **allowed).report,
        world.run(world.ask(), local, None, model="nobody").report,
        unfinished.report,
    ]


def validate(document: object) -> None:
    jsonschema.Draft202012Validator(report_schema()).validate(document)


def test_schema_file_is_current() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), (
        "run python -m kernel_muster.audit.render.json_report"
    )


def test_schema_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(report_schema())


def test_real_reports_are_valid_and_come_back_unchanged(reports: list[Report]) -> None:
    assert [(r.verdict, r.degraded, r.complete) for r in reports] == [
        ("refused", False, True),
        ("passed", False, True),
        ("passed", True, True),
        ("refused", False, False),
        ("incomplete", False, False),
    ]
    for made in reports:
        document = json.loads(render_json(made))
        validate(document)
        assert parse_report(document, "x") == made
        assert document == json.loads(json.dumps(asdict(made)))


def test_count_below_zero_is_no_report(refused: Report) -> None:
    document = json.loads(render_json(refused))
    document["counts"]["lookups"] = -1
    with pytest.raises(jsonschema.ValidationError):
        validate(document)
    with pytest.raises(UsageError, match=r"counts\.lookups is below 0"):
        parse_report(document, "x")


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "maybe"},
        {"version": "2.0"},
        {"schema": "other"},
        {"counts": {}},
        {"findings": [{"code": "MISSING"}]},
        {"degraded": "no"},
    ],
)
def test_schema_refuses_what_is_no_report(refused: Report, change: dict[str, Any]) -> None:
    document = json.loads(render_json(refused)) | change
    with pytest.raises(jsonschema.ValidationError):
        validate(document)
    with pytest.raises(UsageError):
        parse_report(document, "x")


def test_schema_demands_every_field(refused: Report) -> None:
    document = json.loads(render_json(refused))
    for name in document:
        with pytest.raises(jsonschema.ValidationError):
            validate({key: value for key, value in document.items() if key != name})


def test_newer_minor_version_may_add_fields_and_a_newer_major_is_refused(refused: Report) -> None:
    document = json.loads(render_json(refused))
    validate(document | {"version": "1.9", "new": 1})
    assert parse_report(document | {"version": "1.9", "new": 1}, "x") == replace(refused, version="1.9")
    for version in ("2.0", "1.01", "01.1", "1", "1.1.0", "+1.1", " 1.1", "1.\u0661"):
        with pytest.raises(UsageError, match=r"x: version is '.*'; this program reads 1\.x"):
            parse_report(document | {"version": version}, "x")


def test_json_is_ascii_whatever_a_name_holds(refused: Report) -> None:
    row = replace(refused.findings[0], why="caf\u00e9 \udcff \u2028")
    text = render_json(replace(refused, findings=(row,)))
    assert text.isascii()
    assert json.loads(text)["findings"][0]["why"] == "caf\u00e9 \\udcff \u2028"
    assert parse_report(json.loads(text), "x").findings[0].why == "caf\u00e9 \\udcff \u2028"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "cannot be read"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"findings": [1], "findings": []}', "key 'findings' stands twice in one object"),
        (b'{"schema": NaN}', "NaN is not JSON"),
        ('{"schema": "kernel-muster/report", "version": "1.\u0663"}'.encode(), r"version is '1\.\\u0663'"),
        (b"[]", 'is no report: expected "schema"'),
        (b'{"schema": "kernel-muster/report", "version": 1}', "version is '1'"),
        (b'{"schema": "kernel-muster/report", "version": "1.0"}', "problems:"),
    ],
)
def test_file_that_is_no_report_is_a_usage_error(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_report(file)


def test_report_of_an_earlier_minor_version_is_read(refused: Report) -> None:
    data = json.loads(render_json(refused)) | {"version": "1.0"}
    for name in ("below_stage_asked", "failure", "builder", "maturity"):
        del data[name]
    assert parse_report(data, "x") == replace(refused, version="1.0")


def test_byte_order_mark_of_a_report_is_no_problem(tmp_path: Path, refused: Report) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + render_json(refused).encode())
    assert read_report(file) == refused


def test_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no regular file"):
        read_report("/dev/zero")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_report(tmp_path / "none.json")
