"""For every finding code: a boot that passes, one that gives exactly it, and the replay of the latter."""

import re
from collections.abc import Iterable
from datetime import date
from typing import Any

import kernel_muster as km
import pytest
from kernel_muster.audit.report import FindingRow
from kernel_muster.registry.findings import CODES, PROFILES
from scenarios import SCENARIOS

#: The codes of docs/findings/README.md, written down a second time: severity when serving / qualifying.
SEVERITIES = {
    "R/R": """MISSING FALLBACK_TAKEN WRONG_ARCH DISABLED SHADOWED SLOW_TIER REQUEST_NOT_HONORED LAYOUT_MISSING
        SIGNATURE_MISMATCH COMPILE_FAILED TOOLCHAIN_MISSING TOOLCHAIN_TOO_OLD HEADERS_MISSING NO_DEVICE_CODE OVER_LIMIT
        LOAD_FAILED NO_DEVICE NUMERICS_FAILED UNWRITTEN_OUTPUT OUT_OF_BOUNDS NOT_DETERMINISTIC BIT_IDENTITY_BROKEN
        LATE_MISS LATE_REGISTRATION PLUGIN_LOAD_FAILED PLUGIN_NOT_FOUND PLUGIN_DUPLICATE UNKNOWN_HOOK API_MISMATCH
        DUPLICATE_KERNEL BAD_SPEC BAD_OVERRIDE BAD_MANIFEST WAIVED_REQUIRED EXPECTED_NOT_ASKED UNKNOWN_MODEL
        AMBIGUOUS_MODEL DUPLICATE_MODEL UNKNOWN_LEVER BAD_LEVER LEVER_CONFLICT REMOVED_LEVER SET_HASH_MISMATCH
        VACUOUS_AUDIT""",
    "W/R": """PLUGIN_EMPTY PROCESS_CHANGED KEY_RENAMED EXPIRED_WAIVER STALE_WAIVER UNUSED_WAIVER TUNING_STALE UNCHECKED
        LATE_COMPILE REFERENCE_NAMES_OTHER UNKNOWN_CONFIG_FIELD WEIGHTS_NOT_QUANTISED""",
    "N/W": "DEAD_REGISTRATION WAIVER_EXPIRING TUNING_UNCOVERED LATE_HIT CACHE_NOT_KEPT PLAIN_ARCH",
    "N/N": "OVERRIDDEN",
}
LETTERS = {"R": "refuse", "W": "warn", "N": "note"}
SEVERITY = {name: letters for letters, names in SEVERITIES.items() for name in names.split()}

COMPILES = "no rule that runs without a compiler gives it"
OUT_OF_SCOPE = {
    "COMPILE_FAILED": COMPILES,
    "TOOLCHAIN_TOO_OLD": COMPILES,
    "HEADERS_MISSING": COMPILES,
    "NO_DEVICE_CODE": COMPILES,
    "OVER_LIMIT": COMPILES,
    "LOAD_FAILED": "needs a driver",
    "NUMERICS_FAILED": "a proof on a device",
    "UNWRITTEN_OUTPUT": "a proof on a device",
    "OUT_OF_BOUNDS": "a proof on a device",
    "NOT_DETERMINISTIC": "a proof on a device",
    "BIT_IDENTITY_BROKEN": "a proof on a device",
    "LATE_COMPILE": COMPILES,
    "CACHE_NOT_KEPT": COMPILES,
}


def the(scenario: Any, findings: Iterable[FindingRow]) -> FindingRow:
    (found,) = [f for f in findings if f.code == scenario.code]
    return found


@pytest.mark.parametrize("code", SCENARIOS)
@pytest.mark.parametrize("profile", PROFILES)
def test_boot_without_the_mistake_passes(world, code, profile):
    outcome = SCENARIOS[code].run(world, trip=False, profile=profile)
    assert set(outcome.codes) == set(SCENARIOS[code].also), outcome.said
    assert outcome.error is None
    assert outcome.report.passed


@pytest.mark.parametrize("code", SCENARIOS)
@pytest.mark.parametrize("profile", PROFILES)
def test_boot_with_the_mistake_trips_exactly_that_code(world, code, profile):
    scenario = SCENARIOS[code]
    outcome = scenario.run(world, trip=True, profile=profile)
    assert outcome.codes == sorted((code, *scenario.also)), outcome.said
    finding = the(scenario, outcome.report.findings)
    assert finding.subject == scenario.subject
    assert scenario.remedy in " | ".join(finding.remedies)
    if scenario.where is None:
        assert finding.where == ()
    else:
        assert re.search(scenario.where, finding.where[0]), finding.where
    assert finding.severity == LETTERS[SEVERITY[code].split("/")[PROFILES.index(profile)]]
    assert outcome.report.passed is (finding.severity != "refuse")
    if outcome.late_report is None:
        assert isinstance(outcome.error, km.BootRefused if finding.severity == "refuse" else type(None))


@pytest.mark.parametrize("code", [code for code, one in SCENARIOS.items() if one.has_trace])
@pytest.mark.parametrize("profile", PROFILES)
def test_replay_of_the_boots_own_trace_gives_the_same_findings(world, rows, code, profile):
    outcome = SCENARIOS[code].run(world, trip=True, profile=profile)
    options = {"profile": profile, "as_of": outcome.report.as_of and date.fromisoformat(outcome.report.as_of)}
    if code == "UNCHECKED":
        options["stage"] = "compiled"
    if code == "SET_HASH_MISMATCH":
        options["expect_set_hash"] = "0" * 64
    replayed = outcome.replay(**options)
    assert rows(replayed.findings) == rows(outcome.report.findings)
    assert replayed.verdict == outcome.report.verdict
    assert replayed.set_hash == outcome.report.set_hash


def test_codes_all_have_a_scenario_or_a_reason():
    assert set(SCENARIOS) | set(OUT_OF_SCOPE) == set(CODES)
    assert not set(SCENARIOS) & set(OUT_OF_SCOPE)


def test_severities_are_those_written_down_here():
    assert {name: f"{code.serve.value[0]}/{code.qualify.value[0]}".upper() for name, code in CODES.items()} == SEVERITY


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100f", "sm_121a", "cpu"])
def test_plain_arch_says_what_the_suffix_would_add(world, target):
    archs = ("sm_80+", "sm_90a", "cpu")
    plugins = {"acme": world.acme("acme::mul", archs=archs)}
    outcome = world.run(world.ask("acme::mul"), plugins, target=target, stage="registered")
    why = {
        "sm_90": "devices of compute capability 9.0 are called sm_90a; that adds code for 1 key: acme::mul",
        "sm_100f": "devices of compute capability 10.0 are called sm_100a; no kernel that is installed needs it",
    }
    assert [f.why for f in outcome.report.findings] == [why[target] for _ in range(target in why)]
