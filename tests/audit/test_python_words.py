"""Findings for Python callers name their own parameters, and no option of the command."""

import kernel_muster as km
import pytest
from kernel_muster.audit.render.python_words import PARAMETERS, _said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("or block it: --no-plugin acme", 'or block it: no_plugins=["acme"]'),
        ("or block it: --no-plugin acme-more, or wait", 'or block it: no_plugins=["acme-more"], or wait'),
        ("unblock plugin acme (--no-plugin), which is there", "unblock plugin acme (no_plugins), which is there"),
        ("name the host on purpose: --target cpu", 'name the host on purpose: target="cpu"'),
        ("name an architecture: --target sm_90a", 'name an architecture: target="sm_90a"'),
        ("give a manifest of its own: --manifest FILE", "give a manifest of its own: manifest=FILE"),
        ("give the folder: --manifests FOLDER", "give the folder: manifest_folders=[FOLDER]"),
        ("ask for --stage compiled", 'ask for stage="compiled"'),
        ("take it out of --dangerously-allow-unresolved", "take it out of dangerously_allow_unresolved"),
        ("--dangerously-allow-unresolved names it", "dangerously_allow_unresolved names it"),
        ("or give a reference (--ref) that tells them apart", "or give a reference (model) that tells them apart"),
        ("repair it: muster explain a::b --target cpu", "repair it: muster explain a::b --target cpu"),
        ("muster tune --output FILE", "muster tune --output FILE"),
        ("--verbose shows all", "--verbose shows all"),
        ("nothing to say", "nothing to say"),
    ],
)  # fmt: skip
def test_option_becomes_the_parameter_that_does_the_same(text, said):
    assert _said(text) == said


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
