"""Two reports compared."""

from dataclasses import replace
from typing import Any

import pytest
from kernel_muster.audit.diff import compare, render_diff
from kernel_muster.audit.report import LayoutRow, Report, WaiverRow


@pytest.fixture
def one(world: Any) -> Report:
    """A refused report: one kernel there, one missing."""
    build = world.ask("acme_plugin::double", "acme_plugin::missing")
    return world.run(build, {"acme_plugin": world.acme("acme_plugin::double")}).report


def titles(difference: Any) -> list[str]:
    return [part.title for part in difference.parts]


def test_diff_of_a_report_with_itself_is_equal(one: Report) -> None:
    assert compare(one, one).equal
    assert render_diff(compare(one, one)) == "EQUAL: the reports say the same"


def test_diff_leaves_out_date_paths_and_sites(one: Report) -> None:
    other = replace(
        one,
        as_of="1999-01-01",
        manifest="/elsewhere/MODEL.toml",
        kernels=tuple(replace(row, sites={"other.py:1 in f": 1}) for row in one.kernels),
        findings=tuple(replace(row, where=("other.py:1 in f",)) for row in one.findings),
    )
    assert compare(one, other).equal


def test_diff_leaves_out_the_date_inside_a_finding(one: Report) -> None:
    def at(day: str) -> Report:
        row = replace(one.findings[0], why=f"it ended on 2020-01-01; as of {day}")
        return replace(one, as_of=day, findings=(row,))

    assert compare(at("2026-01-01"), at("2026-01-02")).equal


def test_diff_leaves_out_folders_that_levers_name(one: Report) -> None:
    def with_levers(**values: str) -> Report:
        rows = {row.name: row for row in one.levers}
        return replace(one, levers=tuple(replace(rows[name], value=values[name]) for name in values))

    first = with_levers(MUSTER_CACHE_DIR="/a", MUSTER_TUNING_TABLE="/one/table.json")
    assert compare(first, with_levers(MUSTER_CACHE_DIR="/b", MUSTER_TUNING_TABLE="../two/table.json")).equal
    other = with_levers(MUSTER_CACHE_DIR="/a", MUSTER_TUNING_TABLE="/one/other.json")
    assert "MUSTER_TUNING_TABLE: value table.json -> other.json" in render_diff(compare(first, other))


@pytest.mark.parametrize("count", [2, 3, 60])
def test_diff_tells_a_change_that_three_rows_share_once(one: Report, count: int) -> None:
    row = next(row for row in one.kernels if row.served_by)
    rows = tuple(replace(row, key=f"acme_plugin::k{i}", chain=()) for i in range(count))
    before, after = (
        replace(one, kernels=tuple(replace(r, stage=stage) for r in rows)) for stage in ("loaded", "proven")
    )
    difference = compare(before, after)
    assert len(difference.parts[0].changes) == count
    text = render_diff(difference)
    assert text.count("stage loaded -> proven") == (1 if count > 2 else count)
    assert all(row.key in text for row in rows)
    assert (f"  ~ {count} alike: stage loaded -> proven\n      acme_plugin::k0, acme_plugin::k1, " in text) == (
        count > 2
    )
    assert max(map(len, text.splitlines())) < 120


def test_diff_shows_added_removed_and_changed_kernels(one: Report) -> None:
    found = next(row for row in one.kernels if row.served_by)
    missing = next(row for row in one.kernels if not row.served_by)
    other = replace(one, kernels=(replace(found, version="2.0", tier="reference", stage="proven"),))
    text = render_diff(compare(one, other))
    assert "  ~ acme_plugin::double: version (none) -> 2.0; tier fast -> reference; stage loaded -> proven" in text
    assert f"  - {missing.key}: kind optional, outcome absent" in text
    assert f"  + {missing.key}: kind optional, outcome absent" in render_diff(compare(other, one))


def test_diff_sees_one_of_two_questions_about_a_key_change(one: Report) -> None:
    found = next(row for row in one.kernels if row.served_by)
    twice = (found, replace(found, kind="required"))
    assert not compare(replace(one, kernels=(found,)), replace(one, kernels=twice)).equal
    apart = [replace(row, layers=(f"layers.{i}",)) for i, row in enumerate(twice)]
    exchanged = [replace(row, layers=other.layers) for row, other in zip(apart, reversed(apart), strict=True)]
    assert not compare(replace(one, kernels=tuple(apart)), replace(one, kernels=tuple(exchanged))).equal
    conditional = (replace(found, when="rows<=8"),)
    assert not compare(replace(one, kernels=(found,)), replace(one, kernels=conditional)).equal


def test_diff_sees_how_often_was_asked(one: Report) -> None:
    other = replace(one, counts=replace(one.counts, lookups=one.counts.lookups + 1))
    assert titles(compare(one, other)) == ["verdict"]


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "passed"},
        {"degraded": True},
        {"complete": False},
        {"set_hash": "0" * 64},
        {"target": "sm_90a"},
        {"device": "NVIDIA H200"},
        {"quant": "bf16"},
        {"profile": "qualify"},
        {"stage_reached": "proven"},
        {"muster_version": "9"},
        {"model": "other"},
        {"builder": "acme", "maturity": "production"},
        {"below_stage_asked": True},
        {"failure": "ValueError: no such file (at model.py:3)"},
    ],
)
def test_diff_sees_every_fact_of_the_verdict(one: Report, change: dict[str, Any]) -> None:
    difference = compare(one, replace(one, **change))
    assert titles(difference) == ["verdict"]
    assert len(difference.parts[0].changes) == 1


def test_diff_sees_no_difference_in_the_spelling_of_a_distributions_name(one: Report) -> None:
    def spelt(row: Any) -> Any:
        return replace(row, distribution=row.distribution.upper().replace("-", "_"))

    assert any(row.distribution for row in one.kernels)
    other = replace(one, plugins=tuple(map(spelt, one.plugins)), kernels=tuple(map(spelt, one.kernels)))
    assert compare(one, other).equal


def test_diff_sees_findings_levers_waivers_and_plugins(one: Report) -> None:
    waiver = WaiverRow(key="a::b", reason="nobody ships it", where="x:1", until="")
    lever = next(row for row in one.levers if row.name == "MUSTER_DISABLE")
    other = replace(
        one,
        findings=(replace(one.findings[0], allowed=True), *one.findings[1:]),
        levers=(replace(lever, value="a::b", origin="environment"), *(r for r in one.levers if r is not lever)),
        waivers=(waiver,),
        plugins=one.plugins[1:],
    )
    assert titles(compare(one, other)) == ["findings", "waivers", "levers", "plugins"]
    text = render_diff(compare(one, other))
    assert "severity refuse -> refuse, allowed" in text
    assert "+ a::b: reason nobody ships it" in text
    assert f"~ {lever.name}: value (none) -> a::b; origin built-in -> environment" in text
    assert text.startswith("DIFFERENT: 4 differences: findings 1, waivers 1, levers 1, plugins 1")
    assert (
        compare(one, replace(one, waivers=(replace(waiver, where="y:2"),))).parts
        == compare(one, replace(one, waivers=(waiver,))).parts
    )


def test_diff_of_a_boot_and_its_replay_leaves_out_what_no_trace_holds(world: Any) -> None:
    outcome = world.run(world.ask("acme::double"), {"acme": world.acme("acme::double")}, levers={"MUSTER_PREFER": ""})
    live, again = outcome.report, replace(outcome.replay(), muster_version=outcome.report.muster_version)
    assert (live.replayed, again.replayed) == (False, True)
    live = replace(
        live, device="NVIDIA H200", target="cuda:1", stage_reached="loaded",
        kernels=tuple(replace(row, stage="loaded") for row in live.kernels),
        levers=tuple(replace(row, origin="environment") for row in live.levers),
        layouts=(LayoutRow(weight="w", layout="k64", size_bytes=1, reason="", readers=()),),
    )  # fmt: skip
    for difference in (compare(live, again), compare(again, live)):
        assert difference.equal
        assert "copies of weights" in difference.left_out
        said = (
            "left out, as one is a replay: targets and devices, stages, builders, origins of levers, copies of weights"
        )
        assert render_diff(difference) == f"EQUAL: the reports say the same ({said})"
    other = replace(again, kernels=tuple(replace(row, tier="reference", version="9") for row in again.kernels))
    text = render_diff(compare(live, other)).splitlines()
    assert text[0].startswith("DIFFERENT: 1 difference")
    assert text[1] == said
    assert any("version" in line for line in text)
    layouts = replace(again, replayed=False)
    assert not compare(live, layouts).equal
    assert compare(live, layouts).left_out == ()


def test_stage_that_all_kernels_have_as_the_boots_do_is_told_once_and_without_their_names(one: Report) -> None:
    row = next(row for row in one.kernels if row.served_by)
    rows = tuple(replace(row, key=f"acme_plugin::k{i}", chain=(), stage="compiled") for i in range(40))
    before = replace(one, stage_reached="compiled", kernels=rows)
    after = replace(one, stage_reached="loaded", kernels=tuple(replace(row, stage="loaded") for row in rows))
    text = render_diff(compare(before, after))
    assert "  ~ stage reached: compiled -> loaded\n" in text
    assert text.endswith("kernels\n  ~ 40 keys: stage compiled -> loaded, as the boots")
    other = replace(after, stage_reached="compiled")
    assert "acme_plugin::k39" in render_diff(compare(before, other))
