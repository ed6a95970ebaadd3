"""What ``muster bench`` does without a device: shapes, row counts, records, and refusals."""

import json
import math

import pytest
from kernel_muster.bench import plugin, shapes, timing
from kernel_muster.bench.gemv import Row, tier_of
from kernel_muster.bench.record import record_of, to_json, to_markdown
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.arch import parse_arch
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.target import Device, Target

NAN = math.nan


def row(contestant, us, *, rows=1, note=""):
    return Row("qkv", 14336, 5120, rows, contestant, us, us, us, 0.01, us / 10.0, 4000.0, 1.6e-3, note)


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
    assert expected <= set(shapes.shapes_of(manifests.resolve(model).manifest))


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


def test_record_names_device_versions_command_and_every_contestant():
    device = Device(0, "NVIDIA Test", (9, 0), 132, 2**37, "13.0")
    measured = [row("read", 10.0), row("w4a16_gemv::w4a16_gemv", 12.5), row("Peer", NAN, note="not installed")]
    record = record_of(measured, Target("cuda:0", parse_arch("sm_90a"), device), "muster bench", "ab" * 32)
    assert (record["device"], record["arch"], record["command"]) == ("NVIDIA Test", "sm_90a", "muster bench")
    assert json.loads(to_json(record)) == record
    assert record["rows"][2]["us"] is None
    table = to_markdown(record)
    assert "| qkv | 14336 x 5120 | 1 | 10.00 | 12.50 | 1.0% | 1.25 | 4000 | 1.6e-03 | - |" in table
    assert "- Peer: not installed" in table


def test_bench_without_a_device_says_so_and_exits_1(cli):
    result = cli("bench", "--target", "cuda:999", "--shape", "64x64")
    assert result.code == 1
    assert "NO_DEVICE" in result.out


def test_bench_of_an_architecture_says_that_it_needs_a_device(cli):
    result = cli("bench", "--target", "sm_90a", "--shape", "64x64")
    assert result.code == 1
    assert "needs a device" in result.out


@pytest.mark.parametrize("rows", ["0", "17", "1,x", ""])
def test_bench_of_rows_that_no_gemv_takes_is_a_usage_error(cli, rows):
    assert cli("bench", "--rows", rows, "--shape", "64x64").code == 2
