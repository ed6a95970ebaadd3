"""The JSON Schema of a trace, for engines that write one. What it cannot say, ``muster replay`` does."""

import json
from pathlib import Path
from typing import Any

from kernel_muster.audit.replay.trace_model import VERSION, Trace
from kernel_muster.audit.versions import version_pattern

SCHEMA_FILE = Path(__file__).parent / "trace.schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: A name, not an address: the number is the major version.
_ID = f"urn:kernel-muster:trace:{VERSION[0]}"


def trace_schema() -> dict[str, Any]:
    """Make the JSON Schema of this version: a key that it does not know is refused."""
    schema = Trace.model_json_schema()
    schema["properties"]["version"] |= {"pattern": version_pattern(VERSION[0])}
    for table in (schema, *schema["$defs"].values()):
        for name in table["properties"].keys() - set(table["required"]):
            table["properties"][name] = _or_null(table["properties"][name])
    return {"$schema": _DIALECT, "$id": _ID, **schema, "title": "kernel-muster trace"}


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an optional field, which may be null."""
    kinds = field.get("anyOf", [])
    if {"type": "null"} in kinds:
        return field
    outer = {name: value for name, value in field.items() if name in ("default", "title")}
    inner = {name: value for name, value in field.items() if name not in outer}
    return {"anyOf": [*(inner["anyOf"] if inner.keys() == {"anyOf"} else [inner]), {"type": "null"}], **outer}


def schema_text() -> str:
    """Return the text of the shipped file."""
    return json.dumps(trace_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
