"""``muster tune``: edges from times, the table, and its use by a boot; a fake source replaces the device."""

import json
import math
from types import SimpleNamespace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.audit.tuning.arms import kernels_behind, missing_behind
from kernel_muster.audit.tuning.table import parse_table, read_table
from kernel_muster.bench.data.nvfp4 import bf16_values
from kernel_muster.bench.tuning.device import find_dense, find_gemms, find_tiers
from kernel_muster.bench.tuning.edges import find_edges
from kernel_muster.bench.tuning.picks import picks
from kernel_muster.bench.tuning.questions import (
    CHUNKED_EDGE,
    HOPPER_EDGE,
    QUESTIONS,
    SMALL_EDGE,
    SMALL_FROM_EDGE,
    with_values,
)
from kernel_muster.bench.tuning.shapes import ROWS, only_bf16, tuned_shapes
from kernel_muster.bench.tuning.source import Timing
from kernel_muster.bench.tuning.write import to_markdown
from kernel_muster.cli.commands.tune import tune_with
from kernel_muster.cli.options import Format
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import Device, Target
from kernel_muster.registry.levers import read_levers

TARGET = Target("cuda:0", parse_arch("sm_90a"), Device(0, "Acme A1", (9, 0), 100, 1, "13.0"))
SHAPES = [("a", 4096, 2048), ("b", 4096, 8192), ("c", 32768, 4096)]


@pytest.fixture(scope="module")
def kernels():
    """The real registry, opened for cpu, on a device that is not there."""
    found = km.open_registry("cpu", levers={})
    return SimpleNamespace(target=TARGET, catalog=found.catalog)


@pytest.fixture(scope="module")
def built_in(kernels):
    return read_levers(kernels.catalog.levers, ())[0]


KERNELS = (
    "w4a16_gemv::w4a16_gemv", "w4a16_gemv::w4a16_gemv_batch3", "w4a16::w4a16_gemm_t_p3", "w4a16::w4a16_gemm_t_k64_p3",
    "w4a16::w4a16_gemm_t_k64_n64_p3", "w4a16::w4a16_gemm_t_m128", "w4a16_hopper::w4a16_hopper_gemm",
    "gemv::dense_gemv_bf16", "gemv::dense_gemv_bf16_batchm", "gemm::dense_gemm_bf16",
)  # fmt: skip


class FakeSource:
    """Times by a rule of its own: what each arm costs follows from the shape."""

    def __init__(self, rule, kernels=None, problems=()):
        self.rule, self.kernels, self.problems = rule, kernels or dict.fromkeys(KERNELS, "0" * 64), list(problems)

    def timings(self, features, depth, rows):
        for count in rows:
            us = self.rule(features, depth, count)
            yield Timing(features, depth, count, us, dict.fromkeys(us, 0.01))


def h200_like(n, k, m):
    """A device whose tiers cost the same at any row count, whose deep tile wins from K = 4096, and that is wide."""
    chunks = math.ceil(m / 16)
    wide = math.ceil(n / 128) * math.ceil(m / 64)
    us = {"gemv": 10.0 * chunks, "hopper": 12.0 + m / 40, "cublas_bf16": 40.0}
    if m <= 16:
        return us | {"tiles3": 10.0 * math.ceil(m / 3)}
    waves, tall = math.ceil(m / 64), math.ceil(m / 128)
    return us | {
        "t": 30.0 * waves,
        "k64": (24.0 if k >= 4096 else 33.0) * waves,
        "k64_n64": (15.0 if wide <= 32 and k >= 4096 else 60.0) * waves,
        "m128": 31.0 * tall,
    }


def edges_of(rule, built_in, shapes=SHAPES, rows=ROWS):
    source = FakeSource(rule)
    timings = [one for _, n, k in shapes for one in source.timings(n, k, rows)]
    return {edge.question.lever: edge for edge in find_edges(timings, built_in)}, timings


def test_edges_stand_where_the_measured_arms_cross(built_in):
    found, _ = edges_of(h200_like, built_in)
    assert {name: edge.value for name, edge in found.items()} == {
        "MUSTER_QKV_TIER_ROWS": 16,
        "MUSTER_W4A16_NARROW_BLOCKS": 32,
        "MUSTER_W4A16_K64_MIN_K": 4096,
        "MUSTER_W4A16_M128_ABOVE": 64,
        "MUSTER_W4A16_GEMV_MI": 1,  # no weight as small was measured
        "MUSTER_W4A16_HOPPER_TINY_MI": 0,
        "MUSTER_W4A16_CHUNKED_ROWS": 32,  # of no use beside the Hopper GEMM, but where it is switched off
        "MUSTER_W4A16_HOPPER_FROM": 17,
        "MUSTER_W4A16_HOPPER_SMALL_MI": 0,
    }
    assert found["MUSTER_W4A16_K64_MIN_K"].built_in == 6144
    assert all(edge.spread == 0.01 and edge.figures for edge in found.values())


@pytest.mark.parametrize(
    ("hopper_us", "value"),
    [(lambda m: 5.0, 4), (lambda m: 25.0, 33), (lambda m: 1000.0, 65), (lambda m: 12.0, 17)],
)
def test_hopper_edge_is_the_first_row_count_it_won_or_one_above_the_last_that_was_compared(built_in, hopper_us, value):
    def rule(n, k, m):
        us = {"hopper": hopper_us(m)}
        return us | ({"gemv": 10.0 * math.ceil(m / 16)} if m <= 64 else {})

    found, _ = edges_of(rule, built_in, rows=(4, 16, 17, 32, 33, 48, 64, 128))
    assert found["MUSTER_W4A16_HOPPER_FROM"].value == value


def test_no_edge_stands_more_than_one_above_what_was_measured(built_in):
    def rule(n, k, m):
        slow = {"t": 850.0, "k64": 900.0, "k64_n64": 900.0, "m128": 900.0} if m > 16 else {}
        return {"gemv": 1.0, "hopper": 800.0} | slow

    found, _ = edges_of(rule, built_in, rows=(8, 16, 17, 32, 48, 64))
    assert found["MUSTER_W4A16_HOPPER_FROM"].value == 65
    assert found["MUSTER_W4A16_K64_MIN_K"].value == 8193
    assert found["MUSTER_W4A16_M128_ABOVE"].value == 64


def test_edge_keeps_its_built_in_value_where_the_gain_is_within_the_spread(built_in):
    def rule(n, k, m):
        return {"gemv": 10.0, "hopper": 9.95 if m < 17 else 5.0}

    found, _ = edges_of(rule, built_in, rows=(8, 16, 17, 32))
    edge = found["MUSTER_W4A16_HOPPER_FROM"]
    assert (edge.value, edge.built_in) == (17, 17)
    assert edge.loss == pytest.approx(10.0 / 9.95 - 1)


def test_edge_is_left_out_where_one_of_its_arms_is_not_there(built_in):
    found, _ = edges_of(lambda n, k, m: {"gemv": 10.0, "t": 5.0}, built_in, rows=(17, 32))
    assert set(found) == {"MUSTER_W4A16_CHUNKED_ROWS"}
    assert found["MUSTER_W4A16_CHUNKED_ROWS"].value == 0


def test_every_edge_is_a_lever_that_a_table_may_set(kernels):
    tunable = {lever.name for lever in kernels.catalog.levers if lever.tuning}
    assert {question.lever for question in QUESTIONS} <= tunable


def test_without_the_hopper_gemm_chunks_are_weighed_against_tiles(built_in):
    found, _ = edges_of(lambda n, k, m: {a: us for a, us in h200_like(n, k, m).items() if a != "hopper"}, built_in)
    assert found["MUSTER_W4A16_CHUNKED_ROWS"].value == 32
    assert not any("HOPPER" in name for name in found)


def test_tiny_weights_go_to_the_tiles_that_win_there(built_in):
    def rule(n, k, m):
        is_tiny = n * k <= 8 << 20
        us = {"gemv": 10.0 * math.ceil(m / 16), "hopper": 30.0 if is_tiny else 12.0}
        return us | ({"t": 15.0, "m128": 20.0} if m > 16 else {})

    found, timings = edges_of(rule, built_in, rows=(16, 17, 32, 64))
    values = {name: edge.value for name, edge in found.items()}
    assert values["MUSTER_W4A16_HOPPER_TINY_MI"] == 8
    assert values["MUSTER_W4A16_CHUNKED_ROWS"] == 0
    taken = {(p.features, p.depth, p.rows): p.arm for p in picks(timings, with_values(built_in, values))}
    assert [taken[4096, 2048, m] for m in (16, 17, 64)] == ["gemv", "t", "t"]
    assert [taken[4096, 8192, m] for m in (16, 17)] == ["gemv", "hopper"]


def test_small_weights_get_an_edge_of_their_own_where_that_pays(built_in):
    def rule(n, k, m):
        chunks = math.ceil(m / 16)
        small = n * k <= 8 << 20
        return {"gemv": (4.0 if small else 20.0) * chunks, "hopper": 15.0 if small else 25.0}

    found, timings = edges_of(rule, built_in, rows=(16, 17, 32, 48, 64))
    values = {name: edge.value for name, edge in found.items()}
    assert values == {
        "MUSTER_W4A16_HOPPER_FROM": 17,
        "MUSTER_W4A16_HOPPER_FROM_SMALL": 64,
        "MUSTER_W4A16_HOPPER_SMALL_MI": 8,
    }
    taken = {(p.features, p.depth, p.rows): p.arm for p in picks(timings, with_values(built_in, values))}
    assert [taken[4096, 2048, m] for m in (17, 48, 64)] == ["gemv", "gemv", "hopper"]
    assert [taken[4096, 8192, m] for m in (16, 17)] == ["gemv", "hopper"]


@pytest.mark.parametrize(("launch_us", "gemm_us", "edges"), [
    (lambda m: 10.0, 12.0, (16, 17)),  # rows cost nothing, and a GEMM less than two launches
    (lambda m: 10.0 * m, 25.0, (0, 4)),  # each row is paid for
    (lambda m: 3.0 + 7.0 * (m > 3), 1e3, (0, 65)),  # launches of 3 rows are the cheapest, and no GEMM pays
    (lambda m: 10.0, 35.0, (16, 64)),
])  # fmt: skip
def test_edges_of_bf16_weights_stand_where_their_arms_cross(built_in, launch_us, gemm_us, edges):
    def gemv(m, widest):
        return sum(launch_us(min(widest, m - start)) for start in range(0, m, widest))

    def rule(n, k, m):
        us = {"bf16_gemv": gemv(m, 16), "cublas_bf16": 9.0} if m <= 64 else {"cublas_bf16": 9.0}
        return us | ({"bf16_tiles3": 0.99 * gemv(m, 3)} if m <= 16 else {}) | {"bf16_gemm": gemm_us}

    found, timings = edges_of(rule, built_in)
    assert set(found) == {"MUSTER_BF16_TIER_ROWS", "MUSTER_BF16_GEMM_FROM"}
    assert tuple(edge.value for edge in found.values()) == edges
    assert [edge.built_in for edge in found.values()] == [16, 17]
    assert list(picks(timings, built_in)) == []  # dispatch is shown for NVFP4 weights only


def test_picks_are_what_dispatch_takes_beside_the_fastest_and_cublas(built_in):
    found, timings = edges_of(h200_like, built_in)
    levers = with_values(built_in, {name: edge.value for name, edge in found.items()})
    taken = {(p.features, p.depth, p.rows): p for p in picks(timings, levers)}
    assert [taken[4096, 2048, m].arm for m in (4, 16, 17, 256)] == ["gemv", "gemv", "hopper", "hopper"]
    assert [taken[4096, 2048, m].is_slower for m in (16, 17, 256)] == [False, False, False]
    slow = list(picks([Timing(1, 64, 17, {"gemv": 50.0, "cublas_bf16": 40.0}, {})], levers))
    assert [p.is_slower for p in slow] == [True]


def test_table_is_written_read_back_and_decides_a_boot(kernels, tmp_path, capsys):
    file = tmp_path / "a1.json"
    assert tune_with(kernels, FakeSource(h200_like), SHAPES, ROWS, Format.TEXT, file) == 0
    text = capsys.readouterr().out
    assert "What dispatch picks is at none of 39 points slower than cuBLAS in BF16." in text
    table = read_table(file)
    assert (table.device.name, table.device.arch, table.device.driver) == ("Acme A1", "sm_90a", "13.0")
    assert (table.covers.features.most, table.covers.rows.most, len(table.timings)) == (32768, 256, 39)

    def arms(**levers):
        with km.boot("qwen3.6-27b", target="cpu", levers=levers) as boot:
            model = km.build_model(boot.manifest, boot.kernels)
        attention = next(layer.mixer for layer in model.layers if "Attention" in type(layer.mixer).__name__)
        rows = {row.name: row for row in boot.report.levers}
        return attention.arm(16, "decode"), rows["MUSTER_QKV_TIER_ROWS"], boot.report

    arm, row, report = arms(MUSTER_TUNING_TABLE=str(file))
    assert (arm, row.value, row.origin) == ("tiers", 16, "table")
    assert row.evidence.startswith(f"Acme A1 (sm_90a, 100 SMs), table {file} of ")
    assert {f.code for f in report.findings} == {"TUNING_STALE", "TUNING_UNCOVERED"}  # other source, few shapes
    assert report.set_hash != arms()[2].set_hash
    assert arms(MUSTER_TUNING_TABLE=str(file), MUSTER_QKV_TIER_ROWS=3)[0] == "tiled"
    assert arms()[:2][0] == "tiled"


def test_a_limit_of_time_leaves_shapes_out_and_says_which(kernels, tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))  # each look at the clock takes ten seconds
    file = tmp_path / "a1.json"
    assert tune_with(kernels, FakeSource(h200_like), SHAPES, (4, 17), Format.TEXT, file, 25) == 0
    assert {(t.features, t.depth) for t in read_table(file).timings} == {(4096, 2048), (4096, 8192)}
    assert "25 seconds are over; not measured: 32768x4096" in capsys.readouterr().err


def test_json_shows_the_table_itself(kernels, tmp_path, capsys):
    assert tune_with(kernels, FakeSource(h200_like), SHAPES[:1], (4, 17), Format.JSON, None) == 0
    assert json.loads(capsys.readouterr().out)["covers"]["rows"] == {"least": 4, "most": 17}


def test_edges_are_found_again_from_a_tables_times_without_a_device(kernels, cli, tmp_path):
    file, again = tmp_path / "a1.json", tmp_path / "again.json"
    tune_with(kernels, FakeSource(h200_like), SHAPES, ROWS, Format.TEXT, file)
    table = json.loads(file.read_text())
    file.write_text(json.dumps(table | {"edges": []}))
    ran = cli("tune", "--from", file, "--output", again)
    assert ran.code == 0
    assert "MUSTER_W4A16_K64_MIN_K | 4096 | 6144" in ran.out
    assert read_table(again).edges == parse_table(json.dumps(table), "t").edges
    assert cli("tune", "--from", tmp_path / "nowhere.json").code == 2


@pytest.mark.parametrize(("change", "said"), [
    (lambda us: {"gemv": us["gemv"]}, "the new table: no boot would take it: edges: it sets nothing"),
    (lambda us: {"nope": 1.0}, "nobody knows an arm nope"),
])  # fmt: skip
def test_times_from_which_no_edge_follows_give_no_table(kernels, cli, tmp_path, change, said):
    file, again = tmp_path / "a1.json", tmp_path / "again.json"
    tune_with(kernels, FakeSource(h200_like), SHAPES, ROWS, Format.TEXT, file)
    table = json.loads(file.read_text())
    for row in table["timings"]:
        row["us"] = change(row["us"])
        row["spread"] = dict.fromkeys(row["us"], 0.01)
    file.write_text(json.dumps(table))
    ran = cli("tune", "--from", file, "--output", again)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert not again.exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (FakeSource(h200_like, problems=["hopper at 16 x 64, 4 rows: wrong"]), "hopper at 16 x 64, 4 rows: wrong"),
        (FakeSource(lambda n, k, m: {"gemv": 1.0}), "has no two arms to compare"),
    ],
)
def test_nothing_is_written_where_an_arm_failed_or_nothing_competes(kernels, tmp_path, capsys, source, said):
    file = tmp_path / "a1.json"
    assert tune_with(kernels, source, SHAPES, ROWS, Format.TEXT, file) == 1
    assert said in capsys.readouterr().out
    assert not file.exists()


def test_summary_names_every_point_that_cublas_wins(kernels, built_in, tmp_path):
    def rule(n, k, m):
        return h200_like(n, k, m) | {"cublas_bf16": 1.0 if (k, m) == (8192, 256) else 90.0}

    file = tmp_path / "a1.json"
    tune_with(kernels, FakeSource(rule), SHAPES, ROWS, Format.TEXT, file)
    assert "slower than cuBLAS in BF16 at 1 of 39 points: 4096x8192 M=256." in to_markdown(read_table(file), built_in)


def test_shapes_hold_every_projection_with_two_arms():
    catalogue = Catalogue.from_folders([manifest_folder()])
    found = [catalogue.resolve(name).manifest for name in ("qwen3.6-27b", "qwen3.6-35b-a3b")]
    sizes = {(n, k) for _, n, k in tuned_shapes(found)}
    assert {(14336, 5120), (5120, 17408), (1024, 5120), (9216, 2048), (512, 2048), (2048, 512)} <= sizes
    assert {(248320, 5120), (248320, 2048)} <= sizes


def test_gates_of_a_delta_net_are_measured_as_bf16_alone():
    catalogue = Catalogue.from_folders([manifest_folder()])
    shapes = tuned_shapes([catalogue.resolve(name).manifest for name in ("qwen3.6-27b", "qwen3.6-35b-a3b")])
    assert only_bf16(shapes) == {(96, 5120), (64, 2048)}
    assert only_bf16([("a gdn.ba / b lm_head", 64, 64), ("64x64", 64, 64)]) == frozenset()


def test_table_covers_the_shapes_of_nvfp4_weights(kernels, tmp_path):
    def rule(n, k, m):
        bf16 = {"bf16_gemv": 1.0 * math.ceil(m / 16), "bf16_gemm": 1.5}
        return bf16 if n == 64 else bf16 | h200_like(n, k, m)

    def covered(shapes):
        file = tmp_path / "a1.json"
        assert tune_with(kernels, FakeSource(rule), shapes, (4, 17), Format.TEXT, file) == 0
        return read_table(file).covers.features.least

    gates = ("gdn.ba", 64, 2048)
    assert (covered([*SHAPES, gates]), covered([gates])) == (4096, 64)


def test_weight_as_bf16_has_the_values_of_the_nvfp4_one():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (5, 16), dtype=np.uint8)
    scales = rng.integers(4, 104, (5, 2), dtype=np.uint8)
    weight = nvfp4.Nvfp4Weight(packed, scales, np.array(2.0**-8, np.float32))
    assert bf16_values(weight, np, step=2).astype(np.float64).tolist() == nvfp4.dequantize(weight).tolist()


def test_arms_of_cpu_are_the_tiers_and_tiles_that_it_has():
    kernels = km.open_registry("cpu", levers={})
    assert set(find_tiers(kernels)) == {1, 2, 3, 4, 5, 6, 7, 8, 16, 256}
    gemms = {arm: str(handle.key) for arm, handle in find_gemms(kernels).items()}
    assert gemms == {
        "t": "w4a16::w4a16_gemm_t_p3",
        "k64": "w4a16::w4a16_gemm_t_k64_p3",
        "k64_n64": "w4a16::w4a16_gemm_t_k64_n64_p3",
        "m128": "w4a16::w4a16_gemm_t_m128",
    }
    for arm, key in gemms.items():
        assert kernels_behind(arm, [key]) == [key]
        assert kernels_behind("gemv", [key]) == []
    dense = [str(handle.key) for handle in find_dense(kernels).values()]
    assert (kernels_behind("bf16_gemv", dense), kernels_behind("bf16_gemm", dense)) == (dense[:2], dense[2:])
    tiers = [str(handle.key) for handle in find_tiers(kernels).values()]
    assert kernels_behind("gemv", tiers) == tiers
    assert kernels_behind("tiles3", tiers) == [f"w4a16_gemv::w4a16_gemv{end}" for end in ("", "_batch2", "_batch3")]


def test_every_edge_has_arms_that_kernels_must_stand_behind():
    edges = {question.lever for question in (*QUESTIONS, CHUNKED_EDGE, HOPPER_EDGE, SMALL_FROM_EDGE, SMALL_EDGE)}
    assert {why.partition(" ")[0] for why in missing_behind(edges, ["acme::mul"])} == edges
    assert list(missing_behind(edges, KERNELS)) == []


# The command


def test_levers_of_a_target_show_the_tables_value_origin_and_evidence(kernels, cli, tmp_path):
    file = tmp_path / "a1.json"
    tune_with(kernels, FakeSource(h200_like), SHAPES, ROWS, Format.TEXT, file)
    cli.monkeypatch.setenv("MUSTER_TUNING_TABLE", str(file))
    text = cli("levers", "--target", "sm_90a").out
    assert "MUSTER_W4A16_K64_MIN_K=4096 (table)" in text
    evidence = next(line for line in text.splitlines() if "t / k64 or its narrow twin" in line)
    assert evidence.strip().startswith(f"evidence: Acme A1 (sm_90a, 100 SMs), table {file} of ")
    moved = {row["name"]: row for row in cli("levers", "--target", "sm_90a", "--format", "json").json["levers"]}
    assert not moved["MUSTER_W4A16_K64_MIN_K"]["assumed"]
    assert moved["MUSTER_NO_K64_N64"]["assumed"]
    assumed = [line for line in text.splitlines() if "assumed" in line]
    assert len(assumed) == 1
    assert "not measured on sm_90a with the kernels that serve: MUSTER_" in assumed[0]
    assert "assumed" not in cli("levers", "--target", "cpu").out
    cli.monkeypatch.setenv("MUSTER_W4A16_K64_MIN_K", "512")
    assert "MUSTER_W4A16_K64_MIN_K=512 (environment)" in cli("levers", "--target", "sm_90a").out


def test_table_that_is_none_is_a_bad_lever_of_every_command(cli, tmp_path):
    file = tmp_path / "a1.json"
    file.write_text("{}")
    cli.monkeypatch.setenv("MUSTER_TUNING_TABLE", str(file))
    for command in (("levers", "--target", "sm_90a"), ("audit", "qwen3.6-27b", "--target", "cpu")):
        ran = cli(*command)
        assert ran.code == 1
        assert "BAD_LEVER" in ran.out
        assert "is no tuning table" in ran.out


def test_tune_ignores_the_table_in_force(cli, kernels, tmp_path):
    file, broken = tmp_path / "a1.json", tmp_path / "broken.json"
    tune_with(kernels, FakeSource(h200_like), SHAPES, ROWS, Format.TEXT, file)
    broken.write_text("{}")
    cli.monkeypatch.setenv("MUSTER_TUNING_TABLE", str(broken))
    assert cli("tune", "--from", file).code == 0
    assert "PLUGIN_NOT_FOUND nope" in cli("tune", "--from", file, "--no-plugin", "nope").out
    ran = cli("tune", "--target", "cpu")
    assert ran.code == 1
    assert "tuning needs a device" in ran.out
    assert "BAD_LEVER" not in ran.out
    cli.monkeypatch.setenv("MUSTER_DISABLE_NOTHING", "1")
    for command in (("tune", "--from", file), ("tune", "--target", "cpu")):
        ran = cli(*command)
        assert (ran.code, "MUSTER_DISABLE_NOTHING" in ran.out) == (1, True)


@pytest.mark.parametrize(
    "more",
    [
        ("qwen3.6-27b",),
        ("--rows", "4"),
        ("--shape", "16x64"),
        ("--target", "cpu"),
        ("--seconds", "9"),
        ("--rounds", "9"),
        ("--no-peers",),
        ("--peers",),
    ],
)
def test_nothing_to_measure_is_named_beside_from(cli, kernels, tmp_path, more):
    file = tmp_path / "a1.json"
    tune_with(kernels, FakeSource(h200_like), SHAPES, ROWS, Format.TEXT, file)
    ran = cli("tune", "--from", file, *more)
    assert ran.code == 2
    assert "not beside --from" in ran.err


def test_command_that_is_not_utf_8_is_escaped_and_the_measurement_kept(kernels, tmp_path, capsys, monkeypatch):
    file = tmp_path / "a1.json"
    monkeypatch.setattr("sys.argv", ["muster", "tune", "--output", "\udcff.json", "--shape", "9" * 200_000])
    assert tune_with(kernels, FakeSource(h200_like), SHAPES, (4, 17), Format.TEXT, file) == 0
    command = read_table(file).command
    assert command.startswith("muster tune --output \\udcff.json --shape 999")
    assert command.endswith("9...")


def test_tune_without_a_device_refuses_and_writes_nothing(cli, tmp_path):
    file = tmp_path / "t.json"
    for target in ((), ("--target", "cpu"), ("--target", "sm_90a")):
        ran = cli("tune", *target, "--output", str(file))
        assert ran.code == 1
        assert "NO_DEVICE" in ran.out or "tuning needs a device" in ran.out
    assert not file.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rows", "0"),
        ("--rows", "a"),
        ("--rows", "4,,8"),
        ("--shape", "5x3"),
        ("nosuchmodel",),
        ("--output", "/nowhere/t"),
    ],
)
def test_tune_refuses_what_makes_no_sense(cli, arguments):
    assert cli("tune", *arguments).code == 2
