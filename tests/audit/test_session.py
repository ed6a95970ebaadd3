"""The boot session: null handles, threads, several boots, blocks that raise, errors on entry, observers."""

import logging
import re
import threading
import time
from pathlib import Path

import kernel_muster as km
import numpy as np
import pytest

WAIVER = '[expected_absent.acme]\nmul = "not ported to this chip yet"'


# null handles and handles


def test_null_handle_is_falsy_and_raises_with_key_reason_waiver_and_site(world):
    kept = []
    outcome = world.run(lambda boot: kept.append(boot.kernels.try_kernel("acme", "mul")), {}, WAIVER)
    assert outcome.codes == []
    (handle,) = kept
    assert not handle
    assert handle.weight_layout is None
    for call in (handle, handle.prepare, lambda: handle.prepare_weight(object())):
        with pytest.raises(km.NullKernelError) as caught:
            call()
        for part in ("acme::mul", "no plugin registers", "not ported to this chip yet", "tests/audit/test_session.py:"):
            assert part in str(caught.value)


def test_null_handle_without_waiver_survives_the_construction(world):
    outcome = world.run(lambda boot: boot.kernels.kernel("acme", "mul"))
    assert outcome.codes == ["MISSING"]


def test_handle_computes_through_its_contract(world):
    with world.boot({"acme": world.acme("acme::mul")}) as boot:
        handle = boot.kernels.kernel("acme", "mul")
    x, out = np.arange(4, dtype=np.float32), np.empty(4, np.float32)
    handle(x=x, out=out)
    np.testing.assert_array_equal(out, [0, 2, 4, 6])
    with pytest.raises(km.ContractError, match="acme::mul"):
        handle(x=x, out=np.empty(3, np.float32))


# threads


def test_lookups_of_many_threads_are_all_counted(world):
    def build(boot):
        def work(number):
            kernels = boot.kernels.for_layer(f"layers.{number}")
            for _ in range(200):
                kernels.try_kernel("acme", "add")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    report = world.run(build, {"acme": world.acme("acme::add")}).report
    assert report.counts.lookups == 1600
    (row,) = report.kernels
    assert row.layers == tuple(f"layers.{number}" for number in range(8))
    assert list(row.sites.values()) == [1600]


def test_lookup_while_the_boot_seals_is_either_in_the_report_or_late(world):
    done, stop = [0], threading.Event()
    started = threading.Event()

    def work(kernels):
        while not stop.is_set():
            kernels.try_kernel("acme", "mul")
            done[0] += 1
            started.set()

    session = world.boot({"acme": world.acme("acme::add")}, WAIVER)
    with session as boot:
        boot.kernels.kernel("acme", "add")
        thread = threading.Thread(target=work, args=(boot.kernels,))
        thread.start()
        assert started.wait(10)
    time.sleep(0.01)
    stop.set()
    thread.join(10)
    trace = session.trace()
    counted = dict.fromkeys(("boot", "late"), 0)
    for row in trace["lookups"]:
        if row["func"] == "mul":
            counted[row.get("phase", "boot")] += row.get("count", 1)
    assert counted["boot"] + counted["late"] == done[0]
    assert counted["boot"] == session.report.counts.lookups - 1
    assert counted["late"] > 0


def test_late_lookup_of_another_thread_during_the_seal_does_not_decide_the_verdict(world):
    def finished(report):  # runs after the seal, before the boot is over
        boot.kernels.try_kernel("acme", "add")
        raise ValueError("so that the boot is judged again")

    boot = world.boot({"acme": world.acme("acme::add"), "watch": world.plugin(audit_finished=finished)})
    with pytest.raises(km.BootRefused), boot:
        boot.kernels.kernel("acme", "add")
    assert [f.code for f in boot.report.findings] == ["PLUGIN_LOAD_FAILED"]
    assert [f.code for f in boot.late_findings()] == ["LATE_HIT"]


# one process, several boots


def test_two_boots_in_one_process_do_not_see_each_other(world):
    one = world.boot({"acme": world.acme("acme::add")})
    two = world.boot({"acme": world.acme("acme::mul")})
    with one:
        with two:
            one.kernels.try_kernel("acme", "add")
            two.kernels.try_kernel("acme", "mul")
        one.kernels.try_kernel("acme", "add")
    assert [(row.key, sum(row.sites.values())) for row in one.report.kernels] == [("acme::add", 2)]
    assert [(row.key, sum(row.sites.values())) for row in two.report.kernels] == [("acme::mul", 1)]
    assert one.late_findings() == two.late_findings() == ()


def test_boot_after_a_refused_one_starts_afresh(world):
    assert world.run(world.ask("acme::mul", "acme::add"), {"acme": world.acme("acme::add")}).codes == ["MISSING"]
    after = world.run(world.ask("acme::add"), {"acme": world.acme("acme::add")})
    assert after.codes == []
    assert [row.key for row in after.report.kernels] == ["acme::add"]


# a block that raises


def break_off(boot, func, error):
    with boot:
        boot.kernels.kernel("acme", func)
        raise error


def test_block_that_raises_with_findings_is_refused_from_that_exception(world):
    def build(boot):
        boot.kernels.kernel("acme", "mul")
        raise KeyError("a layer broke")

    outcome = world.run(build, {"acme": world.acme("acme::add")}, '[expected_absent.acme]\nsub = "not ported yet"')
    assert isinstance(outcome.error, km.BootRefused)
    assert isinstance(outcome.error.__cause__, KeyError)
    assert outcome.codes == ["MISSING"]  # no DEAD_REGISTRATION, no UNUSED_WAIVER: the model was not complete
    assert outcome.report.complete is False


def test_block_that_raises_without_findings_lets_the_exception_go_on(world):
    boot = world.boot({"acme": world.acme("acme::add")})
    with pytest.raises(KeyError):
        break_off(boot, "add", KeyError("a layer broke"))
    assert (boot.report.verdict, boot.report.passed, boot.report.complete) == ("incomplete", False, False)
    assert boot.report.failure.startswith("KeyError: 'a layer broke' (at ")
    assert f"{Path(__file__).name}:" in boot.report.failure


def test_block_that_raises_before_any_lookup_is_not_vacuous(world):
    boot = world.boot({"acme": world.acme("acme::add")})
    with pytest.raises(KeyError), boot:
        raise KeyError("too early")
    assert boot.report.findings == ()


def test_exit_in_the_block_is_judged_like_any_exception(world):
    refused = world.boot({"acme": world.acme("acme::add")})
    with pytest.raises(km.BootRefused):
        break_off(refused, "mul", SystemExit(0))
    assert [f.code for f in refused.report.findings] == ["MISSING"]
    sound = world.boot({"acme": world.acme("acme::add")})
    with pytest.raises(SystemExit):
        break_off(sound, "add", SystemExit(0))
    assert sound.report.complete is False


# opening


def test_everything_wrong_at_the_door_is_said_at_once(world):
    plugins = {"broken": world.plugin(kernels=[42]), "empty": world.plugin()}
    outcome = world.run(
        world.ask("acme::mul"), plugins, "[expected_absent", target="cuda:999", levers={"MUSTER_NOPE": "1"}
    )
    assert outcome.codes == ["BAD_MANIFEST", "BAD_SPEC", "NO_DEVICE", "PLUGIN_EMPTY", "UNKNOWN_LEVER"]
    assert outcome.report.counts.lookups == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "prod"}, "profile is 'prod'"),
        ({"on_late_miss": "ignore"}, "on_late_miss is 'ignore'"),
        ({"stage": "built"}, "stage is 'built'"),
        ({"quant": "int3"}, "quant is 'int3'"),
        ({"profile": "qualify", "dangerously_allow_unresolved": ["a::b"]}, "does not go with profile qualify"),
        ({"dangerously_allow_unresolved": ["a"]}, "^dangerously_allow_unresolved: .*expected module::func"),
        ({"dangerously_allow_unresolved": "a::b"}, "^dangerously_allow_unresolved is 'a::b', expected several"),
        ({"plugins": "norm"}, "^plugins is 'norm', expected several"),
        ({"manifest_folders": Path("norm")}, "^manifest_folders is "),
        ({"as_of": "2026-01-01"}, "^as_of is '2026-01-01', expected a date"),
        ({"levers": ["MUSTER_DISABLE"]}, "^levers is .*, expected a mapping"),
        ({"local": [1]}, "^local_plugins is .*, expected a mapping"),
        ({"local": {"x": None}}, "^local_plugins: 'x' is None, expected an object with hooks"),
        ({"plugins": [5]}, "^plugins has 5, expected a text"),
        ({"no_plugins": [None]}, "^no_plugins has None, expected a text"),
        ({"manifest_folders": [5]}, "^manifest_folders is 5, expected the path"),
        ({"config": 5}, "^config is 5, expected the path"),
        ({"config": "a\0"}, "^config is .*, expected the path"),
        ({"abort": 5}, "^abort is 5, expected a function"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(world, options, message):
    with pytest.raises(km.UsageError, match=message):
        world.boot(**options)


def test_several_may_come_from_a_generator(world):
    boot = world.boot({"acme": world.acme("acme::mul")}, plugins=(name for name in ["acme"]))
    with boot:
        boot.kernels.kernel("acme", "mul")
    assert boot.report.passed


def test_warnings_of_a_boot_that_passes_are_logged(world, caplog):
    manifest = '[expected_absent.acme]\nmul = "not here yet"'
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul")}, manifest)
    assert outcome.report.passed
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.getMessage() == "STALE_WAIVER acme::mul: " + outcome.finding("STALE_WAIVER").why
    assert (said.code, said.subject, said.model) == ("STALE_WAIVER", "acme::mul", "tiny")


def test_late_miss_that_is_counted_is_logged_once(world, caplog):
    boot = world.boot({"acme": world.acme("acme::mul")}, on_late_miss="count")
    with boot:
        boot.kernels.kernel("acme", "mul")
    for _ in range(3):
        boot.kernels.try_kernel("acme", "div")
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.getMessage().startswith("LATE_MISS: acme::div was looked up at ")


@pytest.mark.parametrize("name", ["gpu", "sm_", "sm_95a", "sm_80a", "cuda:", "cuda:x", "CPU", ""])
def test_target_that_means_nothing_is_a_usage_error(world, name):
    with pytest.raises(km.UsageError, match=r"^target: "), world.boot(target=name):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [({"target": 5}, "^target is 5, expected text"), ({"local": {5: object()}}, "^local plugins: 5 is no name")],
)
def test_names_that_are_no_text_are_usage_errors_once_the_boot_opens(world, options, message):
    with pytest.raises(km.UsageError, match=message), world.boot(**options):
        pass


@pytest.mark.parametrize("name", [5, None, ("MUSTER_DISABLE",)])
def test_lever_whose_name_is_no_text_is_an_unknown_one(world, name):
    outcome = world.run(world.ask(), {"acme": world.acme("acme::mul")}, levers={name: "1", "MUSTER_NOPE": "1"})
    assert outcome.codes == ["UNKNOWN_LEVER", "UNKNOWN_LEVER"]
    assert [f.subject for f in outcome.report.findings] == sorted([repr(name), "MUSTER_NOPE"])


def test_session_outside_its_block_is_a_usage_error(world):
    boot = world.boot()
    for use in (lambda: boot.kernels, lambda: boot.manifest, lambda: boot.trace(), lambda: boot.report):
        with pytest.raises(km.UsageError):
            use()


def test_plugin_demanded_and_blocked_is_a_usage_error(world):
    with pytest.raises(km.UsageError, match="demanded and blocked"), world.boot(plugins=["x"], no_plugins=["x"]):
        pass


# --dangerously-allow-unresolved


def test_allowed_absence_passes_degraded_and_is_still_reported(world):
    plugins = {"acme": world.acme("acme::add")}
    outcome = world.run(world.ask("acme::add", "acme::mul"), plugins, dangerously_allow_unresolved=["acme::mul"])
    assert outcome.error is None
    assert (outcome.report.verdict, outcome.report.degraded) == ("passed", True)
    assert outcome.finding("MISSING").allowed
    assert outcome.report.counts.allowed == 1
    assert outcome.report.counts.refusing == 0


def test_allowed_absence_excuses_that_key_and_absence_alone(world):
    plugins = {"acme": world.acme("acme::add", "acme::add")}
    allowed = ["acme::mul", "acme::add"]
    outcome = world.run(world.ask("acme::add", "acme::mul", "acme::sub"), plugins, dangerously_allow_unresolved=allowed)
    assert outcome.error is not None
    assert outcome.report.degraded is False
    assert {f.subject: f.allowed for f in outcome.report.findings} == {
        "acme::mul": True, "acme::sub": False, "acme::add": False,
    }  # fmt: skip


# observers and the log


def test_observer_sees_passed_and_refused_audits(world):
    seen = []
    plugins = {"watch": world.plugin(audit_finished=lambda report: seen.append(report.verdict))}
    world.run(world.ask("acme::add"), {"acme": world.acme("acme::add"), **plugins})
    world.run(world.ask("acme::mul"), plugins)
    assert seen == ["passed", "refused"]


@pytest.mark.parametrize("error", [ValueError("no disk"), SystemExit(0)])
def test_observer_that_raises_refuses(world, rows, error):
    def finished(report):
        raise error

    plugins = {"acme": world.acme("acme::add"), "watch": world.plugin(audit_finished=finished)}
    outcome = world.run(world.ask("acme::add"), plugins)
    assert outcome.codes == ["PLUGIN_LOAD_FAILED"]
    assert "muster_audit_finished" in outcome.finding("PLUGIN_LOAD_FAILED").why
    assert rows(outcome.replay().findings) == rows(outcome.report.findings)


def test_boot_logs_one_wide_event_and_lookups_only_at_debug(world, caplog):
    with caplog.at_level(logging.INFO, "kernel_muster"):
        world.run(world.ask("acme::add"), {"acme": world.acme("acme::add")})
    (record,) = [r for r in caplog.records if r.name == "kernel_muster"]
    assert record.getMessage() == "audit.finished"
    assert record.verdict == "passed"
    assert record.lookups == 1


# a model of a failed plugin


def failing():
    raise RuntimeError("no such library")


def test_failed_plugin_explains_that_nobody_builds_the_model(world):
    manifest = world.manifest(model='model_type = "acme_type"')

    def build(boot):
        km.build_model(boot.manifest, boot.kernels)

    plugins = {"acme": world.plugin(kernels=[world.spec("acme::mul")], models=failing)}
    outcome = world.run(build, plugins, manifest, stage="proven")
    assert outcome.codes == ["PLUGIN_LOAD_FAILED"]
    (consequence,) = outcome.finding("PLUGIN_LOAD_FAILED").explains
    assert consequence.startswith("REQUEST_NOT_HONORED manifest tiny: tiny: no builder serves model type 'acme_type'")
    alone = world.run(build, {"acme": world.acme("acme::mul")}, manifest)
    assert alone.finding("REQUEST_NOT_HONORED").where == (f"{manifest}:4",)


def test_failed_plugin_explains_that_nobody_describes_the_model(world):
    plugins = {"acme": world.plugin(manifests=failing)}
    outcome = world.run(world.ask(), plugins, None, model="acme-1b")
    assert outcome.codes == ["PLUGIN_LOAD_FAILED"]
    assert outcome.finding("PLUGIN_LOAD_FAILED").explains[0].startswith("UNKNOWN_MODEL 'acme-1b': no manifest")
    plugins = {"acme": world.plugin(kernels=failing)}  # it has no manifests
    assert world.run(world.ask(), plugins, None, model="acme-1b").codes == ["PLUGIN_LOAD_FAILED", "UNKNOWN_MODEL"]


def test_failed_plugin_explains_that_nobody_declares_its_lever(world):
    plugins = {"acme": world.plugin(levers=failing)}
    levers = {"MUSTER_ACME_SCALE": "1"}
    outcome = world.run(world.ask(), plugins, levers=levers)
    assert outcome.codes == ["PLUGIN_LOAD_FAILED"]
    said = "UNKNOWN_LEVER MUSTER_ACME_SCALE: nobody declares a lever MUSTER_ACME_SCALE"
    assert outcome.finding("PLUGIN_LOAD_FAILED").explains == (said,)
    manifest = world.manifest("[expected_absent.acme.gone]\nreason = 'not there yet'\nlevers = ['MUSTER_ACME_SCALE=1']")
    scoped = world.run(world.ask(), plugins, manifest)
    assert scoped.codes == ["PLUGIN_LOAD_FAILED"]
    assert "nobody declares a lever MUSTER_ACME_SCALE" in scoped.finding("PLUGIN_LOAD_FAILED").explains[0]
    with pytest.raises(km.BootRefused) as refused:
        km.open_registry("cpu", levers=levers, local_plugins=plugins)
    assert [row.code for row in refused.value.report.findings] == ["PLUGIN_LOAD_FAILED"]
    without = {"acme": world.plugin(kernels=failing)}  # it has no levers
    assert world.run(world.ask(), without, levers=levers).codes == ["PLUGIN_LOAD_FAILED", "UNKNOWN_LEVER"]
    misspelt = {"MUSTER_DISABEL": "acme::mul"}
    assert world.run(world.ask(), plugins, levers=misspelt).codes == ["PLUGIN_LOAD_FAILED", "UNKNOWN_LEVER"]


def test_boot_that_is_refused_on_opening_names_its_model_and_manifest(world):
    manifest = world.manifest()
    report = world.run(world.ask(), {}, manifest, levers={"MUSTER_NOPE": "1"}).report
    assert (report.model, report.manifest) == ("tiny", str(manifest))
    manifest.write_text("[model")
    report = world.run(world.ask(), {}, manifest).report
    assert (report.model, report.manifest) == (str(manifest), "")


def test_observer_sees_a_boot_that_was_refused_on_opening(world):
    seen = []
    plugins = {"watch": world.plugin(audit_finished=lambda report: seen.append(report.verdict))}
    assert world.run(lambda boot: None, plugins, levers={"MUSTER_NOPE": "1"}).report.verdict == "refused"
    assert seen == ["refused"]


@pytest.mark.parametrize("given", ["abc", "0" * 63, "g" * 64, "", 7, "0" * 64 + "\n"])
def test_set_hash_that_is_none_is_a_usage_error(world, given):
    with pytest.raises(km.UsageError, match=f"expect_set_hash is {re.escape(repr(given))}, expected a SHA-256"):
        world.boot(expect_set_hash=given)


def test_set_hash_in_capitals_is_the_same_hash(world):
    plugins = {"acme": world.acme("acme::add")}
    expected = world.run(world.ask("acme::add"), plugins).report.set_hash
    assert world.run(world.ask("acme::add"), plugins, expect_set_hash=expected.upper()).codes == []


# a model and a manifest


def test_boot_takes_the_manifest_that_the_config_of_a_folder_fits(world, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "acme_type", "hidden_size": 64}')
    manifest = world.manifest(model='model_type = "acme_type"\nhidden_size = 64')
    outcome = world.run(world.ask("acme::add"), {"acme": world.acme("acme::add")}, manifest, model=str(tmp_path))
    assert (outcome.codes, outcome.report.model) == ([], "tiny")
    for other, said in (
        ('model_type = "acme_type"\nhidden_size = 32', "but the config.json says model_type acme_type, hidden_size 64"),
        (
            'model_type = "acme_type"\nhidden_size = 64\nvocab_size = 7',
            "config.json: vocab_size 9; manifest: vocab_size 7; to accept it write vocab_size = 9",
        ),
    ):
        (tmp_path / "config.json").write_text('{"model_type": "acme_type", "hidden_size": 64, "vocab_size": 9}')
        refused = world.run(world.ask(), {}, world.manifest(model=other), model=str(tmp_path))
        assert refused.codes == ["UNKNOWN_MODEL"]
        assert said in refused.finding("UNKNOWN_MODEL").why
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(km.UsageError, match="is not valid JSON"):
        world.run(world.ask(), {}, manifest, model=str(tmp_path))


@pytest.mark.parametrize(("profile", "verdict"), [("serve", "passed"), ("qualify", "refused")])
def test_finding_that_a_builder_notices_is_in_the_report(world, profile, verdict):
    finding = km.Finding("UNKNOWN_CONFIG_FIELD", "config.json", "no rule compares it", ("weights/config.json",))

    def build(boot):
        boot.kernels.kernel("acme", "add")
        boot.kernels.noticed(finding)
        boot.kernels.noticed(finding)  # of two weights of one checkpoint

    outcome = world.run(build, {"acme": world.acme("acme::add")}, profile=profile)
    assert (outcome.codes, outcome.report.verdict) == (["UNKNOWN_CONFIG_FIELD"], verdict)


def test_boot_refuses_a_manifest_of_another_model_than_the_one_named(world):
    asked = []
    session = world.boot({"acme": world.acme("acme::mul")}, world.manifest(), model="other")
    with (
        pytest.raises(km.UsageError, match=r"describes 'tiny', not 'other': name no model, or name the other"),
        session,
    ):
        asked.append(session)
    assert asked == []


def test_boot_takes_a_manifest_beside_the_name_or_the_id_of_its_model(world):
    file = world.manifest(model='hf_id = "acme/tiny"')
    for name in ("tiny", "acme/tiny"):
        with world.boot({"acme": world.acme("acme::mul")}, file, model=name) as boot:
            boot.kernels.kernel("acme", "mul")
        assert boot.report.model == "tiny"
