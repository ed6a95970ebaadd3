"""``muster bench small``: the small kernels of a step as a family, judged and timed as the others are."""

import sys
from dataclasses import replace
from functools import partial

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.bench import floor
from kernel_muster.bench.data import attention, inputs, workloads
from kernel_muster.bench.families import small
from kernel_muster.bench.measure import family
from kernel_muster.bench.peers import common_peers
from kernel_muster.bench.problem import Request
from kernel_muster.bench.race import Row
from kernel_muster.bench.record import record_of, to_markdown
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import Device, Target

CATALOGUE = Catalogue.from_folders([manifest_folder()])
TINY = replace(inputs.MODELS[0], hidden=128, heads=4, value_heads=4, key_heads=2, intermediate=64, vocabulary=500)


@pytest.fixture
def kernels(measurable):
    return measurable


@pytest.fixture
def raced(measurable, raced_on_host, monkeypatch):
    """Return a function that measures one workload on the host."""
    monkeypatch.setattr(small, "MOST_COPIES", 2)
    return lambda work, kernels=measurable: raced_on_host(small.problem_of(kernels, work, 1))


@pytest.mark.parametrize(("name", "index"), [("qwen3.6-35b-a3b", 0), ("qwen3.6-27b", 1)])
def test_sizes_of_a_manifest_are_those_that_were_measured(name, index):
    found = inputs.sizes_of(CATALOGUE.resolve(name).manifest)
    assert replace(found, name=inputs.MODELS[index].name) == inputs.MODELS[index]
    assert found.name == name


def test_model_without_a_delta_net_is_a_usage_error():
    with pytest.raises(UsageError, match="models with attention, a gated delta net and an FFN"):
        inputs.sizes_of(CATALOGUE.resolve("qwen3.6-35b-a3b-dflash").manifest)


def test_every_kernel_of_a_step_is_right_and_timed(raced):
    seen = set()
    for work in workloads.step(inputs.Data(np), TINY, 2):
        rows = raced(work)
        assert rows["move"].note == rows["empty"].note == "it runs on devices only"
        mine = rows[work.key]
        assert (mine.us, mine.note) == (2.0, ""), work.key
        assert mine.relative_l2 is not None, work.key
        assert mine.relative_l2 <= small.LARGEST_ERROR
        assert (mine.shape, mine.size, mine.role) == (f"35b {work.key}", work.label, "ours")
        seen.add(work.key.partition("::")[0])
    assert seen == small.MODULES - {"paged_decode", "prefill_paged"}


def test_result_that_is_wrong_is_not_timed(raced, monkeypatch):
    monkeypatch.setattr(small, "error_of", lambda *given: 0.5)
    (work, *_) = workloads.elementwise(inputs.Data(np), TINY, 2)
    mine = raced(work)[work.key]
    assert (mine.us, mine.note) == (None, "left out: its relative L2 error 0.5 exceeds 0.004")


def test_error_is_the_largest_of_all_outputs_and_the_share_of_integers_that_differ(kernels):
    data = inputs.Data(np)
    (work,) = [one for one in workloads.elementwise(data, TINY, 2) if one.key == "norm::rms_norm_residual"]
    handle = kernels.kernel("norm", "rms_norm_residual")
    assert 0 < small.error_of(handle, work.make()) < small.LARGEST_ERROR
    assert small._distance(np.array([1, 2, 3, 4]), [1, 2, 3, 5]) == 0.25
    assert small._distance(np.array([3.0, 4.0]), [0.0, 0.0]) == 5.0
    assert small._distance(np.array([3.0, 4.0]), [3.0, 4.5]) == pytest.approx(0.5 / np.hypot(3.0, 4.5))


def test_what_has_too_many_bytes_for_its_reference_is_timed_and_not_judged(raced, monkeypatch):
    monkeypatch.setattr(small, "_JUDGED_BYTES", 0)
    (work, *_) = workloads.elementwise(inputs.Data(np), TINY, 2)
    mine = raced(work)[work.key]
    assert (mine.us, mine.relative_l2, mine.note) == (2.0, None, "")


def test_kernel_that_is_switched_off_says_so(raced):
    without = km.open_registry(
        "cpu", levers={"MUSTER_DISABLE": "norm::rms_norm"}, local_plugins={floor.NAME: floor}
    )  # fmt: skip
    (work, *_) = workloads.elementwise(inputs.Data(np), TINY, 2)
    mine = raced(work, without)[work.key]
    assert (mine.us, mine.note) == (None, "norm::rms_norm is absent: switched off by MUSTER_DISABLE")


def test_step_of_every_model_begins_with_one_sequence_and_ends_with_prompts(kernels):
    request = Request((CATALOGUE.resolve("qwen3.6-27b").manifest,), rows=(1,))
    groups = [rows for rows, _ in small.step_launches(inputs.Data(np), TINY, request.rows)]
    prompts = [2048, 2048, *(rows for rows in (512, 2048, 512) for _ in range(2)), 64, 64, 512, 512, 2048, 2048]
    assert groups == [1, *[1] * 6, *prompts]


@pytest.mark.parametrize(
    ("only", "is_selected"),
    [((), True), (("norm::",), True), (("RMS_NORM",), True), (("small",), True), (("silu", "2 x 128"), True),
     (("gemv",), False)],
)  # fmt: skip
def test_only_chooses_by_family_shape_size_and_kernels(kernels, only, is_selected):
    (work, *_) = workloads.elementwise(inputs.Data(np), TINY, 2)
    problem = small.problem_of(kernels, work, 2)
    assert Request((), only=only).selects("small", problem) is is_selected


def test_peers_of_different_kernels_share_a_column():
    def row(shape, contestant, role, us=1.0, note=""):
        return Row("small", shape, "1 x 2", 1, contestant, role, us, note=note)

    rows = [
        row("27b norm::rms_norm", "norm::rms_norm", "ours"), row("27b norm::rms_norm", "torch rms_norm", "peer", 4.0),
        row("27b gemv::f", "gemv::f", "ours"), row("27b gemv::f", "cuBLAS", "peer", 5.0),
        row("27b silu::f", "silu::f", "ours"),
    ]  # fmt: skip
    device = Device(0, "NVIDIA Test", (9, 0), 132, 2**37, "13.0")
    table = to_markdown(record_of(rows, Target("cuda:0", parse_arch("sm_90a"), device), "muster bench small"))
    assert "| error | peer us |" in table
    assert "move = a kernel that reads the same bytes" in table
    ends = [line.rsplit("| ", 1)[1] for line in table.splitlines() if line.startswith("| 27b")]
    assert ends == ["4.00 (torch rms_norm) |", "5.00 (cuBLAS) |", "- |"]


def test_peers_of_one_kernel_share_a_column_with_others():
    def row(shape, contestant, role, us=1.0, note=""):
        return Row("small", shape, "1 x 2", 1, contestant, role, us, note=note)

    rows = [
        row("27b norm::rms_norm", "norm::rms_norm", "ours"), row("27b norm::rms_norm", "torch rms_norm", "peer", 4.0),
        row("27b decode::f", "decode::f", "ours"), row("27b decode::f", "torch SDPA", "peer", 5.0),
        row("27b decode::f", "FlashInfer", "peer", 3.0), row("27b decode::f", "Third", "peer", None, "not\n installed"),
    ]  # fmt: skip
    device = Device(0, "NVIDIA Test", (9, 0), 132, 2**37, "13.0")
    table = to_markdown(record_of(rows, Target("cuda:0", parse_arch("sm_90a"), device), "muster bench small"))
    ends = [line.rsplit("| ", 1)[1] for line in table.splitlines() if line.startswith("| 27b")]
    assert ends == ["4.00 (torch rms_norm) |", "5.00 (torch SDPA), 3.00 (FlashInfer) |"]
    assert "- Third: not installed" in table


@pytest.mark.parametrize("tokens", [attention.paged, partial(attention.prefill, is_tiled=True)])
def test_attention_over_pages_stands_beside_flashinfer_which_says_why_it_is_absent(raced, monkeypatch, tokens):
    work = tokens(inputs.Data(np), TINY, 2, 30)
    monkeypatch.setattr(common_peers, "find_spec", lambda name: None)
    assert raced(work)["FlashInfer"].note == "torch is not installed"
    monkeypatch.setattr(common_peers, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    rows = raced(work)
    assert (rows["FlashInfer"].us, rows[work.key].us) == (None, 2.0)
    assert rows["FlashInfer"].note.startswith("flashinfer cannot be imported: ")


def test_shape_is_refused_with_what_chooses_instead(cli):
    ran = cli("bench", "small", "--shape", "1x2")
    assert (ran.code, ran.out) == (2, "")
    assert "--shape 1x2: small takes its sizes from models; --only PART chooses among its kernels" in ran.err


@pytest.mark.parametrize("rows", ["0", "129", "1,x"])
def test_rows_are_sequences_of_a_step(cli, rows):
    assert cli("bench", "small", "--rows", rows).code == 2
    assert family("small").default_rows == (1, 16, 32)
