"""Modules: what they compute, which kernels their rows take, and what torch does with them."""

import copy
import io
from collections import Counter
from types import SimpleNamespace

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.models.layers import linear as layers
from kernel_muster.models.layers.families import batch_tiers, exact_tiers
from kernel_muster.models.layers.tiles import may_take_wide, tile_kernels
from kernel_muster.models.weights.layout import WeightPlanner
from kernel_muster.models.weights.source import PlanOnly, WeightSpec
from kernel_muster.registry.contract import nvfp4
from kernel_muster.registry.contract.layouts import LayoutPlan

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
from kernel_muster.torch import GatedRMSNorm, Kernels, Nvfp4Linear, RMSNorm, SwiGLU, bind  # noqa: E402
from kernel_muster.torch.modules.layer_ops import nvfp4_gate_up, nvfp4_linear  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.library import opcheck  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # warnings of torch's compiler
N, K = 48, 64
ROWS = (0, 1, 2, 3, 4, 9, 16, 17, 33, 70)


@pytest.fixture(autouse=True)
def _no_gradient():
    with torch.inference_mode(False), torch.no_grad():
        yield


def logical(rows=N, columns=K, seed=1):
    return nvfp4.quantize(np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32))


def values(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def close(got, exact):
    return torch.allclose(
        got.double(), exact, rtol=2**-7, atol=2**-6 * float(exact.abs().max() if exact.numel() else 1)
    )


@pytest.fixture
def linear(kernels):
    return Nvfp4Linear.of_weight(logical()).bind(kernels)


def exact_linear(x, weight):
    return x.double() @ torch.from_numpy(nvfp4.dequantize(weight)).T


# Nvfp4Linear


@pytest.mark.parametrize("rows", ROWS)
def test_linear_computes_the_projection_for_any_rows(linear, rows):
    x = values(rows, K)
    assert close(linear(x), exact_linear(x, logical()))
    prompt = values(2, rows, K)
    assert close(linear(prompt), exact_linear(prompt, logical()))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_rows_take_the_kernels_that_the_layer_of_models_takes(kernels, phase):
    lookups, shape = kernels.lookups.for_layer("theirs"), (N, K)
    ctx = SimpleNamespace(planner=WeightPlanner(LayoutPlan(), PlanOnly()), levers=lookups.levers)
    tiers = {**exact_tiers(lookups), **batch_tiers(lookups, has_wide=may_take_wide(lookups, [shape]))}
    spec = WeightSpec("w", shape, "nvfp4")
    theirs = layers.Nvfp4Linear(ctx, spec, tiers, tile_kernels(lookups, [shape]), value=logical())
    ours = Nvfp4Linear.of_weight(logical()).bind(kernels)
    for rows in ROWS[1:]:
        taken = Counter()
        ours.plan.launch = lambda handle, *rest, taken=taken: taken.update([str(handle.key)])
        x = np.zeros((rows, K), np.float32).astype("bfloat16")
        theirs.used.clear()
        theirs.forward(x, np.zeros((rows, N), np.float32).astype("bfloat16"), phase)
        ours(values(rows, K) if phase == "decode" else values(1, rows, K))
        handles = {f"gemv{most}": handle for most, handle in theirs.tiers.items()} | dict(theirs.tiles)
        assert taken == Counter({str(handles[arm].key): n for arm, n in theirs.used.items()}), rows


def test_compiled_linear_serves_any_rows_from_one_graph(linear):
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear, fullgraph=True, backend=counted, dynamic=True)
    for rows in (5, 18, 70):
        x = values(2, rows, K)
        assert torch.equal(compiled(x), linear(x))
    assert counted.frame_count == 1


def test_operators_of_modules_pass_opcheck(linear, kernels):
    swiglu = made_swiglu().bind(kernels)
    gate, up = swiglu.gate_proj, swiglu.up_proj
    opcheck(nvfp4_linear, (values(5, K), linear.copies, linear.forms, linear.plan.token, "decode"))
    opcheck(nvfp4_gate_up, (values(5, K), gate.copies, gate.forms, up.copies, up.forms, swiglu.plan.token, "decode"))


def test_bias_is_added(kernels):
    bias = values(N, seed=5)
    linear = Nvfp4Linear.of_weight(logical(), bias).bind(kernels)
    x = values(3, K)
    assert close(linear(x), exact_linear(x, logical()) + bias.double())


def test_linear_of_torch_is_quantised_as_the_registry_quantises(kernels):
    plain = torch.nn.Linear(K, N, bias=True).to(torch.bfloat16)
    linear = Nvfp4Linear.of_module(plain)
    expected = nvfp4.quantize(plain.weight.detach().float().numpy())
    assert np.array_equal(linear.weight_packed.numpy(), expected.packed)
    assert np.array_equal(linear.weight_scale.view(torch.uint8).numpy(), expected.block_scale)
    assert torch.equal(linear.bias, plain.bias)


def compressed_tensors_module(weight):
    """A module as compressed-tensors stores it, whose global scale divides."""
    module = torch.nn.Module()
    module.weight_packed = torch.nn.Parameter(torch.from_numpy(weight.packed), requires_grad=False)
    scale = torch.from_numpy(weight.block_scale).view(torch.float8_e4m3fn)
    module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    encode = torch.tensor([1 / float(weight.global_scale_decode)], dtype=torch.float32)
    module.weight_global_scale = torch.nn.Parameter(encode, requires_grad=False)
    return module


def modelopt_module(weight):
    """A module as ModelOpt exports it, whose second scale multiplies."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.from_numpy(weight.packed), requires_grad=False)
    module.weight_scale = torch.nn.Parameter(
        torch.from_numpy(weight.block_scale).view(torch.float8_e4m3fn), requires_grad=False
    )
    module.register_buffer("weight_scale_2", torch.tensor(float(weight.global_scale_decode)))
    return module


@pytest.mark.parametrize("make", [compressed_tensors_module, modelopt_module])
def test_module_of_another_library_is_taken_with_its_bytes(kernels, make):
    theirs = make(logical())
    linear = Nvfp4Linear.of_module(theirs).bind(kernels)
    assert linear.weight_packed.data_ptr() == next(theirs.parameters()).data_ptr()
    x = values(4, K)
    assert close(linear(x), exact_linear(x, logical()))


@pytest.mark.parametrize("make", [compressed_tensors_module, modelopt_module])
def test_state_dict_of_another_library_loads_and_changes_the_result(linear, make):
    other = logical(seed=9)
    linear.load_state_dict(make(other).state_dict())
    x = values(4, K)
    assert close(linear(x), exact_linear(x, other))


def test_module_of_compressed_tensors_itself_is_taken(kernels):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False).to(torch.bfloat16))
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme})
    quantization.apply_quantization_config(model, config)
    module = model[0]
    dense = module.weight.data.float()
    encode = utils.generate_gparam(dense.min(), dense.max())
    groups = dense.reshape(N, -1, 16)
    scale, _ = utils.calculate_qparams(
        groups.amin(-1), groups.amax(-1), module.quantization_scheme.weights, global_scale=encode
    )
    module.weight_global_scale.data.copy_(encode)
    module.weight_scale.data.copy_(scale)
    compressors.ModelCompressor.from_pretrained_model(model).compress_model(model)
    linear = Nvfp4Linear.of_module(module).bind(kernels)
    x = values(4, K)
    exact = x.double() @ dense.double().T
    assert float((linear(x).double() - exact).norm() / exact.norm()) < 0.15  # the error of FP4


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "has nothing, expected weight_packed"),
        ({"weight_scale": None}, "expected NVFP4: uint8"),
        ({"weight_packed": None}, r"weight_scale has shape \(48, 3\)"),
        ({"weight_scale_2": None}, "has no global scale"),
        ({"infinite": None}, "expected a finite scale"),
    ],
)
def test_tensors_that_are_not_nvfp4_are_refused(state, message):
    module = compressed_tensors_module(logical())
    whole = {name: value.detach() for name, value in module.state_dict().items()}
    if "weight_scale" in state:
        whole["weight_packed"] = whole["weight_packed"].float()
    elif "weight_packed" in state:
        whole["weight_scale"] = whole["weight_scale"][:, :3]
    elif "weight_scale_2" in state:
        del whole["weight_global_scale"]
    elif "infinite" in state:
        whole["weight_global_scale"] = torch.zeros(1)
    else:
        whole = {}
    with pytest.raises(km.ContractError, match=message):
        Nvfp4Linear(whole)


def test_state_dict_is_the_logical_weight_and_round_trips(linear, kernels):
    state = linear.state_dict()
    assert list(state) == ["weight_packed", "weight_scale", "weight_scale_2"]
    other = Nvfp4Linear.of_weight(logical(seed=9)).bind(kernels)
    other.load_state_dict(state)
    x = values(4, K)
    assert torch.equal(other(x), linear(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_to_another_dtype_leaves_the_weight_as_it_is(linear, dtype):
    x = values(4, K)
    before = linear(x)
    linear.to(dtype)
    assert (linear.weight_packed.dtype, linear.weight_scale.dtype) == (torch.uint8, torch.float8_e4m3fn)
    assert linear.weight_scale_2.dtype == torch.float32
    assert torch.equal(linear(x), before)


def test_module_away_from_its_kernels_refuses_and_comes_back(linear):
    x = values(4, K)
    before, state = linear(x), linear.state_dict()
    linear.to("meta")
    with pytest.raises(km.UsageError, match="its weight lies on meta, its kernels launch on cpu: move"):
        linear(x)
    linear.to_empty(device="cpu")
    linear.load_state_dict(state)
    assert torch.equal(linear(x), before)


def test_copy_computes_the_same_and_is_its_own(linear):
    x = values(4, K)
    before = linear(x)
    twin = copy.deepcopy(linear)
    assert {one.data_ptr() for one in twin.buffers()}.isdisjoint(one.data_ptr() for one in linear.buffers())
    assert torch.equal(twin(x), before)
    twin.load_state_dict(Nvfp4Linear.of_weight(logical(seed=9)).state_dict())
    assert not torch.equal(twin(x), before)
    assert torch.equal(linear(x), before)


def test_saved_module_is_loaded_without_kernels_and_bound_again(kernels):
    model = torch.nn.Sequential(Nvfp4Linear.of_weight(logical()), RMSNorm(torch.ones(N), 1e-6))
    bind(model, kernels)
    x = values(4, K)
    before, file = model(x), io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert len(file.getvalue()) < 3 * (N * K // 2 + N * K // 16) + 8000  # no copies
    with pytest.raises(km.UsageError, match=r"no kernels are bound: call kernel_muster.torch.bind"):
        loaded(x)
    assert bind(loaded, kernels) == ["0", "1"]
    assert torch.equal(loaded(x), before)


def test_released_module_computes_and_refuses_what_needs_its_weight(kernels):
    linear = Nvfp4Linear.of_weight(logical()).bind(kernels)
    x = values(4, K)
    before = linear(x)
    linear.release()
    assert torch.equal(linear(x), before)
    for refused in (linear.state_dict, linear.prepare, lambda: io.BytesIO(torch.save(linear, io.BytesIO()))):
        with pytest.raises(km.UsageError, match="its weight was released"):
            refused()
    assert torch.equal(copy.deepcopy(linear).to(torch.float16)(x), before)


def test_unbound_module_is_not_released():
    with pytest.raises(km.UsageError, match="has no copy of its weight yet"):
        Nvfp4Linear.of_weight(logical()).release()


def test_input_that_wants_a_gradient_is_refused(linear, kernels):
    norm = RMSNorm(torch.ones(K), 1e-6).bind(kernels)
    x = values(4, K).requires_grad_()
    with torch.enable_grad():
        for module in (linear, norm):
            with pytest.raises(km.UsageError, match="has no gradient"):
                module(x)


@pytest.mark.parametrize(("x", "message"), [(values(4, K - 1), "expected"), (values(4, K).float(), "has dtype")])
def test_input_that_does_not_fit_is_refused(linear, x, message):
    with pytest.raises(km.ContractError, match=message):
        linear(x)


def test_model_whose_kernel_is_absent_refuses_its_boot_and_names_the_module():
    levers = {"MUSTER_DISABLE": "w4a16_gemv::w4a16_gemv"}
    session = km.boot("qwen3.6-27b", target="cpu", levers=levers)
    boot = session.__enter__()
    km.build_model(boot.manifest, boot.kernels)
    bind(torch.nn.ModuleDict({"out": Nvfp4Linear.of_weight(logical())}), Kernels(boot.kernels))
    with pytest.raises(km.BootRefused) as refused:
        session.__exit__(None, None, None)
    (row,) = [one for one in refused.value.report.findings if one.subject == "w4a16_gemv::w4a16_gemv"]
    assert any(layer == "out" for layer in row.layers)


def test_binding_a_model_without_modules_of_ours_is_refused(kernels):
    with pytest.raises(km.UsageError, match=r"Linear has no module of kernel_muster.torch to bind"):
        bind(torch.nn.Linear(2, 2), kernels)


# norms


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_computes_the_contract(kernels, offset):
    weight, x = values(K, seed=4), values(2, 3, K)
    norm = RMSNorm(weight, 1e-6, offset).bind(kernels)
    exact = torch.nn.functional.rms_norm(x.double(), (K,), weight.double() + offset, 1e-6)
    assert torch.allclose(norm(x).double(), exact, rtol=2**-7)
    assert torch.equal(copy.deepcopy(norm)(x), norm(x))
    assert torch.equal(torch.compile(norm, fullgraph=True, backend="aot_eager")(x), norm(x))


def test_gated_norm_computes_the_contract(kernels):
    weight, x, gate = values(K, seed=4), values(2, 3, K), values(2, 3, K, seed=6)
    norm = GatedRMSNorm(weight, 1e-6).bind(kernels)
    exact = torch.nn.functional.rms_norm(x.double(), (K,), weight.double(), 1e-6)
    assert torch.allclose(norm(x, gate).double(), exact * torch.nn.functional.silu(gate.double()), rtol=2**-6)


def test_norms_of_transformers_are_taken_where_they_mean_the_same(kernels):
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    x, gate = values(2, 3, K), values(2, 3, K, seed=6)
    plain = theirs.Qwen3_5RMSNorm(K).to(torch.bfloat16)
    plain.weight.data.copy_(values(K, seed=4))
    ours = RMSNorm.of_module(plain, weight_offset=1.0).bind(kernels)
    assert torch.allclose(ours(x).double(), plain(x).double(), rtol=2**-7)
    gated = theirs.Qwen3_5RMSNormGated(K).to(torch.bfloat16)
    both = GatedRMSNorm.of_module(gated).bind(kernels)(x, gate), gated(x, gate)
    assert torch.allclose(both[0].double(), both[1].double(), rtol=2**-6, atol=2**-8)


def test_norm_without_a_weight_is_refused():
    with pytest.raises(km.UsageError, match=r"has no weight \(H,\) or no epsilon"):
        RMSNorm.of_module(torch.nn.LayerNorm(4, elementwise_affine=False))


# SwiGLU


def made_swiglu():
    gate, up = (Nvfp4Linear.of_weight(logical(N, K, seed)) for seed in (11, 12))
    return SwiGLU(gate, up, Nvfp4Linear.of_weight(logical(K, N, 13)))


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_computes_the_layer_for_any_rows(kernels, rows):
    swiglu = made_swiglu().bind(kernels)
    for x in (values(rows, K), values(2, rows, K)):
        gate, up = exact_linear(x, logical(N, K, 11)), exact_linear(x, logical(N, K, 12))
        exact = exact_linear(torch.nn.functional.silu(gate) * up, logical(K, N, 13))
        assert close(swiglu(x), exact)


def test_swiglu_takes_one_launch_for_gate_up_and_activation_of_few_rows(kernels):
    swiglu = made_swiglu().bind(kernels)
    taken = []
    swiglu.plan.launch = lambda handle, *rest: taken.append(handle.key.func)
    for rows in (1, 2, 3, 8):
        swiglu(values(rows, K))
    assert taken == [
        "w4a16_gemv_dual_silu", "w4a16_gemv_dual_silu_batch2", "w4a16_gemv_dual_silu_batch3",
        "w4a16_gemv_dual_silu_batch8",
    ]  # fmt: skip


def test_swiglu_of_transformers_is_taken_compiled_copied_and_saved(kernels):
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = SimpleNamespace(hidden_size=K, hidden_act="silu")
    mlp = theirs.Qwen3_5MLP(config, N).to(torch.bfloat16)
    swiglu = SwiGLU.of_module(mlp)
    bind(swiglu, kernels)
    x = values(1, 5, K)
    result, plain = swiglu(x), mlp(x)
    assert (
        float((result.double() - plain.double()).norm() / plain.double().norm()) < 0.3
    )  # the error of FP4, three times
    assert torch.equal(torch.compile(swiglu, fullgraph=True, backend="aot_eager")(x), result)
    assert torch.equal(copy.deepcopy(swiglu)(x), result)
    file = io.BytesIO()
    torch.save(swiglu, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with pytest.raises(km.UsageError, match="no kernels are bound"):
        loaded(x)
    bind(loaded, kernels)
    assert torch.equal(loaded(x), result)


def test_swiglu_with_another_activation_is_refused():
    module = torch.nn.Module()
    for part in ("gate_proj", "up_proj", "down_proj"):
        setattr(module, part, torch.nn.Linear(16, 16, bias=False))
    module.act_fn = torch.nn.GELU()
    with pytest.raises(km.UsageError, match="the activation is GELU, expected SiLU"):
        SwiGLU.of_module(module)


def test_swiglu_whose_sizes_do_not_belong_together_is_refused():
    gate, up = (Nvfp4Linear.of_weight(logical(N, K)) for _ in range(2))
    with pytest.raises(km.UsageError, match=r"must be \(I, H\), \(I, H\) and \(H, I\)"):
        SwiGLU(gate, up, Nvfp4Linear.of_weight(logical(N, K)))
