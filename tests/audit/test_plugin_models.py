"""``muster plugin check`` for models: it finds those that no boot can build."""

import kernel_muster as km
import pytest
from kernel_muster.audit.plugin_check.steps.models import manifest_findings
from kernel_muster.registry.discovery.discover import discover

LAYERS = """hidden_size = 4
num_layers = 1
layer_pattern = ["gdn"]
ffn = "none"
vocab_size = 4
rms_norm_eps = 1e-6
gdn = { key_heads = 1, key_dim = 1, value_heads = 1, value_dim = 1, conv_width = 1 }
"""


@pytest.fixture
def found(world):
    """Return what is found about a plugin's manifest, and the manifest; without a builder, the plugin has none."""

    def found(model, text="", *, builds=True):
        manifest = world.manifest(text, model=model)
        builder = km.ModelBuilder("acme", ("acme_type",), "production", lambda manifest, kernels, weights: None)
        models = [builder] if builds else []
        plugin = world.plugin(manifests=[manifest.parent.parent], models=models)
        catalog = discover(local={"acme": plugin}, path=[])
        assert catalog.findings == ()
        return list(manifest_findings(catalog, catalog.plugins)), manifest

    return found


@pytest.mark.parametrize(
    ("model", "text", "code", "said", "line"),
    [
        ("", "", "REQUEST_NOT_HONORED", "it states no model type, or several: add [[model_types]], or", 1),
        ('model_type = "acme_tipe"', "", "REQUEST_NOT_HONORED", "no builder serves model type 'acme_tipe'", 4),
        (
            'model_type = "acme_type_text"', "", "REQUEST_NOT_HONORED",
            'no builder serves model type \'acme_type_text\'; acme serves acme_type: write model_type = "acme_ty',
            4,
        ),
        (
            'model_type = "acme_type"', "[defaults]\nMUSTER_NO_ZETA = true",
            "UNKNOWN_LEVER", "nobody declares a lever MUSTER_NO_ZETA", 6,
        ),
    ],
)  # fmt: skip
def test_model_that_no_boot_can_build_is_found(found, model, text, code, said, line):
    ((finding,), manifest) = found(model, text)
    assert (finding.code, finding.where) == (code, (f"{manifest}:{line}",))
    assert said in finding.why


@pytest.mark.parametrize("text", ['[[model_types]]\nmodel_type = "acme_type"', '[defaults]\nMUSTER_DISABLE = "a::b"'])
def test_model_that_a_boot_builds_is_sound(found, text):
    assert found('model_type = "acme_type"', text)[0] == []


def test_manifest_of_an_engine_needs_no_builder_unless_it_gives_a_builders_dimensions(found):
    assert found("", builds=False)[0] == []
    assert [finding.code for finding in found(LAYERS, builds=False)[0]] == ["REQUEST_NOT_HONORED"]
