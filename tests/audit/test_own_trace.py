"""The trace of a live boot: it survives a file, and its replay gives the boot's findings."""

import json
from operator import attrgetter

import kernel_muster as km
import pytest
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.replay.replay import replay
from kernel_muster.audit.replay.trace import parse_trace, read_trace


def test_trace_of_a_boot_survives_json_and_a_file(world, tmp_path):
    with world.boot({"acme": world.acme("acme::mul")}) as boot:
        boot.kernels.first_of(("acme", "mul"), ("acme", "add"))
        boot.kernels.for_layer("layers.0").kernel("acme", "mul", when="always", reached_by="arm_of: one")
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(boot.trace()))
    assert read_trace(file) == parse_trace(boot.trace())
    report = replay(read_trace(file), AuditOptions(), manifest=boot.manifest.path)
    assert report.findings == boot.report.findings
    shown = attrgetter("key", "chain", "sites", "layers", "when", "reached_by")
    assert list(map(shown, report.kernels)) == list(map(shown, boot.report.kernels))
    assert [row.reached_by for row in report.kernels] == ["arm_of: one", ""]


def test_trace_of_the_version_before_says_nothing_of_what_reaches_a_kernel(world):
    with world.boot({"acme": world.acme("acme::mul")}) as boot:
        boot.kernels.kernel("acme", "mul", reached_by="arm_of: one")
    old = boot.trace() | {"version": "1.1"}
    del old["lookups"][0]["reached_by"]
    report = replay(parse_trace(old), AuditOptions(), manifest=boot.manifest.path)
    assert [row.reached_by for row in report.kernels] == [""]


def test_trace_of_names_that_are_no_text_can_be_written_and_read(world, tmp_path):
    plugins = {"acme": world.acme("acme::mul")}

    def build(boot):
        boot.kernels.for_layer("l\ud800").try_kernel("acme", "mul", when="w\ud800")
        boot.kernels.for_layer(7).try_kernel(["acme"], "mul\ud800", requested_by=["x\ud800"])
        boot.kernels.first_of((5, {}), ("acme", "mul"))

    outcome = world.run(build, plugins, levers={"MUSTER_CACHE_DIR": "/cache\udcff"})
    assert outcome.codes == ["FALLBACK_TAKEN", "REQUEST_NOT_HONORED"]
    assert "['acme']::mul" in outcome.finding("REQUEST_NOT_HONORED").why
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(outcome.session.trace(), ensure_ascii=False), encoding="utf-8")
    report = replay(read_trace(file), AuditOptions(), manifest=outcome.session.manifest.path)
    assert sorted(f.code for f in report.findings) == outcome.codes


@pytest.mark.parametrize("given", [{}, {"MUSTER_E_FAST": "0"}, {"MUSTER_E_FAST": "1", "MUSTER_E_SIZE": "3"}])
def test_trace_carries_the_levers_in_force(world, given):
    levers = [
        km.Lever(name="MUSTER_E_FAST", kind="bool", default=False, doc="Fast.", conflicts=("MUSTER_E_SLOW",)),
        km.Lever(name="MUSTER_E_SLOW", kind="int", default=7, doc="Slow by default."),
        km.Lever(name="MUSTER_E_SIZE", kind="int", default=1, maximum=8, doc="Size."),
        km.Lever(name="MUSTER_E_MODE", kind="enum", default="a", choices=("a", "b"), doc="Mode."),
    ]
    manifest = """[defaults]
        MUSTER_E_FAST = true
        MUSTER_E_MODE = "b"
        [expected_absent.acme]
        mul = {levers = ["MUSTER_E_FAST=on", "MUSTER_E_MODE=b"], reason = "not ported to this chip yet"}"""
    plugins = {"acme": world.plugin(levers=levers, kernels=[world.spec("acme::add")])}
    outcome = world.run(world.ask("acme::add", "acme::mul"), plugins, manifest, levers=given)
    replayed = outcome.replay()
    assert replayed.findings == outcome.report.findings
    assert [(r.name, r.value) for r in replayed.levers] == [(r.name, r.value) for r in outcome.report.levers]
    assert outcome.codes == (["MISSING"] if given.get("MUSTER_E_FAST") == "0" else [])


def test_trace_carries_what_levers_asked_for_in_vain(world):
    def build(boot):
        boot.kernels.kernel("acme", "mul")
        boot.kernels.for_layer("layers.0").request_failed("MUSTER_ACME", "this model has no such head")

    lever = km.Lever(name="MUSTER_ACME", kind="bool", default=False, doc="Acme.")
    plugins = {"acme": world.plugin(kernels=[world.spec("acme::mul")], levers=[lever])}
    outcome = world.run(build, plugins, levers={"MUSTER_ACME": "1"})
    found = outcome.finding("REQUEST_NOT_HONORED")
    assert (found.subject, found.layers) == ("MUSTER_ACME", ("layers.0",))
    assert outcome.replay().findings == outcome.report.findings


def test_trace_of_a_block_that_raised_is_incomplete(world, rows):
    def build(boot):
        boot.kernels.kernel("acme", "mul")
        raise KeyError

    outcome = world.run(build, {"acme": world.acme("acme::add")}, '[expected_absent.acme]\nsub = "not ported yet"')
    assert rows(outcome.replay().findings) == rows(outcome.report.findings)
