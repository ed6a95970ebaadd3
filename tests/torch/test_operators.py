"""Every contract as an operator: its schema, its fake implementation, its results, and what it refuses."""

import kernel_muster as km
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
from kernel_muster.torch import Kernels  # noqa: E402
from kernel_muster.torch.arrays import host_array, tensor_of  # noqa: E402
from kernel_muster.torch.schema import schema_of  # noqa: E402
from torch.library import opcheck  # noqa: E402

pytestmark = pytest.mark.torch
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ROWS, WIDTH = 3, 64


@pytest.fixture
def rms_norm(kernels):
    return kernels.kernel("norm", "rms_norm")


def norm_arguments():
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return x, torch.ones(WIDTH, dtype=torch.bfloat16), 1e-6, 0.0, torch.empty_like(x)


def expected_norm(x):
    return torch.nn.functional.rms_norm(x.double(), (WIDTH,), None, 1e-6)


def test_operator_of_every_contract_passes_opcheck(contract_name, kernels, key_of, arguments_of, flat):
    key = key_of(kernels, contract_name)
    if key is None:  # open to others, and nobody provides it
        with pytest.raises(km.UsageError, match="no kernel of this contract was looked up"):
            kernels.operators[contract_name](torch.zeros(1, 1), [torch.zeros(1)], "", torch.zeros(1, 1))
        return
    kernel = kernels.kernel(*key)
    _, _, given = arguments_of(kernel)
    done = opcheck(kernel.op, tuple(flat(kernel, given)), {"served_by": kernel.token})
    assert done == dict.fromkeys(CHECKS, "SUCCESS")


def test_operator_of_every_contract_gives_the_bits_of_its_handle(contract_name, kernels, key_of, arguments_of):
    key = key_of(kernels, contract_name)
    if key is None:
        return
    kernel = kernels.kernel(*key)
    _, arrays, given = arguments_of(kernel)
    theirs = {name: kernel.handle.prepare_weight(a) if hasattr(a, "layout") else a for name, a in arrays.items()}
    kernel.handle(**theirs)
    kernel(**given)
    for output in kernel.handle.contract.signature.outputs:
        got = host_array(given[output.name])
        assert got.dtype == theirs[output.name].dtype
        assert got.tobytes() == theirs[output.name].tobytes(), output.name


def test_schema_declares_what_is_written_and_nothing_else(contract_name, kernels):
    contract = kernels.lookups.catalog.contracts[contract_name]
    declared = kernels.operators[contract_name]._schema
    written = {one.name for one in declared.arguments if one.alias_info is not None and one.alias_info.is_write}
    assert written == {param.name for param in contract.signature.outputs}
    assert len(declared.returns) == 0


def test_schema_of_a_contract_names_every_kind_of_parameter():
    params = (
        km.TensorParam("x", "bf16", ("M", "K")),
        km.WeightParam("w", "nvfp4", ("N", "K")),
        km.TensorParam("bias", "f32", ("N",), optional=True),
        km.ScalarParam("top_k", "i32"),
        km.ScalarParam("eps", "f32"),
        km.ScalarParam("causal", "bool"),
        km.TensorParam("state", "f32", ("N",), role="inout"),
        km.TensorParam("out", "bf16", ("M", "N"), role="out"),
    )
    assert schema_of(contract_of("mine", params)) == (
        "mine(Tensor x, Tensor[] w, str w_form, Tensor? bias, int top_k, float eps, bool causal, Tensor(a!) state, "
        'Tensor(b!) out, *, str served_by="") -> ()'
    )


def contract_of(name, params, reference=lambda arguments, dims: {}):
    cases = (km.Case("one", {"M": 2}),)
    return km.Contract(name, "a test", km.Signature(params), reference, cases, km.Tolerance(0, 0, "exact"))


@pytest.mark.parametrize("name", ["kernel", "self", "served_by", "in", "größe", "a b"])
def test_contract_whose_names_no_schema_holds_is_refused(name):
    out = km.TensorParam(name, "f32", ("M",), role="out")
    with pytest.raises(km.UsageError, match="cannot stand in a schema"):
        schema_of(contract_of("mine", (out,)))


def test_contract_with_a_parameter_named_like_a_form_is_refused():
    params = (
        km.WeightParam("w", "bf16", ("N", "K")),
        km.TensorParam("w_form", "f32", ("N",)),
        km.TensorParam("out", "f32", ("N",), role="out"),
    )
    with pytest.raises(km.UsageError, match="two parameters of its operator are called 'w_form'"):
        schema_of(contract_of("mine", params))


class _Others:
    """A plugin with one contract that can be an operator, and one that cannot."""

    @km.hookimpl
    def muster_contracts(self):
        params = (km.TensorParam("x", "f32", ("M",)), km.TensorParam("out", "f32", ("M",), role="out"))
        yield contract_of("torch-test.dashed", params, lambda arguments, dims: {"out": arguments["x"].astype("f8")})

    @km.hookimpl
    def muster_kernels(self):
        backend = km.PythonKernel(copied)
        yield km.KernelSpec(key="others::copied", contract="torch-test.dashed", archs=("cpu",), backend=backend)


def copied(x, out):
    out[...] = x


def test_contract_that_can_be_no_operator_is_left_out_with_the_reason():
    with Kernels(km.open_registry("cpu", levers={}, local_plugins={"others": _Others()})) as opened:
        assert list(opened.left_out) == ["torch-test.dashed"]
        with pytest.raises(km.UsageError, match=r"'torch-test.dashed' cannot stand in a schema of torch"):
            opened.kernel("others", "copied")
        assert opened.kernel("norm", "rms_norm")


def test_operator_writes_into_the_tensors_that_it_is_given(rms_norm):
    wide = torch.full((ROWS, 2 * WIDTH), 7.0, dtype=torch.bfloat16)
    x, weight, eps, offset, _ = norm_arguments()
    out = wide[:, :WIDTH]
    rms_norm(x, weight, eps, offset, out)
    assert torch.allclose(out.double(), expected_norm(x), rtol=2**-8)
    assert bool((wide[:, WIDTH:] == 7).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.float(), "x has dtype float32, expected bf16"),
        (lambda x: x.to(torch.float8_e5m2), "x has dtype torch.float8_e5m2, expected an array of bf16"),
        (lambda x: x[:, :-1], r"weight has shape \(64,\), expected \(H,\) = \(63,\)"),
        (lambda x: x[0], r"x has shape \(64,\), expected \(M, H\)"),
        (lambda x: x.t().contiguous().t(), "x has strides .*, expected a contiguous last axis"),
        (lambda x: x.to("meta"), "x lies on meta"),
    ],
    ids=["dtype", "unknown_dtype", "size", "axes", "strides", "device"],
)
def test_tensor_that_does_not_fit_raises_what_the_contract_raises(rms_norm, change, message):
    x, *others = norm_arguments()
    with pytest.raises(km.ContractError, match=message):
        rms_norm(change(x), *others)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:  # as while a compiler traces
        faked = [mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in (x, *others)]
        changed = change(faked[0])
        with pytest.raises(km.ContractError, match=message):
            rms_norm(changed, *faked[1:])


def test_scalar_below_its_minimum_raises_what_the_contract_raises(rms_norm):
    x, weight, _, offset, out = norm_arguments()
    with pytest.raises(km.ContractError, match=r"eps is -1.0, expected at least 0"):
        rms_norm(x, weight, -1.0, offset, out)


def test_weight_in_the_layout_of_another_kernel_raises_what_the_contract_raises(kernels):
    row_major, transposed = kernels.kernel("w4a16", "w4a16_gemm"), kernels.kernel("w4a16", "w4a16_gemm_t")
    weight = transposed.weight(logical_weight())
    x, out = torch.ones(2, 32, dtype=torch.bfloat16), torch.empty(2, 16, dtype=torch.bfloat16)
    with pytest.raises(km.ContractError, match="weight layout nvfp4_transposed, expected nvfp4_row_major"):
        row_major(x, weight, out)


def logical_weight(rows=16, columns=32):
    from kernel_muster.registry.contract import nvfp4

    return nvfp4.quantize(np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32))


def test_compiled_function_computes_what_the_operator_does(rms_norm, kernels):
    gemm = kernels.kernel("w4a16", "w4a16_gemm")
    weight = gemm.weight(logical_weight(16, WIDTH))

    def layer(x, scale):
        normed = torch.empty_like(x)
        rms_norm(x * 2, scale, 1e-6, 0.0, normed)
        out = x.new_empty(x.shape[0], 16)
        gemm(normed, weight, out)
        return out + 1

    _, scale, *_ = norm_arguments()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 3, 5):
        part = torch.randn(rows, WIDTH).to(torch.bfloat16)
        assert torch.equal(compiled(part, scale), layer(part, scale))


def test_compiled_function_whose_sizes_do_not_fit_raises_what_the_contract_raises(rms_norm):
    def layer(x, scale):
        out = torch.empty_like(x)
        rms_norm(x, scale, 1e-6, 0.0, out)
        return out

    x, scale, *_ = norm_arguments()
    with pytest.raises(Exception, match=r"weight has shape \(63,\), expected \(H,\)"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, scale[:-1])


def test_operator_tells_autograd_what_it_wrote(rms_norm):
    x, weight, eps, offset, out = norm_arguments()
    before = out._version
    rms_norm(x, weight, eps, offset, out)
    assert out._version == before + 1
    with torch.inference_mode():
        rms_norm(x, weight, eps, offset, torch.empty_like(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int32", "uint8", "uint32", "bool"])
def test_tensor_and_array_share_their_memory(dtype):
    tensor = torch.ones(2, 4).to(getattr(torch, dtype))
    array = host_array(tensor)
    assert array.dtype.name.removesuffix("_") == dtype
    back = tensor_of(array)
    assert back.dtype == tensor.dtype
    assert back.data_ptr() == tensor.data_ptr()
    assert array.__array_interface__["data"][0] == tensor.data_ptr()


def test_read_only_array_becomes_no_tensor():
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    with pytest.raises(km.UsageError, match="read-only"):
        tensor_of(array)
