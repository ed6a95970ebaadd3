"""The verdict: only a refusing finding may absorb another, and no refusing finding is lost."""

from dataclasses import replace
from itertools import permutations

import pytest
from kernel_muster.audit.verdict import Judged, Verdict, judge, judge_opening, link_consequences
from kernel_muster.registry.findings import ABSENCE_CODES, CODES, PROFILES, Finding, Severity
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.selection.catalog import Catalog, PluginRow

FAILED = PluginRow("acme", "acme-kernels", "1.0", "failed", "acme_kernels")
LABEL = "acme-kernels 1.0 (acme_kernels)"
MISS = Finding("MISSING", "acme::mul", "nobody provides it", ("model.py:7",), cause="acme")
MODEL = Finding("REQUEST_NOT_HONORED", "--model", "no builder serves acme_type", lacks="muster_models")
MANIFEST = Finding("UNKNOWN_MODEL", "acme-model", "no manifest is called so", lacks="muster_manifests")
LEVER = Finding("UNKNOWN_LEVER", "MUSTER_ACME", "nobody declares a lever MUSTER_ACME", lacks="muster_levers")
CONSEQUENCES = {"miss": MISS, "model": MODEL, "manifest": MANIFEST, "lever": LEVER}


def linked(cause, *found, rows=(FAILED,)):
    """Return what is left of all findings, and what the first cause explains."""
    causes, rest = link_consequences(Catalog(plugins=rows), (cause,), found)
    return [*causes, *rest], [text for one in causes for text in one.explains]


@pytest.mark.parametrize("code", sorted(CODES.keys() - ABSENCE_CODES))  # those are about keys, never about a plugin
@pytest.mark.parametrize("found", CONSEQUENCES.values(), ids=CONSEQUENCES)
def test_only_a_finding_that_refuses_may_absorb_others(code, found):
    refuses = all(CODES[code].severity(profile) is Severity.REFUSE for profile in PROFILES)
    cause = Finding(code, "acme", "it is broken", (LABEL,))
    left, explained = linked(cause, found)
    assert len(explained) == refuses
    assert (found in left) != refuses
    for profile in PROFILES:
        assert judge(left, profile).is_refused


def test_every_code_that_refuses_when_serving_refuses_when_qualifying():
    for code in CODES.values():
        assert code.serve is not Severity.REFUSE or code.qualify is Severity.REFUSE, code.name


@pytest.mark.parametrize("status", ["loaded", "blocked"])
@pytest.mark.parametrize("found", CONSEQUENCES.values(), ids=CONSEQUENCES)
def test_plugin_that_loaded_or_is_blocked_explains_nothing(status, found):
    cause = Finding("BAD_SPEC", "acme", "it is broken", (LABEL,))
    left, explained = linked(cause, found, rows=(replace(FAILED, status=status),))
    assert (explained, left) == ([], [cause, found])


def test_finding_about_another_plugin_explains_nothing():
    cause = Finding("BAD_SPEC", "other", "it is broken", ("other 1.0 (other)",))
    assert linked(cause, MISS)[0] == [cause, MISS]
    assert linked(replace(cause, subject="acme"), replace(MISS, cause="other"))[1] == []
    assert linked(replace(cause, subject="acme"), replace(MISS, cause=""))[1] == []


@pytest.mark.parametrize(
    "found",
    [
        replace(MANIFEST, lacks=""),
        replace(LEVER, lacks=""),
        replace(MODEL, lacks=""),
        Finding("BAD_LEVER", "MUSTER_ACME", "nobody declares a lever MUSTER_ACME"),
    ],
)
def test_finding_that_lacks_nothing_is_no_consequence_whatever_its_words(found):
    cause = Finding("BAD_SPEC", "acme", "it is broken", (LABEL,))
    assert linked(cause, found)[0] == [cause, found]


@pytest.mark.parametrize(
    ("hooks", "is_explained"), [((), True), (("muster_levers",), True), (("muster_models",), False)]
)
def test_plugin_whose_hooks_are_known_explains_only_what_they_give(hooks, is_explained):
    cause = Finding("BAD_SPEC", "acme", "it is broken", (LABEL,))
    _, explained = linked(cause, LEVER, rows=(replace(FAILED, hooks=hooks),))
    assert explained == ([f"UNKNOWN_LEVER MUSTER_ACME: {LEVER.why}"] if is_explained else [])


def test_finding_about_several_plugins_explains_the_misses_of_each():
    rows = (FAILED, replace(FAILED, name="more", distribution="more-kernels", value="more"))
    cause = Finding("PLUGIN_DUPLICATE", "acme, more", "two have one name", (LABEL, "more-kernels 1.0 (more)"))
    left, explained = linked(cause, MISS, replace(MISS, subject="more::mul", cause="more"), rows=rows)
    assert len(left) == 1
    assert [text.split(":", 1)[0] for text in explained] == ["MISSING acme", "MISSING more"]


def test_plugin_that_needs_a_failed_one_explains_through_it():
    orphan = replace(FAILED, name="orphan", distribution="orphan", value="orphan")
    cause = replace(
        Finding("BAD_SPEC", "acme", "it is broken"),
        explains=("plugin orphan needs the contract acme_sum of acme",),
        needed_by=("orphan",),
    )
    left, explained = linked(cause, replace(MISS, cause="orphan"), rows=(FAILED, orphan))
    assert len(left) == 1
    assert explained[1].startswith("MISSING acme::mul")
    assert linked(replace(cause, needed_by=()), replace(MISS, cause="orphan"), rows=(FAILED, orphan))[0][1:] == [
        replace(MISS, cause="orphan")
    ]


def test_own_finding_of_a_plugin_comes_before_one_about_several():
    several = Finding("PLUGIN_DUPLICATE", "acme, more", "two have one name", (LABEL,))
    own = Finding("BAD_SPEC", "acme", "it is broken")
    causes, rest = link_consequences(Catalog(plugins=(FAILED,)), (several, own), (MISS,))
    assert (rest, causes[0].explains, len(causes[1].explains)) == ([], (), 1)


def test_first_of_two_failed_plugins_explains_what_either_may_give():
    more = replace(FAILED, name="more", distribution="more", value="more")
    findings = [Finding("BAD_SPEC", name, "it is broken") for name in ("more", "acme")]
    causes, rest = link_consequences(Catalog(plugins=(FAILED, more)), findings, (LEVER,))
    assert (rest, len(causes[0].explains), causes[1].explains) == ([], 1, ())


# judge


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("code", CODES)
def test_boot_is_refused_exactly_by_a_finding_that_refuses(code, profile):
    verdict = judge([Finding(code, "acme::mul", "why")], profile)
    assert verdict.is_refused == (CODES[code].severity(profile) is Severity.REFUSE)
    assert not verdict.is_degraded


@pytest.mark.parametrize("code", CODES)
def test_allowance_excuses_absence_alone_and_degrades(code):
    key = KernelKey("acme", "mul")
    verdict = judge([Finding(code, str(key), "why")], "serve", frozenset({key}))
    (judged,) = verdict.findings
    assert judged.is_allowed == verdict.is_degraded == (code in ABSENCE_CODES)
    assert verdict.is_refused == (code not in ABSENCE_CODES and CODES[code].serve is Severity.REFUSE)


def test_allowance_of_one_key_excuses_no_other():
    findings = [Finding("MISSING", f"acme::{name}", "why") for name in ("mul", "add")]
    verdict = judge(findings, "serve", frozenset({KernelKey("acme", "mul")}))
    assert verdict.is_refused
    assert not verdict.is_degraded
    assert [(one.finding.subject, one.is_allowed) for one in verdict.findings] == [
        ("acme::add", False),
        ("acme::mul", True),
    ]


def test_verdict_without_findings_passes_and_is_not_degraded():
    verdict = judge((), "qualify")
    assert (verdict.findings, verdict.is_refused, verdict.is_degraded) == ((), False, False)


def test_warning_does_not_refuse_and_an_allowed_one_does_not_degrade_a_refusal():
    warn = Judged(Finding("KEY_RENAMED", "acme::mul", "why"), Severity.WARN)
    allowed = Judged(Finding("MISSING", "acme::mul", "why"), Severity.REFUSE, is_allowed=True)
    refusing = Judged(Finding("MISSING", "acme::add", "why"), Severity.REFUSE)
    assert not Verdict((warn,)).is_refused
    assert Verdict((warn, allowed)).is_degraded
    assert not Verdict((allowed, refusing)).is_degraded


def test_findings_are_sorted_by_what_they_do_and_each_stands_once():
    findings = [
        Finding("MISSING", "acme::a", "why"),
        Finding("MISSING", "acme::b", "why"),
        Finding("KEY_RENAMED", "acme::a", "why"),
        Finding("OVERRIDDEN", "acme::a", "why"),
    ]
    allowed = frozenset({KernelKey("acme", "a")})
    expected = ["MISSING acme::b", "KEY_RENAMED acme::a", "OVERRIDDEN acme::a", "MISSING acme::a"]
    for order in permutations(findings):
        verdict = judge((*order, *order), "serve", allowed)
        assert [f"{one.finding.code} {one.finding.subject}" for one in verdict.findings] == expected


def test_opening_is_judged_by_its_own_findings():
    cause = Finding("BAD_SPEC", "acme", "it is broken", (LABEL,))
    verdict = judge_opening(Catalog(plugins=(FAILED,)), (LEVER, cause), "serve")
    assert [one.finding.code for one in verdict.findings] == ["BAD_SPEC"]
    assert verdict.is_refused
    assert judge_opening(Catalog(), (), "serve").findings == ()
