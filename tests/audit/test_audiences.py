"""Every audience has its own words for one finding, and each sentence stands in one table."""

import ast
import json
from pathlib import Path

import kernel_muster as km
import pytest
from kernel_muster.audit.render.json_report import render_json
from kernel_muster.audit.render.text import render_text
from kernel_muster.registry.messages import command
from kernel_muster.registry.messages.arm import of_arm
from kernel_muster.registry.messages.audience import COMMAND
from kernel_muster.registry.messages.folded import FOLDED
from kernel_muster.registry.messages.folders import FOLDERS
from kernel_muster.registry.messages.message import message
from kernel_muster.registry.messages.python import PARAMETERS, PYTHON
from kernel_muster.registry.messages.template import fields_of, fill

ROOT = Path(__file__).parents[2]
AUDIENCES = [COMMAND, PYTHON, FOLDED, FOLDERS, of_arm("a"), of_arm("b")]


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("remedy.or_block", {"plugin": "acme-more"}, 'or block it: no_plugins=["acme-more"]'),
        ("remedy.unblock", {"plugin": "acme"}, "unblock plugin acme (no_plugins), which is there to provide it"),
        ("remedy.name_host", {"target": "cpu"}, 'name the host on purpose: target="cpu"'),
        ("remedy.ask_stage", {"stage": "compiled"}, 'ask for stage="compiled"'),
        ("remedy.drop_allowance", {}, "take it out of dangerously_allow_unresolved"),
        ("remedy.write_manifest", {}, "or write a manifest for it, and give that: boot(manifest=FILE)"),
        ("remedy.own_manifest", {}, "give the model of that config.json a manifest of its own: manifest=FILE"),
        ("remedy.reference", {"needles": "a"}, "or give a reference (model) that holds a text of one of them alone: a"),
    ],
)
def test_option_becomes_the_parameter_that_does_the_same(template, values, text):
    assert message(template, **values).for_audience(PYTHON) == text


@pytest.mark.parametrize("audience", AUDIENCES, ids=lambda audience: audience.name)
@pytest.mark.parametrize("name", command.TEMPLATES)
def test_every_audience_has_every_sentence(audience, name):
    extra = {"lever"} if audience.name.startswith("arm") else set()  # which every remedy about a lever is given
    assert fields_of(audience.template(name)) <= fields_of(command.TEMPLATES[name]) | extra
    values = {field: 2 if field == "count" else ("x", "y") for field in fields_of(audience.template(name))}
    assert fill(audience.template(name), values, audience.option)


@pytest.mark.parametrize("audience", AUDIENCES[1:], ids=lambda audience: audience.name)
def test_every_sentence_of_an_audience_replaces_one_of_the_command_line(audience):
    assert audience.templates.keys() <= command.TEMPLATES.keys()


def sources(*folders):
    return [file for folder in folders for file in (ROOT / folder).rglob("*.py")]


def test_every_template_is_used():
    files = sources("registry", "MODEL_toml", "models", "plugins", "audit", "muster")
    texts = [file.read_text() for file in files if file.parent.name != "messages"] + ['"quoted" "joined"']
    # made of the status of a plugin
    made = {f"plugin.{status}" for status in ("blocked", "failed", "mismatched")}
    assert made <= command.TEMPLATES.keys()
    assert [name for name in command.TEMPLATES if name not in made and not any(f'"{name}"' in t for t in texts)] == []


#: Modules of audit/ and muster/ that import re, with the purpose. None of them rewrites a message.
USES_OF_RE = {
    "audit/diff.py": "takes the last part of a path",
    "audit/plugin_check/check.py": "removes the folder of a temporary install from paths",
    "audit/plugin_check/reporting.py": "folds findings that differ in their target: the last one to go",
    "audit/render/markdown.py": "escapes Markdown",
    "audit/render/plain.py": "folds labels of layers",
    "audit/replay/replay.py": "splits names of plugins in findings of a trace, which are text",
    "audit/replay/trace_problems.py": "reads the errors of pydantic",
    "audit/tuning/arms.py": "matches keys with patterns",
    "audit/tuning/table.py": "makes a file name of a device",
    "audit/versions.py": "reads versions",
    "muster/ab/decoding/weights.py": "matches names of weights",
    "muster/api.py": "checks a SHA-256",
    "muster/bench/data/shapes.py": "reads shapes",
    "muster/bench/families/moe.py": "reads shapes",
    "muster/cli/explain_site.py": "reads a place in code",
    "muster/cli/options.py": "checks values of options",
    "muster/cli/process/exits.py": "splits the text of a foreign error into lines",
    "muster/cli/wheel_files.py": "matches names of files",
}


def imports_re(file):
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import)]
    return any(name.name == "re" for node in nodes for name in node.names)


def test_no_module_rewrites_messages_by_regular_expressions():
    found = {file.relative_to(ROOT).as_posix() for file in sources("audit", "muster") if imports_re(file)}
    assert found == USES_OF_RE.keys()


def test_every_parameter_is_one_of_boot():
    import inspect

    taken = inspect.signature(km.boot).parameters
    assert {name for name, _ in PARAMETERS.values()} <= set(taken)


def test_plugin_that_is_not_installed_is_named_with_the_parameter(world):
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul")}, plugins=["nope"])
    found = outcome.finding("PLUGIN_NOT_FOUND")
    assert found.why.startswith("plugins names nope, which is not installed")
    assert found.where == ("plugins",)
    assert "--" not in str(outcome.error).replace("--verbose", "")


def test_registry_that_cannot_be_opened_names_parameters():
    with pytest.raises(km.BootRefused) as refused:
        km.open_registry("cpu", levers={}, no_plugins=["nope"])
    assert "no_plugins names nope, which is not installed" in str(refused.value)


def test_plugin_of_this_process_is_left_out_by_who_gave_it(world):
    broken = world.plugin(levers=[km.Lever(name="MUSTER_X", kind="bool", default=False, doc="x", keys="acme::a")])
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul"), "toy": broken})
    found = outcome.finding("BAD_SPEC")
    assert found.remedies == ("correct the plugin: docs/levers.md", "leave toy out of local_plugins")


def test_json_report_holds_the_template_and_the_parameters_of_a_finding(world):
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mull")})
    (row,) = [row for row in json.loads(render_json(outcome.report))["findings"] if row["code"] == "MISSING"]
    assert (row["template"], row["parameters"]) == ("decision.missing", {"key": "acme::mul", "near": ["acme::mull"]})
    assert row["why"] == "no plugin registers acme::mul; did you mean acme::mull?"


@pytest.mark.parametrize("is_reported", [True, False])
def test_exception_is_shown_beside_the_findings_unless_one_of_them_covers_it(world, is_reported):
    error = km.UsageError("the model has no such head")
    boot = world.boot({"acme": world.acme("acme::add")})

    def build():
        with boot:
            boot.kernels.request_failed("MUSTER_ACME", error if is_reported else str(error))
            raise error

    with pytest.raises(km.BootRefused):
        build()
    assert boot.report.failure_reported is is_reported
    assert boot.report.findings[0].why == str(error)
    assert ("The model was not built to its end" in render_text(boot.report)) is not is_reported
