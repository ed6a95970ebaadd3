"""Which kernel an operator launches, for how long, and which weights it takes."""

import pickle
import subprocess
import sys

import kernel_muster as km
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
from kernel_muster.registry.contract import nvfp4  # noqa: E402
from kernel_muster.torch import Kernels, Weight  # noqa: E402
from kernel_muster.torch.weights import rebuilt, weight_of  # noqa: E402

pytestmark = pytest.mark.torch


def opened():
    return Kernels(km.open_registry("cpu", levers={}))


def silu(gate, up, served_by=None):
    out = torch.empty_like(gate)
    named = {} if served_by is None else {"served_by": served_by}
    torch.ops.muster.silu_mul(gate, up, out, **named)
    return out


GATE = torch.linspace(-2, 2, 32).reshape(2, 16).to(torch.bfloat16)
EXPECTED = torch.nn.functional.silu(GATE.double()) * GATE.double()


def test_operator_without_an_open_registry_names_the_call_that_opens_one():
    opened().close()
    with pytest.raises(km.UsageError, match=r"no registry is open: open one with kernel_muster.torch.Kernels"):
        silu(GATE, GATE)


def test_operator_of_a_contract_that_nobody_looked_up_asks_for_a_lookup():
    with opened() as kernels:
        kernels.kernel("norm", "rms_norm")
        with pytest.raises(km.UsageError, match="no kernel of this contract was looked up"):
            silu(GATE, GATE)


def test_operator_finds_the_only_kernel_of_its_contract_without_a_name():
    with opened() as kernels:
        kernel = kernels.kernel("silu", "silu_mul")
        for name in (None, "silu::silu_mul", kernel.token):
            assert torch.allclose(silu(GATE, GATE, name).double(), EXPECTED, rtol=2**-8)


def test_operator_that_two_kernels_serve_must_be_given_one():
    weight = nvfp4.quantize(np.ones((16, 32), np.float32))
    x, out = torch.ones(2, 32, dtype=torch.bfloat16), torch.empty(2, 16, dtype=torch.bfloat16)
    with opened() as kernels:
        first, second = kernels.kernel("w4a16", "w4a16_gemm_t"), kernels.kernel("w4a16", "w4a16_gemm_t_k64")
        prepared = first.weight(weight)
        with pytest.raises(km.UsageError, match=f"name one of {first.token}, {second.token}"):
            first.op(x, prepared.tensors, prepared.form, out)
        first.op(x, prepared.tensors, prepared.form, out, served_by="w4a16::w4a16_gemm_t_k64")
        assert bool((out == 32).all())


def test_two_registries_launch_their_own_kernels_and_end_alone():
    with opened() as first:
        kernel = first.kernel("silu", "silu_mul")
        with opened() as second:
            other = second.kernel("silu", "silu_mul")
            assert kernel.token != other.token
            with pytest.raises(km.UsageError, match="more than one may be meant"):
                silu(GATE, GATE, "silu::silu_mul")
        with pytest.raises(km.UsageError, match="the registry of any other is closed"):
            other(GATE, GATE, torch.empty_like(GATE))
        kernel(GATE, GATE, torch.empty_like(GATE))


def test_kernel_of_another_contract_is_refused():
    with opened() as kernels:
        norm = kernels.kernel("norm", "rms_norm")
        with pytest.raises(km.UsageError, match="keeps the contract 'rms_norm', expected 'silu_mul'"):
            silu(GATE, GATE, norm.token)


def test_closed_kernels_hand_out_nothing():
    kernels = opened()
    kernels.close()
    with pytest.raises(km.UsageError, match="are closed"):
        kernels.kernel("silu", "silu_mul")


def test_lookup_that_misses_is_falsy_and_refuses_to_launch():
    with opened() as kernels:
        missing = kernels.try_kernel("w4a4", "w4a4_gemm")
        assert not missing
        with pytest.raises(km.NullKernelError, match=r"w4a4_gemm was called, but its lookup at .*test_kernels.py"):
            missing(GATE)
        with pytest.raises(km.KernelMissing):
            kernels.kernel("w4a4", "w4a4_gemm")


def test_lookups_of_a_boot_are_audited_with_the_line_that_asked():
    session = km.boot("qwen3.6-27b", target="cpu", levers={})
    boot = session.__enter__()
    km.build_model(boot.manifest, boot.kernels)
    kernels = Kernels(boot.kernels)
    kept = kernels.kernel("silu", "silu_mul")
    kernels.try_kernel("acme", "decode")
    with pytest.raises(km.BootRefused) as refused:
        session.__exit__(None, None, None)
    assert "acme::decode" in str(refused.value)
    assert "test_kernels.py" in str(refused.value)
    with kernels, pytest.raises(km.NullKernelError):  # a boot that was refused launches nothing
        kept(GATE, GATE, torch.empty_like(GATE))


def test_kernel_of_an_architecture_without_a_device_is_looked_up_and_not_launched():
    with Kernels(km.open_registry("sm_90a", levers={})) as kernels:
        kernel = kernels.kernel("silu", "silu_mul")
        assert kernel.handle.spec.archs == ("sm_80+",)
        with pytest.raises(km.MusterError, match="no device to launch on"):
            kernel(GATE, GATE, torch.empty_like(GATE))
        with pytest.raises(km.UsageError, match="has no device"):
            kernels.device  # noqa: B018  (a property)


def test_kernel_is_not_pickled():
    with opened() as kernels, pytest.raises(TypeError, match="look it up where it is loaded"):
        pickle.dumps(kernels.kernel("silu", "silu_mul"))


def test_kernels_take_lookups_and_nothing_else():
    with pytest.raises(km.UsageError, match=r"pass km.open_registry"):
        Kernels("cpu")


def test_weight_shares_its_memory_and_is_rebuilt_as_it_was():
    packed = torch.zeros(4, 8, dtype=torch.uint8)
    scales = torch.full((4, 1), 0x38, dtype=torch.uint8)
    logical = nvfp4.Nvfp4Weight(packed, scales, np.asarray(0.5, np.float32))
    with opened() as kernels:
        weight = kernels.kernel("w4a16", "w4a16_gemm").weight(logical)
    assert [one.data_ptr() for one in weight.tensors] == [packed.data_ptr(), scales.data_ptr()]
    assert (weight.layout, weight.shape) == (nvfp4.ROW_MAJOR, (4, 16))
    again = rebuilt("test", weight.tensors, weight.form, on_host=True)
    assert isinstance(again, nvfp4.Nvfp4Weight)
    assert float(again.global_scale_decode) == 0.5
    assert again.packed.__array_interface__["data"][0] == packed.data_ptr()


def test_weights_of_other_scales_have_other_forms():
    ones = np.ones((16, 32), np.float32)
    forms = {weight_of(nvfp4.quantize(values)).form for values in (ones, ones * 3, ones)}
    assert len(forms) == 2


def test_form_that_this_process_has_not_seen_is_refused():
    with opened() as kernels:
        gemm = kernels.kernel("w4a16", "w4a16_gemm")
        stranger = Weight((torch.zeros(1),), "acme.Weight(layout='acme')")
        with pytest.raises(km.UsageError, match=r"no weight of form .* was made in this process"):
            gemm(GATE, stranger, torch.empty(2, 4, dtype=torch.bfloat16))


def test_weight_with_a_tensor_missing_is_refused():
    with opened() as kernels:
        gemm = kernels.kernel("w4a16", "w4a16_gemm")
        whole = gemm.weight(nvfp4.quantize(np.ones((4, 16), np.float32)))
        with pytest.raises(km.UsageError, match="has 1 tensors, expected packed, block_scale"):
            gemm(GATE, Weight(whole.tensors[:1], whole.form), torch.empty(2, 4, dtype=torch.bfloat16))


def test_weight_that_holds_an_object_is_refused():
    with pytest.raises(km.UsageError, match="has values of type dict"):
        weight_of(_Odd())


class _Odd:
    layout, quant, shape = "odd", "nvfp4", (1, 1)

    def __init__(self):
        self.values = {}


def test_import_without_torch_names_the_extra():
    code = (
        "import sys, importlib.util as u; real = u.find_spec;"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package);"
        "import kernel_muster.torch"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'kernel-muster[torch]'" in done.stderr


def test_nothing_else_imports_torch():
    code = (
        "import sys, kernel_muster as km; km.open_registry('cpu', levers={}).kernel('norm', 'rms_norm');"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
