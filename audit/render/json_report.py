"""The JSON report: the report's own fields, a schema for it, and the way back."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from kernel_muster.audit import strict_json
from kernel_muster.audit.report import SCHEMA, VERSION, Report, check_report
from kernel_muster.audit.versions import minor_of, version_pattern
from kernel_muster.registry.errors import UsageError
from pydantic import TypeAdapter, ValidationError

SCHEMA_FILE = Path(__file__).parent / "report.schema.json"
#: A report of a large model has about 2 MB.
MOST_BYTES = 256 * 1024 * 1024
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_MAJOR = VERSION.partition(".")[0]


@cache
def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


def render_json(report: Report) -> str:
    """Return the report as JSON in ASCII; UsageError for anything else."""
    check_report(report)
    return json.dumps(_encodable(asdict(report)), indent=1) + "\n"


def _encodable(value: Any) -> Any:
    """Spell out what UTF-8 cannot hold: a file's name may be any bytes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value


def report_schema() -> dict[str, Any]:
    """Make the JSON Schema of a report. It stays open: a newer minor version may add fields."""
    schema = _adapter().json_schema(mode="serialization")
    schema["properties"]["schema"] |= {"const": SCHEMA}
    schema["properties"]["version"] |= {"pattern": version_pattern(_MAJOR)}
    for table in (schema, *schema["$defs"].values()):
        table["required"] = list(table["properties"])
        for field in table["properties"].values():
            field.pop("default", None)
            if field.get("type") == "integer":
                field["minimum"] = 0  # every number of a report counts something
    return {"$schema": _DIALECT, **schema, "title": "kernel-muster report", "description": "One audit."}


def schema_text() -> str:
    """Return the text of the shipped file."""
    return json.dumps(report_schema(), indent=1, sort_keys=True) + "\n"


def read_report(path: str | Path) -> Report:
    """Read a JSON report; UsageError if the file is not one that this program understands."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file():  # a device or a pipe may have no end
            raise UsageError(f"{file}: is no regular file")
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file}: larger than {MOST_BYTES} bytes, which no report is")
        data = strict_json.loads(file.read_bytes().decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: is not JSON: {error}") from None
    return parse_report(data, str(file))


def parse_report(data: object, name: str) -> Report:
    """Check a report that was read as plain data; fields that a newer minor version added are ignored."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = str(data.get("schema"))[:40] if isinstance(data, dict) else type(data).__name__
        raise UsageError(f'{name}: is no report: expected "schema": "{SCHEMA}", got {got!r}')
    version = data.get("version")
    if minor_of(version, _MAJOR) is None:
        raise UsageError(f"{name}: version is {str(version)[:40]!r}; this program reads {_MAJOR}.x")
    try:
        report = _adapter().validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)[:10]]
        raise UsageError(f"{name}: {error.error_count()} problems:\n  " + "\n  ".join(problems)) from None
    if negative := [label for label, count in vars(report.counts).items() if count < 0]:
        raise UsageError(f"{name}: counts.{negative[0]} is below 0")
    return report


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
