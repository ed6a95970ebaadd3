"""The workloads of the small kernels, against their contracts."""

from dataclasses import replace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.bench import floor
from kernel_muster.bench.data import attention, gated_delta, inputs, workloads
from kernel_muster.bench.families.common import lines, main, read_options
from kernel_muster.bench.families.small import MODULES
from kernel_muster.bench.race import Row
from kernel_muster.registry.backends.cuda_kernel import is_device_backend
from kernel_muster.registry.errors import BootRefused

MODELS = [replace(model, vocabulary=1000) for model in inputs.MODELS]


@pytest.fixture(scope="module")
def kernels():
    return km.open_registry("cpu", levers={}, local_plugins={floor.NAME: floor})


def all_of(model, rows):
    data = inputs.Data(np)
    more = (
        *(attention.paged(data, model, rows, 100, form) for form in attention.PAGED_FORMS),
        attention.prefill(data, model, 20, 30),
        attention.prefill(data, model, 20, 30, is_tiled=True),
        gated_delta.gdn_prefill(data, model, 9),
        gated_delta.gdn_prefill(data, model, 9, is_chunked=True),
        workloads.dense(data, model, 20, 96, "gemm::dense_gemm_bf16"),
    )
    return (*workloads.step(data, model, rows), *more)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_workload_has_the_arguments_of_its_contract(kernels, model, rows):
    for work in all_of(model, rows):
        handle = kernels.kernel(*work.key.split("::"))
        bound = handle.contract.signature.bind(work.key, (), work.make())
        assert not bound.is_empty
        touched = sum(view.size * view.dtype.itemsize for view in bound.views.values())
        assert 0 < work.writes <= touched
        assert work.reads > 0


def test_step_measures_every_device_kernel_of_its_families(kernels):
    measured = {work.key for model in MODELS for rows in (1, 2) for work in all_of(model, rows)}
    families = {key.partition("::")[0] for key in measured} - {"gemv", "gemm"}
    offered = {
        found.spec.key
        for found in kernels.catalog.kernels
        if is_device_backend(found.spec.backend) and found.spec.key.partition("::")[0] in families
    }
    # Variants covered by a measured one: the same kernel with other arguments, or not part of a decode step.
    stood_for = {
        "causal_conv1d::causal_conv1d_update_prefill",
        "causal_conv1d::causal_conv1d_verify_n",
        "gated_delta_rule::gated_delta_rule_chunk2",
        "gated_delta_rule::gated_delta_rule_chunk3",
        "rope::rope_yarn",
    }
    assert offered - measured == stood_for


def row(shape, contestant, role, us, **more):
    return Row("small", shape, "1 x 5120", 1, contestant, role, us, **more)


def test_line_of_a_place_holds_every_time_that_was_taken():
    rows = [
        row("27b norm::f", "move", "floor", 2.0), row("27b norm::f", "empty", "floor", 0.5),
        row("27b norm::f", "norm::f", "ours", 3.0, ratio_to_floor=1.5, spread=0.01, relative_l2=1.6e-3),
        row("27b norm::f", "torch", "peer", 4.0), row("27b silu::f", "move", "floor", 1.0),
        row("27b silu::f", "silu::f", "ours", None, note="left out: wrong"), row("27b silu::f", "torch", "peer", None),
    ]  # fmt: skip
    (first, its), (second, others) = lines(rows)
    assert " ".join(first.split()) == (
        "27b norm::f 1 x 5120 3.00 us move 2.00 empty 0.50 x1.50 spread 1.0% error 1.6e-03 torch 4.00"
    )
    assert " ".join(second.split()) == "27b silu::f 1 x 5120 left out: wrong"
    assert [*its, *others] == rows


def test_options_keep_what_is_wanted_apart_from_where_the_record_goes():
    options = read_options(["norm::", "--record", "here.md", "--no-peers", "--counts", "1,8"])
    assert (options.wanted, options.has_peers, options.record.name) == (("norm::",), False, "here.md")
    assert options.command == "python -m kernel_muster.bench.families.common 'norm::' --counts 1,8 --no-peers"
    request = options.request()
    assert (request.rows, request.peers, request.only) == ((1, 8), False, ("norm::",))
    assert [inputs.sizes_of(manifest).hidden for manifest in request.models] == [2048, 5120]
    assert read_options([]).request().only == ()


def test_modules_are_those_of_the_workloads(kernels):
    measured = {work.key.partition("::")[0] for model in MODELS for work in all_of(model, 2)}
    assert measured == MODULES


def test_measuring_without_a_gpu_or_with_nonsense_says_so(monkeypatch, capsys):
    def refuse(*given, **more):
        raise BootRefused("REFUSED: no device", None)

    monkeypatch.setattr("kernel_muster.api.open_registry", refuse)
    assert main([]) == 1
    assert "a measurement needs a GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        read_options(["--counts", "1,many"])
    assert ended.value.code == 2


@pytest.mark.parametrize("place", ["/nowhere/record.md", "."])
def test_record_that_cannot_be_written_is_said_before_anything_is_measured(monkeypatch, capsys, place):
    monkeypatch.setattr("kernel_muster.api.open_registry", lambda *given, **more: pytest.fail("it began"))
    assert main(["--record", place]) == 2
    assert f"--record {place}: no file can be written there" in capsys.readouterr().err
