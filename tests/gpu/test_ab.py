"""``muster ab`` on a device: rounding is measured in graphs, equal arms are equal, a wrong kernel is caught."""

import json
from pathlib import Path
from typing import Any

import kernel_muster as km
import pytest
from kernel_muster.ab import nudge_plugin
from kernel_muster.ab.arms import Arm
from kernel_muster.ab.rendering import document
from kernel_muster.ab.running import Wish, run
from kernel_muster.audit.opening import Wanted
from kernel_muster.audit.proofs import device_memory, prove
from kernel_muster.registry.backends import EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan

pytestmark = pytest.mark.gpu

# A SiLU with the constant of a well-known approximation, or the right one.
SILU = """
#include <cuda_bf16.h>
extern "C" __global__ void __launch_bounds__(256) planted_silu(
    const __nv_bfloat16* gate, const __nv_bfloat16* up, __nv_bfloat16* out, long long rows, long long columns,
    long long gate_stride, long long up_stride) {
    const long long at = blockIdx.x * 256LL + threadIdx.x;
    if (at >= rows * columns) return;
    const long long row = at / columns, column = at % columns;
    const float x = __bfloat162float(gate[row * gate_stride + column]);
    const float y = __bfloat162float(up[row * up_stride + column]);
    out[at] = __float2bfloat16_rn(x / (1.0f + expf(-CONSTANT * x)) * y);
}
"""


def _stride(view: Any) -> int:
    return view.strides[0] // view.dtype.itemsize if view.shape[0] > 1 else view.shape[1]


def _plan(bound: Any, entries: Any) -> LaunchPlan:
    gate, up, out = (bound.views[name] for name in ("gate", "up", "out"))
    rows, columns = out.shape
    arguments = (gate, up, out, rows, columns, _stride(gate), _stride(up))
    return LaunchPlan("planted_silu", (-(-rows * columns // 256), 1, 1), arguments, may_overlap=False)


def planted(folder: Path, constant: str) -> Any:
    source = folder / "silu.cu"
    source.write_text(SILU.replace("CONSTANT", constant))
    entries = (EntryPoint("planted_silu", ("ptr", "ptr", "ptr", "i64", "i64", "i64", "i64")),)
    backend = CudaKernel(source, entries, _plan, strided=frozenset({"gate", "up"}))
    spec = km.KernelSpec(
        key="silu::silu_mul", contract="silu_mul", archs=("sm_80+",), backend=backend, overrides="kernel-muster"
    )
    return type("Planted", (), {"muster_kernels": staticmethod(km.hookimpl(lambda: [spec]))})()


def compare(**b: Any) -> Any:
    wish = Wish(
        models=("qwen3.6-27b",), target="cuda", sequences=(1, 4), tokens=12, repeats=1, drafts=0, is_reduced=True,
        stage="loaded",
    )  # fmt: skip
    base = Wanted(model="qwen3.6-27b", target="cuda", levers={})
    found = run([base], Arm(name="A"), Arm(name="B", **b), wish, None, lambda text: None)
    assert not found.models[0].is_refused, [
        row.why for _, report, _ in found.models[0].refused for row in report.findings
    ]
    json.dumps(document(found, advisory=False), allow_nan=False)
    return found


def failed(found: Any) -> set[str]:
    return {check.name for model in found.models for check in model.checks if check.outcome == "failed"}


@pytest.mark.parametrize("dtype", nudge_plugin.DTYPES)
def test_nudge_gives_the_bits_of_the_hosts_form(dtype: str) -> None:
    kernels = km.open_registry("cuda", levers={}, local_plugins={nudge_plugin.NAME: nudge_plugin})
    handle: Any = kernels.kernel(nudge_plugin.NAME, f"nudge_{dtype}")
    results = list(prove(handle, device_memory(0), lambda key: None))
    assert len(results) == 3
    assert [finding for result in results for finding in result.findings] == []


def test_equal_arms_are_equal_on_the_device() -> None:
    found = compare()
    assert (found.verdict, failed(found)) == ("equal", set())


def test_arms_that_launch_other_kernels_are_timed_by_themselves() -> None:
    found = compare(levers={"MUSTER_QKV_ARM": "per_seq"})
    one, four = found.models[0].rows
    assert one.kernels.differing == ()
    assert four.kernels.seconds_a > 0
    assert four.kernels.seconds_b > 0
    assert four.floor is not None
    assert four.floor.worst > 0


def test_right_kernel_of_another_hand_agrees_on_the_device(tmp_path: Path) -> None:
    found = compare(local_plugins={"planted": planted(tmp_path, "1.0f")})
    assert found.passed, [check.text for check in found.models[0].checks if check.outcome == "failed"]


def test_wrong_kernel_is_caught_and_named_on_the_device(tmp_path: Path) -> None:
    found = compare(local_plugins={"planted": planted(tmp_path, "1.702f")})
    assert found.verdict == "differ"
    assert {"contract", "kl"} <= failed(found)
    assert any("silu::silu_mul of arm B" in check.text for check in found.models[0].checks if check.outcome == "failed")
