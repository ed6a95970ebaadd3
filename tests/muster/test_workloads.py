"""What the small kernels are measured on, against their contracts."""

from dataclasses import replace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.bench import floor, workloads
from kernel_muster.bench.common import Figure, main, read_options
from kernel_muster.bench.common_record import to_markdown
from kernel_muster.bench.small import MODULES
from kernel_muster.registry.backends.cuda_kernel import is_device_backend
from kernel_muster.registry.errors import BootRefused

MODELS = [replace(model, vocabulary=1000) for model in workloads.MODELS]


@pytest.fixture(scope="module")
def kernels():
    return km.open_registry("cpu", levers={}, local_plugins={floor.NAME: floor})


def all_of(model, rows):
    data = workloads.Data(np)
    more = (
        *(workloads.paged(data, model, rows, 100, form) for form in workloads.PAGED_FORMS),
        workloads.prefill(data, model, 20, 30),
        workloads.prefill(data, model, 20, 30, is_tiled=True),
        workloads.gdn_prefill(data, model, 9),
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
    # Forms that a measured one stands for: the same kernel with other arguments, or not part of a decode step.
    stood_for = {
        "causal_conv1d::causal_conv1d_update_prefill",
        "causal_conv1d::causal_conv1d_verify_n",
        "gated_delta_rule::gated_delta_rule_chunk2",
        "gated_delta_rule::gated_delta_rule_chunk3",
        "rope::rope_yarn",
    }
    assert offered - measured == stood_for


def test_record_has_a_row_for_every_figure_under_its_model(kernels):
    figures = [
        Figure("27b", "norm::rms_norm", "1 x 5120", 20480, 10240, 3.0, 0.01, 2.0, 0.5, "torch", 4.0),
        Figure("35b", "argmax::argmax_bf16", "1 x 9", 18, 4, 1.0, 0.002, 0.5, 0.5),
    ]
    text = to_markdown(figures, kernels.target, "the command")
    assert "- command: `the command`" in text
    first, second = text.split("## 27b")[1].split("## 35b")
    assert "| norm::rms_norm | 1 x 5120 | 3.00 | 1.0% | 2.00 | 1.50 | 0.50 | 4.00 (torch) |" in first
    assert "| argmax::argmax_bf16 | 1 x 9 | 1.00 | 0.2% | 0.50 | 2.00 | 0.50 | - |" in second


def test_options_keep_what_is_wanted_apart_from_where_the_record_goes():
    options = read_options(["norm::", "--record", "here.md", "--no-peers", "--counts", "1,8"])
    assert (options.wanted, options.has_peers, options.record.name) == (("norm::",), False, "here.md")
    assert options.command == "python -m kernel_muster.bench.common 'norm::' --counts 1,8 --no-peers"
    assert options.selects("35b norm::rms_norm 1 x 2048")
    assert not options.selects("35b silu::silu_mul 1 x 2048")
    assert options.counts == (1, 8)
    assert read_options([]).selects("everything")


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
