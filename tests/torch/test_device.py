"""Operators on a GPU: results, torch's current stream, captured graphs, compiled functions, and no synchronisation."""

import kernel_muster as km
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
from kernel_muster.torch.arrays import host_array  # noqa: E402
from torch.library import opcheck  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # warnings of torch
_SLEEP_CYCLES = 400_000_000  # about 0.2 s


@pytest.fixture
def device_kernel(contract_name, device_kernels, key_of):
    """The kernel of a contract on this device; skipped where nothing serves it here, with the reason."""
    key = key_of(device_kernels, contract_name)
    if key is None:
        pytest.skip("its keys are open, and nobody provides them")
    found = device_kernels.try_kernel(*key)
    if not found:
        pytest.skip(found.handle.reason)
    state = device_kernels.lookups._live.runner.state(found.handle._spec)
    if state.failure is not None and state.failure.code.startswith("TOOLCHAIN"):
        pytest.skip(state.failure.why)
    return found


def outputs_of(kernel, given):
    torch.cuda.synchronize()
    params = kernel.handle.contract.signature.outputs
    return {param.name: host_array(given[param.name].cpu()) for param in params if given[param.name] is not None}


def copies(given):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def test_operator_of_every_contract_agrees_with_the_reference(device_kernel, arguments_of):
    case, arrays, given = arguments_of(device_kernel)
    contract = device_kernel.handle.contract
    expected, problems = contract.expected(case, arrays)
    assert problems == []
    device_kernel(**given)
    for name, got in outputs_of(device_kernel, given).items():
        bound = contract.tolerance_of(name, case)
        wrong = np.abs(got.astype("f8") - expected[name].astype("f8")) > bound.absolute + bound.relative * np.abs(
            expected[name].astype("f8")
        )
        assert not wrong.any(), name


def test_operator_of_every_contract_passes_opcheck(device_kernel, arguments_of, flat):
    _, _, given = arguments_of(device_kernel)
    done = opcheck(device_kernel.op, tuple(flat(device_kernel, given)), {"served_by": device_kernel.token})
    assert set(done.values()) == {"SUCCESS"}


def test_graph_of_every_contract_replays_what_the_operator_does(device_kernel, arguments_of):
    _, _, first = arguments_of(device_kernel)
    second, kept = copies(first), copies(first)
    device_kernel(**first)
    expected = outputs_of(device_kernel, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device_kernel(**second)
    for _ in range(2):  # counters are zero again, and nobody else got the scratch
        for name, value in kept.items():
            if isinstance(value, torch.Tensor):
                second[name].copy_(value)
        torch.empty(1 << 24, dtype=torch.uint8, device="cuda").fill_(255)
        graph.replay()
        for name, got in outputs_of(device_kernel, second).items():
            if device_kernel.handle.spec.deterministic:
                assert got.tobytes() == expected[name].tobytes(), name
            else:
                assert np.allclose(got.astype("f8"), expected[name].astype("f8"), rtol=2**-6, atol=2**-6), name


def norm_arguments(rows=4, columns=256):
    x = torch.randn(rows, columns, device="cuda").to(torch.bfloat16)
    return x, torch.ones(columns, dtype=torch.bfloat16, device="cuda"), 1e-6, 0.0, torch.empty_like(x)


def expected_norm(x):
    return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], None, 1e-6)


def test_call_returns_before_the_stream_reaches_it_and_allocates_nothing_it_keeps(device_kernels):
    kernel = device_kernels.kernel("norm", "rms_norm")
    given = norm_arguments()
    kernel(*given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(_SLEEP_CYCLES)
        kernel(*given)
        ended = torch.cuda.Event()
        ended.record()
        assert not ended.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_launch_follows_torchs_current_stream(device_kernels):
    kernel = device_kernels.kernel("norm", "rms_norm")
    x, weight, eps, offset, out = norm_arguments()
    late = torch.randn_like(x)
    kernel(x, weight, eps, offset, out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(_SLEEP_CYCLES)
        x.copy_(late)  # only a launch behind it, on the same stream, sees this
        kernel(x, weight, eps, offset, out)
    side.synchronize()
    assert torch.allclose(out.double(), expected_norm(late), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_function_computes_what_the_operators_do(device_kernels, mode):
    from kernel_muster.registry.contract import nvfp4

    norm, gemv = device_kernels.kernel("norm", "rms_norm"), device_kernels.kernel("w4a16_gemv", "w4a16_gemv_batch4")
    logical = nvfp4.quantize(np.random.default_rng(1).standard_normal((512, 256)).astype(np.float32))
    tensors = [torch.from_numpy(one).cuda() for one in (logical.packed, logical.block_scale)]
    weight = gemv.weight(nvfp4.Nvfp4Weight(*tensors, logical.global_scale_decode))

    def layer(x, scale):
        normed, out = torch.empty_like(x), x.new_empty(x.shape[0], 512)
        norm(x * 2, scale, 1e-6, 0.0, normed)
        gemv(normed, weight, out)
        return out + 1

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    x, scale, *_ = norm_arguments()
    for _ in range(4):
        x = torch.randn_like(x)
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x, scale).clone(), layer(x, scale))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.cpu(), "x lies in host memory, expected cuda:0"),
        (lambda x: x.half(), "x has dtype float16, expected bf16"),
        (lambda x: x.t().contiguous().t(), "expected a contiguous last axis"),
        (lambda x: torch.cat([x.flatten(), x.flatten()])[1 : 1 + x.numel()].view(x.shape), "multiple of 16 bytes"),
    ],
    ids=["device", "dtype", "strides", "alignment"],
)
def test_tensor_that_does_not_fit_raises_what_the_contract_raises(device_kernels, change, message):
    kernel = device_kernels.kernel("norm", "rms_norm")
    x, *others = norm_arguments()
    with pytest.raises(km.ContractError, match=message):
        kernel(change(x), *others)


def test_same_addresses_are_launched_again_with_what_they_hold_then(device_kernels):
    from kernel_muster.torch.launching import _LAUNCHES

    kernel = device_kernels.kernel("norm", "rms_norm")
    x, weight, eps, offset, out = norm_arguments()
    kernel(x, weight, eps, offset, out)
    before = len(_LAUNCHES)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        kernel(x, weight, eps, offset, out)
        assert torch.allclose(out.double(), expected_norm(x), rtol=2**-7, atol=2**-7)
    assert len(_LAUNCHES) == before


def test_kept_launch_of_a_refused_boot_launches_nothing(tmp_path):
    from kernel_muster.torch import Kernels

    path = tmp_path / "MODEL.toml"
    path.write_text('[model]\nname = "tiny"\nquant = "nvfp4"\n', encoding="utf-8")
    session = km.boot(manifest=path, target="cuda", levers={})
    kernels = Kernels(session.__enter__().kernels)
    kernel, given = kernels.kernel("norm", "rms_norm"), norm_arguments()
    kernel(*given)
    kernels.try_kernel("acme", "absent")
    with pytest.raises(km.BootRefused):
        session.__exit__(None, None, None)
    with pytest.raises(km.NullKernelError):
        kernel(*given)
    kernels.close()


# modules


def logical(rows, columns, seed):
    from kernel_muster.registry.contract import nvfp4

    return nvfp4.quantize(np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32))


def exact_linear(x, weight):
    from kernel_muster.registry.contract import nvfp4

    return x.double() @ torch.from_numpy(nvfp4.dequantize(weight)).cuda().T


def made_swiglu(intermediate=1024, hidden=512):
    from kernel_muster.torch import Nvfp4Linear, SwiGLU

    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    weights = [logical(*size, seed) for seed, size in enumerate(sizes)]
    return SwiGLU(*map(Nvfp4Linear.of_weight, weights)).cuda(), weights


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 17, 32, 40, 128, 300])
@torch.inference_mode()
def test_modules_compute_the_layer_for_any_rows_and_are_captured(device_kernels, rows):
    swiglu, weights = made_swiglu()
    swiglu.bind(device_kernels)
    for x in (torch.randn(rows, 512, device="cuda").bfloat16(), torch.randn(1, rows, 512, device="cuda").bfloat16()):
        gate, up = (exact_linear(x, weight) for weight in weights[:2])
        exact = exact_linear(torch.nn.functional.silu(gate) * up, weights[2])
        result = swiglu(x)
        assert torch.allclose(result.double(), exact, rtol=2**-6, atol=2**-6 * float(exact.abs().max()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = swiglu(x)
        captured.zero_()
        for _ in range(2):
            graph.replay()
        assert torch.equal(captured, result)


@torch.inference_mode()
def test_released_module_keeps_less_memory_and_its_results(device_kernels):
    swiglu, _ = made_swiglu(4096, 4096)
    swiglu.bind(device_kernels)
    x = torch.randn(2, 4096, device="cuda").bfloat16()
    before, memory = swiglu(x), torch.cuda.memory_allocated()
    for part in (swiglu.gate_proj, swiglu.up_proj, swiglu.down_proj):
        part.release()
    assert torch.cuda.memory_allocated() <= memory - 3 * 4096 * 4096 // 2
    assert torch.equal(swiglu(x), before)


@torch.inference_mode()
def test_module_moved_to_the_host_refuses_and_comes_back(device_kernels):
    swiglu, _ = made_swiglu()
    swiglu.bind(device_kernels)
    x = torch.randn(2, 512, device="cuda").bfloat16()
    before = swiglu(x)
    swiglu.cpu()
    with pytest.raises(km.UsageError, match="its weight lies on cpu, its kernels launch on cuda:0"):
        swiglu(x)
    assert torch.equal(swiglu.cuda()(x), before)


@torch.inference_mode()
def test_compiled_modules_compute_what_the_modules_do_without_copying_weights(device_kernels):
    from kernel_muster.torch import RMSNorm

    swiglu, _ = made_swiglu()
    norm = RMSNorm(torch.ones(512, device="cuda"), 1e-6)
    swiglu.bind(device_kernels)
    norm.bind(device_kernels)
    model = torch.nn.Sequential(norm, swiglu)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        x = torch.randn(2, 512, device="cuda").bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x).clone(), model(x))
