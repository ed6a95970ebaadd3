"""Traces of foreign engines and of other versions, and the options of their replay."""

import copy
from datetime import date

import kernel_muster as km
import pytest
from kernel_muster.audit.evidence import AuditOptions
from kernel_muster.audit.render.text import render_text
from kernel_muster.audit.replay.replay import replay
from kernel_muster.audit.replay.trace import parse_trace

WAIVER = '[expected_absent.acme]\nmul = "not ported to this chip yet"'


def foreign(**changes):
    """Return a trace with nothing but the mandatory keys of docs/audit-any-engine.md."""
    trace = {
        "version": "1.0",
        "target": {"arch": "sm_121a", "quant": "nvfp4"},
        "model": "tiny",
        "kernels": [{"module": "acme", "func": "mul"}],
        "lookups": [
            {"module": "acme", "func": "mul", "site": "engine.cpp:12", "kind": "required", "phase": "boot"},
            {"module": "acme", "func": "add", "site": "engine.cpp:13", "kind": "optional", "phase": "boot"},
        ],
        "plugins": [{"name": "acme", "distribution": "acme-engine", "version": "3.1"}],
        "levers": {},
    }
    return trace | changes


def judge(world, trace, manifest="", **asked):
    return replay(parse_trace(trace), AuditOptions(**asked), manifest=world.manifest(manifest))


def codes(report):
    return sorted(f.code for f in report.findings)


def lookup(func, **more):
    return {"module": "acme", "func": func, "site": "engine.cpp:1", "kind": "optional", "phase": "boot"} | more


def test_foreign_trace_of_mandatory_keys_is_judged(world):
    report = judge(world, foreign())
    assert codes(report) == ["MISSING"]
    (found,) = report.findings
    assert (found.subject, found.where, report.arch) == ("acme::add", ("engine.cpp:13",), "sm_121a")


def test_foreign_trace_passes_once_its_absence_is_declared(world):
    report = judge(world, foreign(), '[expected_absent.acme]\nadd = "not ported to this chip yet"')
    assert report.passed
    assert codes(report) == []


@pytest.mark.parametrize(("quant", "found"), [("bf16", ["REQUEST_NOT_HONORED"]), ("nvfp4", []), (None, [])])
def test_foreign_trace_of_another_quantisation_than_its_manifest_is_refused_as_a_live_boot_is(world, quant, found):
    target = {"arch": "sm_121a"} | ({"quant": quant} if quant else {})
    report = judge(world, foreign(target=target, lookups=foreign()["lookups"][:1]))
    assert codes(report) == found
    for row in report.findings:
        assert (row.subject, row.why) == (
            "target.quant",
            "the trace says bf16, but the manifest describes a model of nvfp4",
        )
        assert row.where[0].endswith("MODEL.toml:3")


def test_trace_of_a_boot_that_asked_for_another_quantisation_says_so_once(world):
    plugins = {"acme": world.acme("acme::mul")}
    outcome = world.run(lambda boot: boot.kernels.kernel("acme", "mul"), plugins, quant="bf16")
    again = outcome.replay()
    assert again.findings == outcome.report.findings
    assert codes(again) == ["REQUEST_NOT_HONORED"]


@pytest.mark.parametrize("arch", ["sm_121a", "cpu"])
def test_replay_says_of_compilers_nothing(world, arch):
    text = render_text(judge(world, foreign(target={"arch": arch}, lookups=foreign()["lookups"][:1])))
    assert ("stage: registered; a replay compiles nothing" in text) == (arch != "cpu")
    assert "install kernel-muster" not in text


def test_foreign_trace_without_lookups_is_vacuous(world):
    assert codes(judge(world, foreign(lookups=[]))) == ["VACUOUS_AUDIT"]
    assert codes(judge(world, foreign(lookups=[], complete=False))) == ["VACUOUS_AUDIT"]


def test_foreign_counts_layers_and_chains_fold_as_live_ones_do(world):
    rows = [
        lookup("add", count=3, layer="layers.10"),
        lookup("add", count=4, layer="layers.2"),
        lookup("add", site="engine.cpp:2"),
        lookup("sub", chain=[["acme", "sub"], ["acme", "mul"]]),
    ]
    report = judge(world, foreign(lookups=rows))
    said = {f.code: (f.subject, f.where, f.layers) for f in report.findings}
    assert said == {
        "MISSING": ("acme::add", ("engine.cpp:1 (7x)", "engine.cpp:2"), ("layers.2", "layers.10")),
        "FALLBACK_TAKEN": ("acme::sub", ("engine.cpp:1",), ()),
    }
    assert report.counts.lookups == 9


@pytest.mark.parametrize(
    ("kernels", "code"),
    [
        ([{"module": "acme", "func": "mul", "archs": ["sm_90a"]}], "WRONG_ARCH"),
        ([{"module": "acme", "func": "mul", "archs": ["sm_80+"], "tier": "reference"}], "SLOW_TIER"),
        ([{"module": "acme", "func": "mul", "distribution": name} for name in ("one", "two")], "DUPLICATE_KERNEL"),
        ([{"module": "acme", "func": "mul", "archs": []}], "BAD_SPEC"),
        ([{"module": "acme", "func": "mul", "archs": ["sm_1"]}], "BAD_SPEC"),
        ([{"module": "Acme", "func": "mul"}], "BAD_SPEC"),
        ([{"module": "acme", "func": "mul", "distribution": "one", "overrides": "two"}], "BAD_OVERRIDE"),
        ([{"module": "acme", "func": "mul", "archs": ["cpu"]}], "MISSING"),
    ],
)
def test_foreign_kernels_are_judged_by_the_same_rules(world, kernels, code):
    report = judge(world, foreign(kernels=kernels, lookups=[lookup("mul")]))
    assert code in codes(report)
    assert not report.passed


def test_foreign_kernel_that_is_malformed_explains_what_is_missing_without_its_plugin(world):
    kernels = [{"module": "acme", "func": "mul", "archs": []}, {"module": "acme", "func": "add"}]
    report = judge(world, foreign(kernels=kernels, plugins=[]))
    assert codes(report) == ["BAD_SPEC"]
    (found,) = report.findings
    assert (found.subject, [text.partition(":")[0] for text in found.explains]) == (
        "engine",
        ["MISSING acme", "MISSING acme"],
    )
    other = [*kernels[:1], {"module": "acme", "func": "add", "plugin": "other", "distribution": "other"}]
    (found,) = judge(world, foreign(kernels=other, plugins=[])).findings
    assert len(found.explains) == 1


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ((["acme::times"], ["acme::times"]), "alias acme::times is given to acme::add and acme::mul"),
        ((["acme::add"], []), "acme::mul: alias acme::add is a key of its own"),
    ],
)
def test_foreign_alias_that_is_no_name_of_one_key_is_a_bad_spec(world, aliases, said):
    kernels = [
        {"module": "acme", "func": func, "aliases": old} for func, old in zip(("mul", "add"), aliases, strict=True)
    ]
    report = judge(world, foreign(kernels=kernels))
    assert codes(report) == ["BAD_SPEC"]
    assert report.findings[0].why == said


def test_foreign_plugins_of_one_name_are_duplicates_and_serve_nobody(world):
    plugins = [{"name": "acme", "distribution": name} for name in ("one", "two")]
    kernels = [{"module": "acme", "func": "mul", "plugin": "acme", "distribution": "one"}]
    report = judge(world, foreign(plugins=plugins, kernels=kernels, lookups=[lookup("mul")]))
    assert codes(report) == ["PLUGIN_DUPLICATE"]
    (found,) = report.findings
    assert (found.subject, found.where) == ("acme", ("one", "two"))
    assert found.explains[0].startswith("MISSING acme::mul")


def test_foreign_plugin_that_failed_beside_its_namesake_is_one_finding(world):
    plugins = [{"name": "acme", "distribution": "one"}, {"name": "acme", "distribution": "two", "error": "no symbol"}]
    assert codes(judge(world, foreign(plugins=plugins, lookups=[lookup("mul")]))) == ["PLUGIN_LOAD_FAILED"]


def test_foreign_overrides_and_replaced_modules_are_judged_by_the_same_rules(world):
    kernels = [
        {"module": "acme", "func": "mul", "distribution": "one"},
        {"module": "acme", "func": "add", "distribution": "one"},
        {"module": "acme", "func": "mul", "distribution": "two", "replaces_module": ["acme", "one"]},
    ]
    report = judge(world, foreign(kernels=kernels, plugins=[]))
    assert codes(report) == ["OVERRIDDEN", "SHADOWED"]


def test_foreign_plugin_error_refuses_and_explains_its_misses(world):
    plugins = [{"name": "acme", "distribution": "acme-engine", "version": "3.1", "error": "dlopen failed",
                "keys": ["acme::add"]}]  # fmt: skip
    report = judge(world, foreign(plugins=plugins))
    assert codes(report) == ["PLUGIN_LOAD_FAILED"]
    (found,) = report.findings
    assert (found.subject, found.why) == ("acme", "dlopen failed")
    assert found.explains[0].startswith("MISSING acme::add")


@pytest.mark.parametrize(("status", "code"), [("failed", "PLUGIN_LOAD_FAILED"), ("mismatched", "API_MISMATCH")])
def test_foreign_plugin_that_did_not_load_refuses_also_without_an_error(world, status, code):
    plugins = [{"name": "acme", "distribution": "acme-engine", "status": status}]
    report = judge(world, foreign(plugins=plugins, lookups=[lookup("mul")]))
    assert codes(report) == [code]
    assert "does not say why" in report.findings[0].why


def test_foreign_plugin_that_failed_does_not_explain_that_the_model_has_no_manifest(world):
    plugins = [{"name": "acme", "distribution": "acme-engine", "error": "boom"}]
    trace = parse_trace(foreign(model="my-7b", plugins=plugins))
    report = replay(trace, AuditOptions(), manifest=None, manifest_folders=[world.manifest().parent])
    assert codes(report) == ["PLUGIN_LOAD_FAILED", "UNKNOWN_MODEL"]
    assert [row.explains for row in report.findings] == [(), ()]


OTHER = {"name": "extra", "distribution": "extra-kernels", "version": "2.0"}


@pytest.mark.parametrize("kernel", [{"plugin": "acme"}, {"distribution": "Acme_Engine"}])
def test_foreign_plugin_without_a_kernel_is_empty(world, kernel):
    kernels = [{"module": "acme", "func": "mul", **kernel}]
    trace = foreign(plugins=[*foreign()["plugins"], OTHER], kernels=kernels, lookups=[lookup("mul")])
    report = judge(world, trace)
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.subject) == ("PLUGIN_EMPTY", "warn", "extra")
    assert (finding.why, finding.where) == ("it is loaded, and the trace has no kernel of it", ("extra-kernels 2.0",))
    assert report.passed
    assert judge(world, trace, profile="qualify").is_refused


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kernels": [{"module": "acme", "func": "mul"}]}, []),  # it may be of either plugin
        ({"plugins": [OTHER | {"name": "acme", "distribution": "acme-engine"}]}, []),
        ({"plugins": [OTHER | {"status": "blocked"}]}, []),
        ({"plugins": [OTHER | {"keys": ["extra::mul"]}]}, ["DEAD_REGISTRATION"]),
        ({"findings": [{"code": "PLUGIN_EMPTY", "subject": "extra", "why": "no hook"}]}, ["PLUGIN_EMPTY"]),
    ],
)
def test_foreign_plugin_of_which_the_trace_says_more_is_not_empty_twice(world, change, expected):
    kernels = [{"module": "acme", "func": "mul", "plugin": "acme"}]
    plain = {"kernels": kernels, "lookups": [lookup("mul")], "plugins": [OTHER]}
    assert codes(judge(world, foreign(**plain | change))) == expected


def test_own_trace_has_no_empty_plugins_but_those_of_its_boot(world):
    levers = world.plugin(levers=[km.Lever(name="MUSTER_E", kind="bool", default=False, doc="A lever.")])
    local = {"acme": world.acme("acme::mul"), "levers": levers, "nil": world.plugin()}
    outcome = world.run(world.ask("acme::mul"), local)
    assert outcome.codes == ["PLUGIN_EMPTY"]
    assert [f.subject for f in judge(world, outcome.session.trace()).findings] == ["nil"]


def test_foreign_kernel_of_a_blocked_plugin_serves_nobody(world):
    plugins = [{"name": "acme", "distribution": "acme-engine", "status": "blocked"}]
    kernels = [{"module": "acme", "func": "mul", "plugin": "acme", "distribution": "acme-engine"}]
    report = judge(world, foreign(plugins=plugins, kernels=kernels, lookups=[lookup("mul")]))
    assert codes(report) == ["MISSING"]
    assert "unblock plugin acme" in report.findings[0].remedies[0]


@pytest.mark.parametrize("code", ["OVERRIDDEN", "KEY_RENAMED", "DEAD_REGISTRATION"])
def test_foreign_plugin_error_is_no_note(world, code):
    plugins = [{"name": "acme", "distribution": "acme-engine", "error": f"{code}: dlopen failed"}]
    report = judge(world, foreign(plugins=plugins, lookups=[lookup("mul")]))
    assert (codes(report), report.passed) == (["PLUGIN_LOAD_FAILED"], False)


@pytest.mark.parametrize(
    "lever", [{"kind": "int", "default": "many"}, {"kind": "enum"}, {"kind": "bool", "default": 7}], ids=str
)
def test_foreign_lever_that_is_declared_malformed_is_a_finding(world, lever):
    declared = [{"name": "MUSTER_ENGINE"} | lever]
    report = judge(world, foreign(declared_levers=declared, levers={"MUSTER_ENGINE": "x"}, lookups=[lookup("mul")]))
    assert codes(report) == ["BAD_LEVER"]
    assert "the trace declares it, but malformed" in report.findings[0].why


def test_foreign_plugin_error_that_is_a_code_alone_says_that(world):
    plugins = [{"name": "acme", "distribution": "acme-engine", "error": "BAD_SPEC: "}]
    report = judge(world, foreign(plugins=plugins, lookups=[lookup("mul")]))
    assert [finding.why for finding in report.findings] == ["BAD_SPEC: "]


def test_foreign_plugin_error_may_name_its_code(world):
    plugins = [{"name": "acme", "distribution": "acme-engine", "version": "3.1", "error": "API_MISMATCH: speaks v0"}]
    assert "API_MISMATCH" in codes(judge(world, foreign(plugins=plugins)))


def test_foreign_levers_are_those_of_the_trace_not_of_the_environment(world, monkeypatch):
    monkeypatch.setenv("MUSTER_DISABLE", "acme::mul")
    rows = [lookup("mul")]
    assert codes(judge(world, foreign(lookups=rows))) == []
    assert codes(judge(world, foreign(lookups=rows, levers={"MUSTER_DISABLE": "acme::mul"}))) == ["DISABLED"]
    assert codes(judge(world, foreign(lookups=rows, levers={"MUSTER_NOPE": 1}))) == ["UNKNOWN_LEVER"]
    assert codes(judge(world, foreign(lookups=rows, levers={"MUSTER_DISABLE": "acme"}))) == ["BAD_LEVER"]
    (unknown,) = judge(world, foreign(lookups=rows, levers={"MUSTER_NOPE": 1})).findings
    assert (unknown.code, unknown.where) == ("UNKNOWN_LEVER", ("levers of the trace",))


def test_foreign_trace_gets_remedies_that_an_engine_can_follow(world):
    rows = [lookup("mul", kind="required")]
    kernels = [{"module": "acme", "func": "mul", "distribution": name} for name in ("one", "two")]
    said = {
        f.code: " ".join(f.remedies)
        for trace in (foreign(lookups=[]), foreign(lookups=rows, kernels=kernels, levers={"MUSTER_NOPE": 1}))
        for f in judge(world, trace).findings
    }
    assert "lookups" in said["VACUOUS_AUDIT"]
    assert "declared_levers" in said["UNKNOWN_LEVER"]
    assert "overrides" in said["DUPLICATE_KERNEL"]
    assert not any("MUSTER_PREFER" in text or "km." in text for text in said.values())


def test_foreign_trace_says_nothing_of_where_thresholds_of_levers_it_lacks_were_measured(world):
    own = km.Lever(name="MUSTER_T", kind="int", default=1, doc="T.", evidence="GB10 (sm_121a, 48 SMs): 1.7x")

    def evidence(**levers):
        made = replay(parse_trace(foreign(levers=levers)), AuditOptions(), manifest=world.manifest(""), declared=[own])
        return {row.name: row.evidence for row in made.levers}["MUSTER_T"]

    assert evidence() == ""
    assert evidence(MUSTER_T=2) == own.evidence


def test_foreign_levers_may_be_declared_with_their_kind(world):
    manifest = WAIVER.replace('mul = "not', 'add = {levers = ["MUSTER_E_FAST=on"], reason = "not') + "}"
    declared = [{"name": "MUSTER_E_FAST", "kind": "bool"}, {"name": "MUSTER_E_SIZE", "kind": "int", "maximum": 8}]
    levers = {"MUSTER_E_FAST": True, "MUSTER_E_SIZE": 4}
    assert codes(judge(world, foreign(levers=levers, declared_levers=declared), manifest)) == []
    levers = {"MUSTER_E_FAST": False, "MUSTER_E_SIZE": 9}
    found = codes(judge(world, foreign(levers=levers, declared_levers=declared), manifest))
    assert found == ["BAD_LEVER", "MISSING"]


def test_late_rows_are_judged_as_a_serving_process_would(world):
    rows = [lookup("mul"), lookup("mul", phase="late"), lookup("add", phase="late")]
    report = judge(world, foreign(lookups=rows))
    assert {f.code: f.severity for f in report.findings} == {"LATE_HIT": "note", "LATE_MISS": "refuse"}
    declared = '[expected_absent.acme]\nadd = "not ported to this chip yet"'
    assert "LATE_MISS" not in codes(judge(world, foreign(lookups=rows), declared))


def test_waiver_that_excuses_a_late_miss_alone_is_used(world):
    rows = [lookup("mul"), lookup("add", phase="late")]
    declared = '[expected_absent.acme]\nadd = "not ported to this chip yet"'
    assert codes(judge(world, foreign(lookups=rows), declared)) == []
    assert codes(judge(world, foreign(lookups=rows[:1]), declared)) == ["UNUSED_WAIVER"]


def test_stages_are_unchecked_only_if_asked_for(world):
    rows = [lookup("mul")]
    assert codes(judge(world, foreign(lookups=rows))) == []
    assert codes(judge(world, foreign(lookups=rows), stage="registered")) == []
    assert codes(judge(world, foreign(lookups=rows), stage="compiled")) == ["UNCHECKED"]


def test_options_of_an_audit_hold_for_a_replay(world):
    until = '[expected_absent.acme.add]\nreason = "not ported to this chip yet"\nuntil = 2030-01-01'
    assert codes(judge(world, foreign(), until, as_of=date(2030, 1, 2))) == ["EXPIRED_WAIVER"]
    assert judge(world, foreign(), until, as_of=date(2030, 1, 2)).passed
    assert not judge(world, foreign(), until, as_of=date(2030, 1, 2), profile="qualify").passed
    allowed = judge(world, foreign(), allow_unresolved=frozenset({km.KernelKey("acme", "add")}))
    assert (allowed.passed, allowed.degraded) == (True, True)


def test_model_of_the_trace_finds_its_manifest(world):
    folder = world.manifest(WAIVER.replace("mul", "add")).parent.parent
    assert replay(parse_trace(foreign()), AuditOptions(), manifest=None, manifest_folders=[folder]).passed
    unknown = replay(parse_trace(foreign(model="other")), AuditOptions(), manifest=None, manifest_folders=[folder])
    assert codes(unknown) == ["UNKNOWN_MODEL"]
    assert "--manifests FOLDER: a replay loads no plugins" in unknown.findings[0].remedies[0]


def test_engine_written_zero_is_off_whatever_its_type(world):
    declared = [{"name": "MUSTER_E_FAST", "kind": "bool", "default": True}]
    trace = foreign(levers={"MUSTER_E_FAST": False}, declared_levers=declared, lookups=[lookup("mul")])
    rows = {row.name: row.value for row in judge(world, trace).levers}
    assert rows["MUSTER_E_FAST"] is False


def test_100_000_lookups_fold_into_the_rows_of_their_keys(world):
    rows = [
        lookup(f"k{number % 250}", site=f"engine.cpp:{number % 40}", layer=f"layers.{number % 64}")
        for number in range(100_000)
    ]
    kernels = [{"module": "acme", "func": f"k{number}"} for number in range(240)]
    report = judge(world, foreign(lookups=rows, kernels=kernels))
    assert report.counts.lookups == 100_000
    assert len(report.kernels) == 250
    assert [f.subject for f in report.findings] == [f"acme::k{number}" for number in range(240, 250)]


def test_levers_of_an_engine_without_our_prefix_are_carried_and_ignored(world):
    rows = [lookup("mul")]
    assert codes(judge(world, foreign(lookups=rows, levers={"ENGINE_FAST": "x", "qkv arm": 1}))) == []


# versions


def test_newer_minor_version_may_have_unknown_keys_anywhere(world):
    plain = foreign()
    trace = copy.deepcopy(plain) | {"version": "1.7", "comment": {"a": [1]}, "levers": {}}
    trace["target"]["clock_mhz"] = 1980
    trace["kernels"][0]["colour"] = "red"
    trace["lookups"][1]["colour"] = ["red"]
    trace["plugins"][0]["colour"] = None
    before = copy.deepcopy(trace)
    assert judge(world, trace).findings == judge(world, plain).findings
    assert trace == before


def test_newer_minor_version_still_checks_what_it_knows(world):
    trace = foreign(version="1.7", comment=1)
    trace["lookups"][0]["kind"] = "maybe"
    with pytest.raises(km.UsageError, match=r"lookups\[0\]\.kind"):
        parse_trace(trace)


def test_unknown_key_of_this_version_is_refused():
    with pytest.raises(km.UsageError, match="comment"):
        parse_trace(foreign(comment=1))


@pytest.mark.parametrize(
    "version",
    [
        "2.0",
        "0.9",
        "1",
        "1.0.0",
        "",
        "1.x",
        "-1.0",
        "1.0\n",
        "\u0661.0",
        1,
        1.0,
        None,
        ["1.0"],
        "01.1",
        "1.01",
        "1.00",
        " 1.1",
        "1.1 ",
        "1. 1",
        "+1.1",
        "1.+1",
        "1.-1",
        "1.\u0661",
        "1.1.0",
        "1.",
        ".1",
        "1,1",
        "1.1e0",
        "0x1.1",
        "1.1000000",
        True,
        {"major": 1},
    ],
)
def test_other_major_version_or_none_is_refused(version):
    with pytest.raises(km.UsageError, match="version"):
        parse_trace(foreign(version=version))


def test_chain_that_does_not_begin_with_its_own_key_is_refused():
    with pytest.raises(km.UsageError, match="not with its own key"):
        parse_trace(foreign(lookups=[lookup("mul", chain=[["acme", "add"], ["acme", "mul"]])]))


@pytest.mark.parametrize("arch", ["sm_1", "gpu", "", "cuda", "sm_90+", "compute_90"])
def test_target_that_is_no_architecture_is_refused(world, arch):
    with pytest.raises(km.UsageError, match=r"target\.arch"):
        judge(world, foreign(target={"arch": arch}))


def test_quant_that_is_none_we_know_is_refused():
    with pytest.raises(km.UsageError, match=r"target\.quant"):
        parse_trace(foreign(target={"arch": "cpu", "quant": "int3"}))


# Tables

EDGE = {"name": "MUSTER_ACME_EDGE", "kind": "int", "default": 32, "tuning": "other_bits"}
PLAIN = {"name": "MUSTER_ACME_PLAIN", "kind": "int", "default": 1}


def tuned(levers, tuning):
    tuning = tuning if tuning is None else {"table": "t", **tuning}
    return foreign(levers=levers, declared_levers=[EDGE, PLAIN], tuning=tuning, lookups=[lookup("mul")])


@pytest.mark.parametrize(
    ("levers", "tuning", "subject", "why"),
    [
        ({"MUSTER_TUNING_TABLE": "t"}, None, "MUSTER_TUNING_TABLE", "='t', and there is no tuning"),
        ({"MUSTER_TUNING_TABLE": "u"}, {}, "MUSTER_TUNING_TABLE", "='u', and tuning is table 't'"),
        ({"MUSTER_TUNING_TABLE": "none"}, {}, "MUSTER_TUNING_TABLE", "=none, and tuning is table 't'"),
        ({"MUSTER_ACME_EDGE": 8}, {"levers": {"MUSTER_ACME_EDGE": 9}}, "MUSTER_ACME_EDGE", "to 9, and levers says 8"),
        ({}, {"levers": {"MUSTER_ACME_EDGE": 9}}, "MUSTER_ACME_EDGE", "to 9, and levers does not have it"),
        (
            {"MUSTER_ACME_PLAIN": 9},
            {"levers": {"MUSTER_ACME_PLAIN": 9}},
            "MUSTER_ACME_PLAIN",
            "no threshold that a table may set",
        ),
        ({"MUSTER_ACME": 9}, {"levers": {"MUSTER_OF_NOBODY": 9}}, "MUSTER_OF_NOBODY", "nobody declares it"),
    ],
)
def test_trace_that_contradicts_itself_about_its_table_is_refused(world, levers, tuning, subject, why):
    report = judge(world, tuned(levers, tuning))
    assert not report.passed
    found = [f for f in report.findings if (f.code, f.subject) == ("BAD_LEVER", subject)]
    assert any(why in f.why for f in found), [f.why for f in report.findings]


@pytest.mark.parametrize(
    ("levers", "tuning"),
    [
        ({"MUSTER_TUNING_TABLE": "t", "MUSTER_ACME_EDGE": 9}, {"levers": {"MUSTER_ACME_EDGE": 9}}),
        ({"MUSTER_TUNING_TABLE": None, "MUSTER_ACME_EDGE": 9}, {"levers": {"MUSTER_ACME_EDGE": 9}}),
        ({"MUSTER_TUNING_TABLE": "none", "MUSTER_ACME_EDGE": 9}, None),
        ({"MUSTER_ACME_EDGE": 9}, {}),
    ],
)
def test_trace_that_agrees_with_itself_about_its_table_passes(world, levers, tuning):
    report = judge(world, tuned(levers, tuning))
    assert report.passed, codes(report)
    (row,) = (row for row in report.levers if row.name == "MUSTER_ACME_EDGE")
    assert (row.value, row.origin) == (9, "table" if tuning and tuning.get("levers") else "given")


def test_request_of_a_trace_that_says_no_site_has_no_place_and_no_empty_line(world):
    report = judge(world, foreign(requests=[{"lever": "MUSTER_FAST", "why": "no head"}]), WAIVER)
    (found,) = (row for row in report.findings if row.code == "REQUEST_NOT_HONORED")
    assert found.where == ()
    assert "     where" not in render_text(report).partition("MUSTER_FAST")[2].partition("remedy")[0]


@pytest.mark.parametrize(("opt_in", "found"), [("not a lever", ["DEAD_REGISTRATION"]), ("MUSTER_E_FAST", [])])
def test_opt_in_of_a_trace_excuses_only_where_it_names_a_lever(world, opt_in, found):
    kernel = {"module": "turbo", "func": "mul", "plugin": "turbo", "distribution": "turbo-kernels", "opt_in": opt_in}
    plugin = {"name": "turbo", "distribution": "turbo-kernels", "keys": ["turbo::mul"]}
    trace = foreign(
        kernels=[*foreign()["kernels"], kernel], lookups=[lookup("mul")], plugins=[*foreign()["plugins"], plugin],
        declared_levers=[{"name": "MUSTER_E_FAST"}],
    )  # fmt: skip
    assert codes(judge(world, trace)) == found
