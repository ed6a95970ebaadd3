"""The JSON Schema of a manifest, for editors. ``muster manifest schema`` prints it."""

import json
from pathlib import Path
from typing import Any

from kernel_muster.MODEL_toml.schema import EXTENSION_PATTERN, Document

SCHEMA_FILE = Path(__file__).parent / "manifest.schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: A name, not an address: the number is that of ``schema`` in a manifest.
_ID = "urn:kernel-muster:manifest:1"


def manifest_schema() -> dict[str, Any]:
    """Make the JSON Schema; dates are ISO text in it."""
    schema = Document.model_json_schema(by_alias=True)
    _close(schema)
    schema["patternProperties"] = {EXTENSION_PATTERN: {"type": "object"}}
    return {"$schema": _DIALECT, "$id": _ID, **schema, "title": "kernel-muster MODEL.toml"}


def schema_text() -> str:
    """Return the text of the shipped file."""
    return json.dumps(manifest_schema(), indent=1, sort_keys=True) + "\n"


def _close(node: object) -> None:
    """Forbid keys that match no pattern: pydantic leaves such tables open."""
    if isinstance(node, dict):
        if "patternProperties" in node:
            node.setdefault("additionalProperties", False)
        for value in node.values():
            _close(value)
    elif isinstance(node, list):
        for value in node:
            _close(value)


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
