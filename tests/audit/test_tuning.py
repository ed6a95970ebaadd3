"""Tables of thresholds: selection, permitted settings, and refusals."""

import json
import os
from pathlib import Path

import kernel_muster as km
import pytest
from kernel_muster.audit.render.text import render_text
from kernel_muster.audit.reporting import lever_rows
from kernel_muster.audit.tuning import choose
from kernel_muster.audit.tuning.assumed import assumption
from kernel_muster.audit.tuning.choose import Chosen, choose_table, read_tuned_levers, shipped_names
from kernel_muster.audit.tuning.facts import tuning_facts
from kernel_muster.audit.tuning.table import parse_table, read_table, slug, table_text
from kernel_muster.registry.contract.layouts import LayoutPlan
from kernel_muster.registry.contract.specs import Provider, Registered
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.findings import Severity
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Device, Target
from kernel_muster.registry.levers import CORE_LEVERS, read_levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.select import Selector

EDGE = km.Lever(name="MUSTER_EDGE", kind="int", default=32, minimum=1, doc="an edge", tuning="same_bits")
OTHER = km.Lever(name="MUSTER_OTHER", kind="int", default=17, doc="an edge", tuning="other_bits")
PLAIN = km.Lever(name="MUSTER_PLAIN", kind="int", default=5, doc="no edge")
LEVERS = (*CORE_LEVERS, EDGE, OTHER, PLAIN)
ARCH = parse_arch("sm_90a")


def device(name="Acme A1", driver="13.1", multiprocessors=4):
    return Target("cuda:0", ARCH, Device(0, name, (9, 0), multiprocessors, 1, driver))


@pytest.fixture
def shipped(world, tmp_path):
    """A folder of shipped tables with one for the Acme A1."""
    folder = tmp_path / "tables"
    folder.mkdir()
    world.monkeypatch.setattr(choose, "SHIPPED", folder)

    def ship(name="acme-a1", **changes):
        table = world.tuning_table({}, {"MUSTER_EDGE": 64, "MUSTER_OTHER": 9})
        (folder / f"{name}.json").write_text(json.dumps(table | changes))
        return folder / f"{name}.json"

    return ship


def read(target, *sources):
    levers, findings, chosen = read_tuned_levers(LEVERS, sources, target)
    return {s.lever.name: (s.value, s.origin) for s in levers.settings}, findings, chosen


def test_table_of_the_device_is_taken_by_its_name(shipped):
    shipped()
    values, findings, chosen = read(device())
    assert (values["MUSTER_EDGE"], values["MUSTER_OTHER"]) == ((64, "table"), (9, "table"))
    assert (findings, chosen.name) == ([], "acme-a1")


@pytest.mark.parametrize("target", [CPU_TARGET, Target("sm_90a", ARCH), None, device("Acme A2")])
def test_no_table_is_taken_where_there_is_no_such_device(shipped, target):
    shipped()
    values, findings, chosen = read(target)
    assert (values["MUSTER_EDGE"], findings, chosen) == ((32, "built-in"), [], None)


def test_table_whose_name_fits_and_whose_device_is_another_is_not_taken(shipped):
    shipped()
    assert read(device("acme a1"))[2] is None


def test_precedence_is_environment_manifest_table_built_in(shipped):
    shipped()
    values, _, _ = read(device(), ("environment", {"MUSTER_EDGE": "8"}), ("manifest", {"MUSTER_OTHER": 3}))
    assert values["MUSTER_EDGE"] == (8, "environment")
    assert values["MUSTER_OTHER"] == (3, "manifest")
    assert values["MUSTER_PLAIN"] == (5, "built-in")


def test_table_is_named_by_file_by_shipped_name_or_switched_off(shipped, tmp_path):
    file = shipped()
    other = tmp_path / "mine.json"
    other.write_text(file.read_text().replace('"value": 64', '"value": 128'))
    named = {name: read(CPU_TARGET, ("environment", {"MUSTER_TUNING_TABLE": name})) for name in ("acme-a1", str(other))}
    assert [values["MUSTER_EDGE"] for values, _, _ in named.values()] == [(64, "table"), (128, "table")]
    values, findings, chosen = read(device(), ("environment", {"MUSTER_TUNING_TABLE": "none"}))
    assert (values["MUSTER_EDGE"], findings, chosen) == ((32, "built-in"), [], None)


def timings(**changes):
    row = {"us": {"t": 1.5}, "spread": {"t": 0.01}}
    return [{**dict.fromkeys(("features", "depth", "rows"), size), **row, **changes} for size in (16, 1024)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": "kernel-muster/report"}, "is no tuning table"),
        ({"version": "2.0"}, "version: String should match"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"date": "today"}, "date: String should match"),
        ({"date": "9999-99-99"}, "date: 9999-99-99 is no date: month must be in 1..12"),
        ({"kernels": {"acme::mul": "abc"}}, "kernels.acme::mul: String should match"),
        ({"kernels": {"mul": "0" * 64}}, "kernels.mul"),
        ({"device": None}, "device: Input should be"),
        ({"timings": []}, "timings: nothing was measured"),
        ({"timings": timings(us={"t": 1.0, "m128": 2.0})}, "timings.0: .*other arms: m128 in one of them alone"),
        ({"timings": timings(spread={})}, "timings.0: .*other arms: t in one of them alone"),
        ({"timings": timings(us={"nope": 1.0}, spread={"nope": 0.1})}, "timings.0: us: nobody knows an arm nope"),
        ({"timings": timings() + timings(us={"t": 150.0})[:1]}, "timings: 16 x 16 of 16 rows stand twice"),
        ({"timings": timings(us={}, spread={})}, "timings.0: .*us: no arm has a time"),
        ({"timings": timings(rows=64)}, "covers.rows: 16 to 1024, timings hold 64 to 64"),
        ({"timings": timings(features=16)}, "covers.features: 16 to 1024, timings hold 16 to 16"),
        ({"timings": timings(depth=1024)}, "covers.depth: 16 to 1024, timings hold 1024 to 1024"),
        ({"covers": {n: {"least": 2, "most": 1} for n in ("rows", "features", "depth")}}, "least 2 is above most 1"),
    ],
)
def test_malformed_table_says_where_and_what(world, change, why):
    with pytest.raises(UsageError, match=why):
        parse_table(json.dumps(world.tuning_table({}, {}) | change), "t.json")


HOPPER = {"MUSTER_W4A16_HOPPER_FROM": 33}
HOPPER_KERNELS = dict.fromkeys(("w4a16_gemv::w4a16_gemv", "w4a16_hopper::w4a16_hopper_gemm"), "0" * 64)


@pytest.mark.parametrize(("us", "is_timed"), [
    ({"gemv": 1.0, "hopper": 2.0}, True), ({"gemv": 1.0, "t": 2.0}, False), ({"cublas_bf16": 1.0}, False),
])  # fmt: skip
def test_edge_rests_on_a_timing_of_both_its_arms(world, us, is_timed):
    rows = timings(us=us, spread=dict.fromkeys(us, 0.1))
    table = parse_table(json.dumps(world.tuning_table(HOPPER_KERNELS, HOPPER) | {"timings": rows}), "t.json")
    said = "MUSTER_W4A16_HOPPER_FROM divides gemv and hopper, and no timing is of both"
    assert table.problems() == ([] if is_timed else [said])


def test_arms_of_an_edge_must_be_timed_at_one_point(world):
    rows = [
        one | {"us": {arm: 1.0}, "spread": {arm: 0.1}} for one, arm in zip(timings(), ("gemv", "hopper"), strict=True)
    ]
    table = parse_table(json.dumps(world.tuning_table(HOPPER_KERNELS, HOPPER) | {"timings": rows}), "t.json")
    assert len(table.problems()) == 1


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_table_has_nothing_to_say_against_it(name):
    assert read_table(choose.SHIPPED / f"{name}.json").problems() == []


@pytest.mark.parametrize(
    ("edges", "why"),
    [
        ({"MUSTER_NOBODY": 1}, "nobody declares a lever MUSTER_NOBODY"),
        ({"MUSTER_PLAIN": 1}, "MUSTER_PLAIN is no threshold that a table may set"),
        ({"MUSTER_EDGE": 0}, "MUSTER_EDGE: 0 is not an integer from 1"),
    ],
)
def test_edge_that_no_lever_takes_is_a_bad_lever(world, tmp_path, edges, why):
    file = tmp_path / "t.json"
    file.write_text(json.dumps(world.tuning_table({}, edges)))
    values, (finding,), chosen = read(CPU_TARGET, ("environment", {"MUSTER_TUNING_TABLE": str(file)}))
    assert (finding.code, finding.subject, finding.where) == ("BAD_LEVER", "MUSTER_TUNING_TABLE", ("environment",))
    assert why in finding.why
    assert (values["MUSTER_EDGE"], chosen) == ((32, "built-in"), None)


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "there is no such file"), ("{", "is not JSON"), ("[]", "is no tuning table"), ("\udcff", "cannot be read")],
)
def test_unreadable_table_refuses_the_boot_on_entry(world, tmp_path, text, why):
    file = tmp_path / "t.json"
    if text is not None:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
    outcome = world.run(world.ask("acme::mul"), {}, levers={"MUSTER_TUNING_TABLE": str(file)})
    assert outcome.codes == ["BAD_LEVER"]
    assert why in outcome.finding("BAD_LEVER").why
    assert isinstance(outcome.error, km.BootRefused)


@pytest.mark.parametrize(
    ("edges", "kernels", "why"),
    [
        ([], {"acme::mul": "0" * 64}, "edges: it sets nothing"),
        (None, {}, "kernels: it names none"),
        (
            [("MUSTER_W4A16_HOPPER_FROM", 17)],
            {"w4a16_hopper::w4a16_hopper_gemm": "0" * 64},
            "MUSTER_W4A16_HOPPER_FROM divides gemv, and kernels has none behind that",
        ),
        (
            [("MUSTER_W4A16_M128_ABOVE", 64)],
            {"w4a16::w4a16_gemm_t_p3": "0" * 64},
            "MUSTER_W4A16_M128_ABOVE divides m128, and kernels has none behind that",
        ),
    ],
)
def test_table_with_nothing_behind_its_edges_is_a_bad_lever(world, shipped, tmp_path, edges, kernels, why):
    table = world.tuning_table({}, {"MUSTER_EDGE": 64} if edges is None else dict(edges)) | {"kernels": kernels}
    file = tmp_path / "t.json"
    file.write_text(json.dumps(table))
    _, (finding,), chosen = read(CPU_TARGET, ("environment", {"MUSTER_TUNING_TABLE": str(file)}))
    assert (finding.code, chosen) == ("BAD_LEVER", None)
    assert why in finding.why
    shipped(edges=table["edges"], kernels=kernels)
    _, (finding,), chosen = read(device())
    assert (finding.code, chosen) == ("BAD_LEVER", None)
    assert why in finding.why


def test_table_with_a_key_twice_is_refused(world):
    text = json.dumps(world.tuning_table({}, {"MUSTER_EDGE": 64}))
    for twice in ('{"date": "2026-11-28", ' + text[1:], text.replace('"value": 64', '"value": 64, "value": 65')):
        with pytest.raises(UsageError, match=r"t\.json: one object has keys twice: '(date|value)'"):
            parse_table(twice, "t.json")


def test_what_is_no_file_is_called_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, said in ((tmp_path, "is a directory, expected a file"), (tmp_path / "pipe", "is a pipe, expected a file"),
                       (Path(os.devnull), "is a device, expected a file")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            read_table(path)


def test_broken_shipped_table_is_a_bad_lever_and_not_ignored(shipped):
    shipped(version="9.9")
    _, (finding,), chosen = read(device())
    assert (finding.code, chosen) == ("BAD_LEVER", None)
    assert "the shipped table is broken" in finding.why


# The basis of a table


def source_of(registered):
    return registered.spec.backend.source_sha256


def backend_of(digest):
    class Backend:
        name, source_sha256 = "python", digest

        def launch(self, arguments, dims, stream):
            """Run nothing."""

    return Backend()


def facts(world, target, kernels=None, digest="a" * 64, copies=()):
    spec = world.spec("acme::mul", archs=("sm_90a",), backend=backend_of(digest))
    catalog = Catalog(kernels=(Registered(spec, Provider("acme", "acme", "1")),))
    levers, _, _ = read_tuned_levers(LEVERS, (), None)
    table = parse_table(json.dumps(world.tuning_table(kernels or {"acme::mul": "a" * 64}, {})), "t")
    return tuning_facts(Chosen("t", table), target, levers, Selector(catalog, target, levers), copies, source_of)


@pytest.mark.parametrize(
    ("target", "digest", "stale"),
    [
        (device(), "a" * 64, ""),
        (device(driver="13.9"), "a" * 64, ""),
        (Target("sm_90a", ARCH), "a" * 64, ""),
        (device("Acme A2"), "a" * 64, "it was measured on Acme A1 (sm_90a, 4 SMs), the device is Acme A2"),
        (device(multiprocessors=2), "a" * 64, "it was measured on Acme A1 (sm_90a, 4 SMs), the device has 2 SMs"),
        (device(driver="14.0"), "a" * 64, "it was measured with a driver for CUDA 13.0, this one is for 14.0"),
        (device(), "b" * 64, "acme::mul has other source than the one measured (bbbbbbbbbbbb, not aaaaaaaaaaaa)"),
        (device(), "", "acme::mul has other source than the one measured (unreadable, not aaaaaaaaaaaa)"),
    ],
)
def test_table_is_stale_where_device_driver_or_kernel_differ(world, target, digest, stale):
    assert "; ".join(facts(world, target, digest=digest).stale) == stale


def test_table_is_stale_where_a_kernel_or_the_architecture_is_another(world):
    assert facts(world, device(), {"acme::gone": "a" * 64}).stale == (
        "acme::gone was measured, and nobody provides it here",
    )
    (why,) = (text for text in facts(world, CPU_TARGET).stale if "target" in text)
    assert why == "it was measured on Acme A1 (sm_90a, 4 SMs), the target is cpu"


def test_only_weights_that_a_measured_kernel_reads_can_be_uncovered(world):
    plan = LayoutPlan()
    key, stranger = (world.spec(name).kernel_key for name in ("acme::mul", "acme::add"))
    rows = [("a", key, (2048, 64)), ("b", key, (2048, 64)), ("c", key, (1024, 16)), ("d", stranger, (4096, 64)),
            ("e", key, (8, 64, 64)), ("f", key, (16, 8))]  # fmt: skip
    for weight, reader, shape in rows:
        for layout in ("rows", "columns"):
            plan.want(weight, layout, reader)
            plan.build(weight, layout, 1, "decode", shape)
    plan.want("lm_head.weight", "rows", key)
    plan.build("lm_head.weight", "rows", 1, "decode", (4096, 64))
    assert facts(world, device(), copies=plan.copies).uncovered == ("16 x 8 (f)", "2048 x 64 (a and 1 more)")


@pytest.mark.parametrize(
    ("value", "uncovered"),
    [
        (1 << 20, ("MUSTER_W4A16_HOPPER_FROM=1048576 (M was measured to 1024)",)),
        (1026, ("MUSTER_W4A16_HOPPER_FROM=1026 (M was measured to 1024)",)),
        (1025, ()),
        (17, ()),
    ],
)
def test_edge_above_the_rows_that_were_measured_is_uncovered(world, tmp_path, value, uncovered):
    lever = km.Lever(name="MUSTER_W4A16_HOPPER_FROM", kind="int", default=17, doc="an edge", tuning="other_bits")
    kernels = dict.fromkeys(("w4a16_gemv::w4a16_gemv", "w4a16_hopper::w4a16_hopper_gemm"), "0" * 64)
    file = tmp_path / "t.json"
    file.write_text(json.dumps(world.tuning_table(kernels, {lever.name: value})))
    declared, given = (*CORE_LEVERS, lever), [("environment", {"MUSTER_TUNING_TABLE": str(file)})]
    levers, findings, chosen = read_tuned_levers(declared, given, CPU_TARGET)
    assert findings == []
    found = tuning_facts(chosen, CPU_TARGET, levers, Selector(Catalog(), CPU_TARGET, levers), (), source_of)
    assert found.uncovered == uncovered


# The set hash


@pytest.mark.parametrize(("lever", "changes"), [(EDGE, False), (OTHER, True)])
def test_set_hash_holds_a_tables_edge_only_if_it_changes_bits(world, tmp_path, lever, changes):
    def outcome(value):
        file = tmp_path / f"{value}.json"
        file.write_text(json.dumps(world.tuning_table({}, {lever.name: value})))
        acme = world.plugin("acme_plugin", kernels=[world.spec("acme::mul", archs=("sm_90a",))], levers=[lever])
        levers = {"MUSTER_TUNING_TABLE": str(file)} if value else {}
        return world.run(
            world.ask("acme::mul"), {"acme": acme}, target="sm_90a", stage="registered", levers=levers
        )  # fmt: skip

    plain, one, other = (outcome(value) for value in (0, 64, 65))
    assert len({o.report.set_hash for o in (plain, one, other)}) == (3 if changes else 1)
    assert one.replay().set_hash == one.report.set_hash
    assert [row for row in one.replay().levers if row.origin == "table"] != []


def test_set_hash_holds_the_threshold_in_force_whoever_set_it(world, tmp_path):
    def hash_of(table=None, **levers):
        if table is not None:
            file = tmp_path / f"{table}.json"
            file.write_text(json.dumps(world.tuning_table({}, {"MUSTER_OTHER": table})))
            levers["MUSTER_TUNING_TABLE"] = str(file)
        acme = world.plugin("acme_plugin", kernels=[world.spec("acme::mul")], levers=[OTHER, EDGE])
        outcome = world.run(world.ask("acme::mul"), {"acme": acme}, stage="registered", levers=levers)
        assert outcome.replay().set_hash == outcome.report.set_hash
        return outcome.report.set_hash

    plain, moved = hash_of(), hash_of(64)
    assert moved != plain
    assert hash_of(MUSTER_OTHER="64") == moved
    assert hash_of(5, MUSTER_OTHER="64") == moved
    assert plain == hash_of(17) == hash_of(64, MUSTER_OTHER="17") == hash_of(MUSTER_OTHER="17")
    assert plain == hash_of(MUSTER_EDGE="64")


# Files


def test_table_text_is_read_back_as_it_was(world, tmp_path):
    table = parse_table(json.dumps(world.tuning_table({}, {"MUSTER_EDGE": 64})), "t")
    file = tmp_path / "t.json"
    file.write_text(table_text(table))
    assert read_table(file) == table
    assert sum('"lever"' in line or '"us"' in line for line in file.read_text().splitlines()) == 3


def test_slug_is_the_name_of_a_file():
    assert [slug(name) for name in ("NVIDIA H200", "NVIDIA GeForce RTX 5090", "  ")] == [
        "nvidia-h200",
        "nvidia-geforce-rtx-5090",
        "",
    ]


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_table_is_sound_named_after_its_device_and_has_figures(name):
    catalog = km.open_registry("cpu", levers={}).catalog
    table = read_table(Path(choose.__file__).parent / "tables" / f"{name}.json")
    assert slug(table.device.name) == name
    assert table.lever_problems(catalog.levers) == []
    assert table.timings
    assert all(edge.figures for edge in table.edges)


def test_choose_table_reads_no_file_for_an_architecture(world, tmp_path):
    world.monkeypatch.setattr(choose, "SHIPPED", tmp_path / "nowhere")
    levers, _, _ = read_tuned_levers(LEVERS, (), None)
    assert choose_table(levers, Target("sm_90a", ARCH), LEVERS) == (None, None)


def test_tuning_codes_warn_and_note_when_serving():
    from kernel_muster.registry.findings import CODES

    assert (CODES["TUNING_STALE"].serve, CODES["TUNING_UNCOVERED"].serve) == (Severity.WARN, Severity.NOTE)


def test_no_threshold_of_another_chip_is_in_use_unmarked_on_an_h200():
    catalog = km.open_registry("cpu", levers={}).catalog
    target = Target("cuda:0", ARCH, Device(0, "NVIDIA H200", (9, 0), 132, 1, "13.0"))
    levers, findings, chosen = read_tuned_levers(catalog.levers, (), target)
    assert (findings, chosen and chosen.name) == ([], "nvidia-h200")
    rows = {row.name: row for row in lever_rows(levers, assumption(target, Selector(catalog, target, levers)))}
    assert {name for name, row in rows.items() if row.origin == "table"} == set(chosen.table.values())
    assert {"MUSTER_QKV_TIER_ROWS", "MUSTER_W4A16_K64_MIN_K", "MUSTER_W4A16_HOPPER_FROM"} <= set(chosen.table.values())
    for setting in levers.settings:
        row = rows[setting.lever.name]
        if row.origin == "table":
            assert row.evidence.startswith("NVIDIA H200 (sm_90a, 132 SMs), table nvidia-h200 of ")
        elif "sm_90a" not in row.evidence:
            assert row.assumed is bool(row.evidence)


MEASURED = (km.Measured("Acme A1", {"acme::mul": "a" * 64}), km.Measured("Acme A9"))


@pytest.mark.parametrize(
    ("target", "digest", "is_assumed"),
    [
        (device(), "a" * 64, False),
        (device(), "b" * 64, True),  # another kernel serves
        (device("Acme A2"), "a" * 64, True),  # the same architecture, another device
        (device("Acme A9"), "a" * 64, True),  # the figures belong to kernels of others
        (Target("sm_90a", ARCH), "a" * 64, True),  # no device
        (CPU_TARGET, "a" * 64, False),
    ],
)
def test_built_in_threshold_is_assumed_but_on_its_device_with_its_kernels(world, target, digest, is_assumed):
    evidence = {"evidence": "Acme A1: 1.2x", "measured": MEASURED}
    edge = km.Lever(name="MUSTER_ACME", kind="int", default=8, doc="an edge", keys=("acme::*",), **evidence)
    spec = world.spec("acme::mul", archs=("sm_90a",), backend=backend_of(digest))
    catalog = Catalog(kernels=(Registered(spec, Provider("acme", "acme", "1")),), levers=(edge,))
    for value in (None, 8, 9):
        levers, _ = read_levers([*CORE_LEVERS, edge], [("given", {} if value is None else {edge.name: value})])
        rows = {row.name: row for row in lever_rows(levers, assumption(target, Selector(catalog, target, levers)))}
        assert rows[edge.name].assumed is (is_assumed and value is None)  # a value set by a user is the user's own


def test_report_says_in_one_line_which_built_in_thresholds_are_assumed(world):
    evidence = {"evidence": "Acme A1: 1.2x", "measured": MEASURED}
    edges = [
        km.Lever(name=f"MUSTER_ACME_{name}", kind="int", default=8, doc="an edge", keys=(key,), **evidence)
        for name, key in (("A", "acme::*"), ("B", "acme::mul"), ("NOT_ASKED_FOR", "acme::add"))
    ]
    acme = world.plugin("acme_plugin", kernels=[world.spec("acme::mul", archs=("sm_90a",))], levers=edges)
    outcome = world.run(world.ask("acme::mul"), {"acme": acme}, target="sm_90a", stage="registered")
    said = "assumed, not measured on sm_90a with the kernels that serve: MUSTER_ACME_A, MUSTER_ACME_B\n"
    assert render_text(outcome.report).count("assumed") == 1
    assert said in render_text(outcome.report)
    assert [row.name for row in outcome.replay().levers if row.assumed] == []  # a trace does not name the device
