"""The start of serving: a process that ends on a late miss serves, and takes builders of production only."""

from types import ModuleType

import kernel_muster as km
import pytest
from kernel_muster.registry.contract.builders import ModelBuilder


def by_the_face(session):
    km.build_model(session.manifest, session.kernels)


def by_hand(session):
    (builder,) = [one for one in session.kernels.catalog.builders if one.name == "acme_builder"]
    assert builder.build(session.manifest, session.kernels, weights=None)


def boot(tmp_path, maturity, build_it=by_the_face, recorded=(), **options):
    """Boot a model of a plugin's builder, and return the session, passed or refused."""
    manifest = tmp_path / "MODEL.toml"
    manifest.write_text(
        'schema = 1\n[model]\nname = "tiny"\nquant = "nvfp4"\nmodel_type = "acme"\nhidden_size = 64\n'
        '[[model_types]]\nmodel_type = "acme"\nhidden_size = 64\n'
    )
    module = ModuleType("acme")

    def build(manifest, kernels, weights):
        return kernels.kernel("norm", "rms_norm")

    module.muster_models = km.hookimpl(lambda: [ModelBuilder("acme_builder", ("acme",), maturity, build, recorded)])
    module.muster_models.__name__ = "muster_models"
    session = km.boot(manifest=manifest, target="cpu", levers={}, local_plugins={"acme": module}, **options)
    try:
        with session:
            build_it(session)
    except km.BootRefused:
        pass
    return session


def requests(session):
    return [(f.subject, f.why) for f in session.report.findings if f.code == "REQUEST_NOT_HONORED"]


@pytest.mark.parametrize("build_it", [by_the_face, by_hand])
@pytest.mark.parametrize("maturity", ["reference", "partial"])
def test_serving_with_a_builder_that_is_not_production_is_refused(tmp_path, maturity, build_it):
    session = boot(tmp_path, maturity, build_it, on_late_miss="abort")
    assert session.report.is_refused
    [(subject, why)] = requests(session)
    assert "serving" in subject
    assert why == f"builder acme_builder is {maturity}: what serves must be production"
    remedies = " ".join(next(row.remedies for row in session.report.findings if row.subject == subject))
    assert "a model whose builder is production: muster models lists each builder with its maturity" in remedies
    assert "correct the serving" not in remedies


def test_builder_taken_before_a_plugin_is_registered_is_noticed_too(tmp_path):
    def build_it(session):
        (builder,) = [one for one in session.kernels.catalog.builders if one.name == "acme_builder"]
        session.register("more", ModuleType("more"))
        builder.build(session.manifest, session.kernels, None)

    [(_, why)] = requests(boot(tmp_path, "partial", build_it, on_late_miss="abort"))
    assert why == "builder acme_builder is partial: what serves must be production"


@pytest.mark.parametrize("build_it", [by_the_face, by_hand])
def test_serving_with_a_builder_of_production_passes(tmp_path, build_it):
    session = boot(tmp_path, "production", build_it, on_late_miss="abort")
    assert not session.report.is_refused
    assert requests(session) == []


@pytest.mark.parametrize("policy", ["raise", "count"])
def test_what_does_not_serve_takes_any_builder(tmp_path, policy):
    assert not boot(tmp_path, "reference", on_late_miss=policy).report.is_refused


def test_production_holds_where_a_run_at_full_size_is_recorded(tmp_path):
    session = boot(
        tmp_path, "production", recorded=(("cpu", "2026-11-30"), ("cpu", "2026-12-01")), on_late_miss="abort"
    )
    assert not session.report.is_refused
    assert (session.report.maturity, session.report.recorded_run) == ("production", "2026-12-01")
    assert "builder: acme_builder (production, judged at full size on 2026-12-01)" in km.render_text(session.report)


def test_production_without_a_recorded_run_on_this_architecture_may_not_serve(tmp_path):
    session = boot(tmp_path, "production", recorded=(("sm_90a", "2026-12-01"),), on_late_miss="abort")
    [(_, why)] = requests(session)
    assert why == (
        "builder acme_builder is partial on cpu (recorded runs at full size: sm_90a): what serves must be production"
    )
    assert (session.report.maturity, session.report.recorded_run) == ("partial", "")


@pytest.mark.parametrize(
    "recorded", [[("cpu", "2026-12-01")], (("cpu", "soon"),), (("sm_9000x", "2026-12-01"),), ("cpu",)]
)
def test_recorded_runs_that_name_no_architecture_or_day_are_malformed(recorded):
    builder = ModelBuilder("acme", ("acme",), "production", lambda manifest, kernels, weights: None, recorded)
    [problem] = builder.problems()
    assert problem.startswith("recorded is ")


@pytest.mark.parametrize(("target", "maturity"), [("sm_90a", "production"), ("sm_100a", "partial"), ("cpu", "partial")])
def test_built_in_models_are_production_where_they_were_judged_at_full_size(target, maturity):
    with km.boot("qwen3.6-27b", target=target, levers={}, stage="registered") as session:
        model = km.build_model(session.manifest, session.kernels)
    assert session.report.maturity == model.maturity == maturity
