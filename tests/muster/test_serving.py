"""Where serving begins: a process that ends on a late miss serves, and takes builders of production only."""

from types import ModuleType

import kernel_muster as km
import pytest
from kernel_muster.registry.builders import ModelBuilder


def boot(tmp_path, maturity, **options):
    """Boot a model of a plugin's builder, and return the session, passed or refused."""
    manifest = tmp_path / "MODEL.toml"
    manifest.write_text(
        'schema = 1\n[model]\nname = "tiny"\nquant = "nvfp4"\nmodel_type = "acme"\nhidden_size = 64\n'
        '[[model_types]]\nmodel_type = "acme"\nhidden_size = 64\n'
    )
    module = ModuleType("acme")

    def build(manifest, kernels, weights):
        return kernels.kernel("norm", "rms_norm")

    module.muster_models = km.hookimpl(lambda: [ModelBuilder("acme_builder", ("acme",), maturity, build)])
    module.muster_models.__name__ = "muster_models"
    session = km.boot(manifest=manifest, target="cpu", levers={}, local_plugins={"acme": module}, **options)
    try:
        with session:
            km.build_model(session.manifest, session.kernels)
    except km.BootRefused:
        pass
    return session


def requests(session):
    return [(f.subject, f.why) for f in session.report.findings if f.code == "REQUEST_NOT_HONORED"]


@pytest.mark.parametrize("maturity", ["reference", "partial"])
def test_serving_with_a_builder_that_is_not_production_is_refused(tmp_path, maturity):
    session = boot(tmp_path, maturity, on_late_miss="abort")
    assert session.report.is_refused
    [(subject, why)] = requests(session)
    assert "serving" in subject
    assert why == f"builder acme_builder is {maturity}: what serves must be production"


def test_serving_with_a_builder_of_production_passes(tmp_path):
    session = boot(tmp_path, "production", on_late_miss="abort")
    assert not session.report.is_refused
    assert requests(session) == []


@pytest.mark.parametrize("policy", ["raise", "count"])
def test_what_does_not_serve_takes_any_builder(tmp_path, policy):
    assert not boot(tmp_path, "reference", on_late_miss=policy).report.is_refused
