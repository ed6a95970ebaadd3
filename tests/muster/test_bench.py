"""``muster bench`` without a device: shapes, row counts, records, and refusals."""

import json
import math

import pytest
from kernel_muster.bench import plugin, timing
from kernel_muster.bench.contestants import Absent, Contestant, Entry
from kernel_muster.bench.data import shapes
from kernel_muster.bench.families.gemv import tier_of
from kernel_muster.bench.measure import MODULES, family
from kernel_muster.bench.problem import Problem, Request
from kernel_muster.bench.race import Row
from kernel_muster.bench.record import record_of, to_json, to_markdown
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import Device, Target


def row(contestant, role, us, **other):
    if us is not None:
        other = {"spread": 0.01, "ratio_to_floor": us / 10.0, "gb_per_s": 4000.0, "relative_l2": 1.6e-3} | other
    return Row("gemv", "qkv", "14336 x 5120", 1, contestant, role, us, us, us, **other)


@pytest.fixture
def manifests():
    return Catalogue.from_folders([manifest_folder()])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen3.6-27b", {("attn.qkv", 14336, 5120), ("gdn.qkvz", 16384, 5120), ("ffn.down", 5120, 17408)}),
        ("qwen3.6-35b-a3b", {("attn.qkv", 9216, 2048), ("gdn.out_proj", 2048, 4096), ("lm_head", 248320, 2048)}),
    ],
)
def test_shapes_of_a_model_are_those_of_its_projections(manifests, model, expected):
    assert expected <= set(shapes.projections_of(manifests.resolve(model).manifest))


def test_shapes_of_one_size_are_measured_once_under_all_their_names():
    assert shapes.distinct([("a", 16, 32), ("b", 16, 32), ("a", 16, 32), ("c", 16, 48)]) == [
        ("a / b", 16, 32),
        ("c", 16, 48),
    ]


@pytest.mark.parametrize("text", ["5x3", "x16", "0x16", "5x", "5x16x2", "-5x16", "5 x 16", "99999999x16"])
def test_a_shape_that_no_kernel_takes_is_refused(text):
    with pytest.raises(UsageError, match="expected NxK with K a multiple of 16"):
        shapes.parse_shape(text)


def test_each_row_count_has_the_tier_that_serves_it():
    assert [tier_of(rows) for rows in (1, 2, 8, 9, 16)] == [
        "w4a16_gemv",
        "w4a16_gemv_batch2",
        "w4a16_gemv_batch8",
        "w4a16_gemv_batch16",
        "w4a16_gemv_batch16",
    ]


@pytest.mark.parametrize("size", [1, 1000, 10**6, 10**8, 10**9])
def test_copies_exceed_the_cache_and_a_replay_is_long_enough(size):
    copies = timing.copies_of(size)
    assert copies >= 2
    assert copies * size >= timing.COLD_BYTES or copies == 160
    launches = timing.repeats_of(size, copies) * copies
    assert launches * (1.5 + size / 4.5e6) >= timing.SHORTEST_REPLAY_US


def test_read_kernel_compiles_and_keeps_its_loads():
    (spec,) = plugin.muster_kernels()
    built = Builder().build(spec.backend.request(parse_arch("sm_90a")))
    assert built.entries["read_bytes"].registers >= 24  # several loads of 16 bytes in flight
    assert built.entries["read_bytes"].spill_store_bytes == 0


def record(*rows):
    device = Device(0, "NVIDIA Test", (9, 0), 132, 2**37, "13.0")
    return record_of(rows, Target("cuda:0", parse_arch("sm_90a"), device), "muster bench")


def test_record_names_device_command_and_every_contestant():
    made = record(
        row("read", "floor", 10.0),
        row("w4a16_gemv::w4a16_gemv", "ours", 12.5, source_sha256="ab"),
        row("Peer", "peer", None, note="not installed"),
    )
    assert (made["device"], made["arch"], made["command"]) == ("NVIDIA Test", "sm_90a", "muster bench")
    assert json.loads(to_json(made)) == made
    assert made["rows"][2]["us"] is None
    table = to_markdown(made)
    assert "| shape | size | M | kernel | us | spread | / floor | GB/s | TFLOP/s | error | read us | Peer us |" in table
    assert "| qkv | 14336 x 5120 | 1 | w4a16_gemv | 12.50 | 1.0% | 1.25 | 4000 | - | 1.6e-03 | 10.00 | - |" in table
    assert "- Peer: not installed" in table


def test_record_has_a_line_for_each_kernel_of_ours():
    table = to_markdown(record(row("a::one", "ours", 1.0), row("a::two", "ours", 2.0)))
    assert [line for line in table.splitlines() if "| one |" in line or "| two |" in line][1:] != []


def test_records_of_other_sources_have_other_digests():
    digests = {record(row("a::b", "ours", 1.0, source_sha256=one))["kernels_sha256"] for one in ("x", "y", "x")}
    assert len(digests) == 2


def test_record_writes_an_infinite_error_as_none_so_that_json_stays_json():
    made = record(row("a::b", "ours", None, relative_l2=math.inf, note="left out"))
    assert made["rows"][0]["relative_l2"] is None
    json.loads(to_json(made), parse_constant=pytest.fail)


class Take:
    """A launch that says how long it takes."""

    def __init__(self, us):
        self.us = us

    def __call__(self):
        pass


def contestant(name, role, us, out=0.0, **entry):
    return Contestant(name, role, lambda stream: Entry((Take(us),), out, 1000, **entry))


def test_race_gives_each_contestant_its_ratio_to_the_floor_and_leaves_wrong_ones_out(raced_on_host):
    def breaks(stream):
        raise RuntimeError("no such kernel")

    problem = Problem(
        "qkv",
        "1 x 2",
        4,
        (
            contestant("read", "floor", 10.0, None),
            contestant("a::right", "ours", 12.0, 0.001, flops=24e6),
            contestant("a::wrong", "ours", 1.0, 0.5),
            contestant("a::nan", "ours", 1.0, math.nan),
            contestant("a::checked", "ours", 15.0, 0.5, check=lambda: 0.002),
            Contestant("gone", "peer", lambda stream: Absent("not installed")),
            Contestant("broken", "peer", breaks),
        ),
        error=lambda out: out,
        largest_error=0.01,
    )
    rows = raced_on_host(problem)
    assert [(one.us, one.ratio_to_floor) for one in rows.values()] == [
        (10.0, 1.0),
        (12.0, 1.2),
        (None, None),
        (None, None),
        (15.0, 1.5),
        (None, None),
        (None, None),
    ]
    assert rows["a::right"].tflop_per_s == pytest.approx(2.0)
    assert rows["a::right"].gb_per_s == pytest.approx(1000 / 12.0 / 1e3)
    assert rows["a::checked"].relative_l2 == 0.002
    assert "0.5 exceeds 0.01" in rows["a::wrong"].note
    assert "nan exceeds" in rows["a::nan"].note
    assert (rows["gone"].note, rows["broken"].note) == ("not installed", "RuntimeError: no such kernel")


def test_race_without_the_floor_times_the_others_and_gives_no_ratio(raced_on_host):
    problem = Problem("qkv", "1 x 2", 1, (contestant("a::b", "ours", 12.0, None),))
    (only,) = raced_on_host(problem).values()
    assert (only.us, only.ratio_to_floor) == (12.0, None)


def test_race_judges_a_peer_by_its_own_bound(raced_on_host):
    peer = Contestant("coarse", "peer", lambda stream: Entry((Take(9.0),), 0.05, 1000), (), 0.1)
    problem = Problem("qkv", "1 x 2", 1, (peer,), error=lambda out: out, largest_error=0.01)
    (only,) = raced_on_host(problem).values()
    assert (only.us, only.relative_l2, only.note) == (9.0, 0.05, "")
    assert "- coarse: relative L2 error up to 5.0e-02" in to_markdown(record(only))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ["ours", "Quick"]),
        ({"peers": False}, ["ours"]),
        ({"named_peers": ("slow",)}, ["ours", "Slow One"]),
        ({"named_peers": ("quick", "SLOW")}, ["ours", "Quick", "Slow One"]),
    ],
)
def test_peers_that_run_are_the_quick_ones_or_those_asked_for_by_name(asked, expected):
    contestants = (
        contestant("ours", "ours", 1.0),
        contestant("Quick", "peer", 1.0),
        Contestant("Slow One", "peer", lambda stream: Absent(""), is_slow=True),
    )
    request = Request((), **asked)
    assert [one.name for one in contestants if request.wants(one)] == expected


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_family_is_importable_and_its_default_rows_are_rows_it_takes(name):
    found = family(name)
    assert found.name == name
    assert found.default_rows
    found.check_rows(found.default_rows)


def test_bench_without_a_device_says_so_and_exits_1(cli):
    result = cli("bench", "gemv", "--target", "cuda:999", "--shape", "64x64")
    assert result.code == 1
    assert "NO_DEVICE" in result.out


@pytest.mark.parametrize("command", [("bench", "gemv", "--shape", "64x64"), ("tune",)])
def test_what_a_plugin_prints_goes_to_stderr(cli, command):
    cli.install("print('loud import')\nraise ImportError('broken')\n", "loud")
    ran = cli(*command, "--target", "cpu", "--format", "json")
    assert (ran.code, ran.json["verdict"]) == (1, "refused")
    assert "loud import" in ran.err


@pytest.mark.parametrize("command", [("bench", "gemv", "--shape", "64x64"), ("tune",)])
def test_plugin_that_is_left_out_does_not_load(cli, command):
    cli.install("raise ImportError('broken')\n", "broken")
    assert "PLUGIN_LOAD_FAILED broken" in cli(*command, "--target", "cpu").out
    ran = cli(*command, "--target", "cpu", "--no-plugin", "broken")
    assert "PLUGIN_LOAD_FAILED" not in ran.out
    assert "needs a device, and the host is none" in ran.out


def test_bench_of_an_architecture_says_that_it_needs_a_device(cli):
    result = cli("bench", "gemv", "--target", "sm_90a", "--shape", "64x64")
    assert result.code == 1
    assert "needs a device" in result.out


@pytest.mark.parametrize("rows", ["0", "17", "1,x", "", "1_0", "\u0663", "9" * 5000])
def test_bench_of_rows_that_no_gemv_takes_is_a_usage_error(cli, rows):
    assert cli("bench", "gemv", "--rows", rows, "--shape", "64x64").code == 2


@pytest.mark.parametrize("option", ["--model", "--shape", "--only", "--peer"])
def test_bench_of_an_empty_name_is_a_usage_error(cli, option):
    ran = cli("bench", "gemv", option, "")
    assert (ran.code, ran.out) == (2, "")
    assert f"{option}: an item is empty" in ran.err


def test_bench_of_an_unknown_family_suggests_the_near_one(cli):
    result = cli("bench", "gemw")
    assert result.code == 2
    assert "did you mean gemv?" in result.err


def test_bench_of_a_shape_without_a_family_is_a_usage_error_once_there_are_several(cli):
    result = cli("bench", "gemv", "gemw", "--shape", "64x64")
    assert result.code == 2
