"""``muster ab`` on a device: rounding is measured in graphs, equal arms are equal, a wrong kernel is caught."""

import json
from pathlib import Path
from typing import Any

import kernel_muster as km
import pytest
from kernel_muster.ab.arms import Arm
from kernel_muster.ab.nudge import nudge_plugin
from kernel_muster.ab.rendering import document
from kernel_muster.ab.running import Wish, run
from kernel_muster.audit.opening import BootRequest
from kernel_muster.audit.proof.proofs import device_memory, prove
from kernel_muster.registry.backends import EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan

pytestmark = pytest.mark.gpu

# The first norm of every layer's FFN; a wrong one is too large.
NORM = """
#include <cuda_bf16.h>
extern "C" __global__ void __launch_bounds__(256) planted_norm(
    const __nv_bfloat16* x, __nv_bfloat16* residual, const __nv_bfloat16* weight, __nv_bfloat16* out, float eps,
    float offset, int columns) {
    __shared__ float squares[256];
    const long long row = (long long)blockIdx.x * columns;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += 256) {
        const __nv_bfloat16 v = __float2bfloat16_rn(__bfloat162float(residual[row + i]) + __bfloat162float(x[row + i]));
        residual[row + i] = v;
        sum += __bfloat162float(v) * __bfloat162float(v);
    }
    squares[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 128; step; step /= 2) {
        if (threadIdx.x < step) squares[threadIdx.x] += squares[threadIdx.x + step];
        __syncthreads();
    }
    const float scale = FACTOR / sqrtf(squares[0] / columns + eps);
    for (int i = threadIdx.x; i < columns; i += 256)
        out[row + i] = __float2bfloat16_rn(
            __bfloat162float(residual[row + i]) * scale * (offset + __bfloat162float(weight[i])));
}
"""


def _plan(bound: Any, entries: Any) -> LaunchPlan:
    views = bound.views
    rows, columns = views["out"].shape
    arrays = (views["x"], views["residual"], views["weight"], views["out"])
    scalars = (bound.arguments["eps"], bound.arguments["weight_offset"], columns)
    return LaunchPlan("planted_norm", (rows, 1, 1), (*arrays, *scalars), may_overlap=False)


def planted(folder: Path, factor: str) -> Any:
    source = folder / "norm.cu"
    source.write_text(NORM.replace("FACTOR", factor))
    entries = (EntryPoint("planted_norm", ("ptr", "ptr", "ptr", "ptr", "f32", "f32", "i32")),)
    spec = km.KernelSpec(
        key="norm::rms_norm_residual", contract="rms_norm_residual", archs=("sm_80+",),
        backend=CudaKernel(source, entries, _plan), overrides="kernel-muster",
    )  # fmt: skip
    return type("Planted", (), {"muster_kernels": staticmethod(km.hookimpl(lambda: [spec]))})()


def compare(**b: Any) -> Any:
    wish = Wish(
        models=("qwen3.6-27b",), target="cuda", sequences=(1, 4), tokens=12, repeats=1, drafts=0, is_reduced=True,
        stage="loaded",
    )  # fmt: skip
    base = BootRequest(model="qwen3.6-27b", target="cuda", levers={})
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
    found = compare(local_plugins={"planted": planted(tmp_path, "1.2f")})
    assert found.verdict == "differ"
    assert {"contract", "kl"} <= failed(found)
    assert any(
        "norm::rms_norm_residual of arm B" in check.text
        for check in found.models[0].checks
        if check.outcome == "failed"
    )
