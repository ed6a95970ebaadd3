import copy
import json
from typing import Any

import jsonschema
import pytest
import tomli
from kernel_muster.MODEL_toml import load_manifest, manifest_folder
from kernel_muster.MODEL_toml.generate import SCHEMA_FILE, manifest_schema, schema_text

SHIPPED = sorted(manifest_folder().glob("*/MODEL.toml"))


def as_json(text: str) -> Any:
    """Parsed TOML as an editor's validator sees it: dates are text."""
    return json.loads(json.dumps(tomli.loads(text), default=str))


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


def test_shipped_schema_is_current() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), "run python -m kernel_muster.MODEL_toml.generate"


def test_schema_has_a_name_of_its_own() -> None:
    assert manifest_schema()["$id"] == "urn:kernel-muster:manifest:1"


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.parent.name)
def test_shipped_manifests_are_valid_under_the_schema(validator: Any, file: Any) -> None:
    validator.validate(as_json(file.read_text()))


def test_schema_takes_long_forms_targets_and_extensions(validator: Any, minimal: str) -> None:
    text = (
        "[expected_absent.w4.f]\nreason = 'why not'\narchs = ['sm_90a']\nuntil = 2027-06-30\n"
        "[target.sm_90a.expected_present.w4]\ng = 'there always'\n[x-tool]\na = 1\n[sampling.a]\nb = 1"
    )
    validator.validate(as_json(f"{minimal}{text}"))


BAD = [
    "schema = 2\n{m}",
    "{m}surprise = 1",
    "{m}hidden_size = '5'",
    "{m}hidden_size = 0",
    "{m}[surprise]",
    "{m}[x-]",
    "{m}[x-tool]\n[expected_absent.W4]\nf = 'why not'",
    "{m}[expected_absent.w4]\nF = 'why not'",
    "{m}[expected_absent.w4]\nf = ' '",
    "{m}[expected_absent.w4]\nf = 'ToDo.'",
    "{m}[expected_absent.w4]\nf = 'n/a'",
    "{m}[expected_absent.w4]\nf = ' slow, '",
    "{m}[expected_absent.w4]\nf = 'too.slow'",
    "{m}[expected_absent.w4]\nf = 1",
    "{m}[expected_absent.w4.f]\nreason = '?'",
    "{m}[expected_absent.w4.f]\narchs = ['sm_90a']",
    "{m}[expected_absent.w4.f]\nreason = 'why not'\narchs = []",
    "{m}[expected_absent.w4.f]\nreason = 'why not'\narchs = ['hopper']",
    "{m}[expected_absent.w4.f]\nreason = 'why not'\nquants = ['int4']",
    "{m}[expected_absent.w4.f]\nreason = 'why not'\nlevers = ['X']",
    "{m}[expected_absent.w4.f]\nreason = 'why not'\nuntil = 'soon'",
    "{m}[expected_present.w4.f]\nreason = 'why not'\nuntil = 2027-06-30",
    "{m}[target.hopper]",
    "{m}[target.sm_90a.other]",
    "{m}[defaults]\nOTHER = 1",
    "{m}[defaults]\nMUSTER_X = 1.5",
    "{m}[[model_types]]\nhidden_size = 5",
    "{m}[sampling]\na = 1",
]


def test_schema_takes_a_sentence_without_blanks(validator: Any, write: Any, minimal: str) -> None:
    text = f"{minimal}[expected_absent.w4]\nf = '\u672a\u6e2c\u5b9a'"
    assert not load_manifest(write(text))[1]
    validator.validate(as_json(text))


@pytest.mark.parametrize("text", BAD)
def test_schema_rejects_what_the_loader_rejects(validator: Any, problems: Any, minimal: str, text: str) -> None:
    text = text.replace("{m}", minimal)
    assert problems(text)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(as_json(text))


def test_manifest_schema_is_made_anew_each_time() -> None:
    first = manifest_schema()
    kept = copy.deepcopy(first)
    first.clear()
    assert manifest_schema() == kept
