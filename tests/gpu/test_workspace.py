"""Scratch, counters and tensor maps of launches on a real device."""

from types import ModuleType

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.registry.backends import EntryPoint
from kernel_muster.registry.backends.cuda_kernel import CudaKernel, LaunchPlan
from kernel_muster.registry.launch.workspace import Counters, Scratch, TensorMap

pytestmark = pytest.mark.gpu

BLOCKS, THREADS = 8, 128
# Each block puts doubled values into scratch. The last one to arrive resets the counter and adds them up.
SUM = r"""
extern "C" __global__ void __launch_bounds__(128) sum_all(const float* x, float* kept, unsigned* arrived, float* out) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  kept[i] = 2 * x[i];
  __threadfence();
  __syncthreads();
  __shared__ bool is_last;
  if (threadIdx.x == 0) is_last = atomicAdd(arrived, 1) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int k = 0; k < 128 * gridDim.x; ++k) sum += __ldcg(kept + k);
    out[0] = sum;
    *arrived = 0;
  }
}
"""
BOX = r"""
typedef struct __align__(64) { unsigned char bytes[128]; } Map;
extern "C" __global__ void __launch_bounds__(128) copy_box(const __grid_constant__ Map map, int column, float* out) {
  __shared__ __align__(128) float tile[4][8];
  __shared__ __align__(8) unsigned long long barrier;
  const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" :: "r"(at) : "memory");
    asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :: "r"(to), "l"(&map), "r"(column), "r"(2), "r"(at) : "memory");
  }
  __syncthreads();
  asm volatile("{\n.reg .pred done;\nwaiting: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
               "@!done bra waiting;\n}" :: "r"(at) : "memory");
  if (threadIdx.x < 32) out[threadIdx.x] = tile[threadIdx.x / 8][threadIdx.x % 8];
}
"""


def opened(tmp_path, text, entry, parameters, arrays, plan):
    """Return the handle of ``acme::it`` with this source and planner, on the device."""
    source = tmp_path / "it.cu"
    source.write_text(text)
    params = tuple(km.TensorParam(name, "f32", shape, role=role) for name, shape, role in arrays)
    case = km.Case("one", {dim: 1 for _, shape, _ in arrays for dim in shape})
    contract = km.Contract("acme_it", "a test", km.Signature(params), lambda a, d: {}, (case,), km.Tolerance(0, 0, "-"))
    backend = CudaKernel(source, (EntryPoint(entry, parameters),), plan)
    spec = km.KernelSpec(key="acme::it", contract="acme_it", backend=backend, archs=("sm_80+",))

    module = ModuleType("acme")
    module.muster_contracts = km.hookimpl(lambda: [contract], specname="muster_contracts")
    module.muster_kernels = km.hookimpl(lambda: [spec], specname="muster_kernels")
    return km.open_registry("cuda", local_plugins={"acme": module}).kernel("acme", "it")


@pytest.fixture
def summing(tmp_path):
    def plan(bound, entries):
        parts = (Scratch(4 * BLOCKS * THREADS), Counters(4))
        return LaunchPlan("sum_all", (BLOCKS, 1, 1), (bound.views["x"], *parts, bound.views["out"]))

    arrays = (("x", ("N",), "in"), ("out", ("ONE",), "out"))
    return opened(tmp_path, SUM, "sum_all", ("ptr", "ptr", "ptr", "ptr"), arrays, plan)


def test_scratch_and_counters_serve_launch_after_launch(cupy, summing):
    x, out = cupy.arange(BLOCKS * THREADS, dtype=np.float32), cupy.zeros(1, np.float32)
    assert summing.scratch_bytes(x, out) == 4 * BLOCKS * THREADS
    launch = summing.prepare(x, out)
    stream = cupy.cuda.Stream(non_blocking=True)
    for start in range(3):
        x[...] = cupy.arange(start, start + x.size, dtype=np.float32) % 5
        cupy.cuda.Device().synchronize()
        launch(stream)
        stream.synchronize()
        assert float(out[0]) == 2 * float(x.sum())
    summing(x, out, stream=stream)
    stream.synchronize()
    assert float(out[0]) == 2 * float(x.sum())


def test_scratch_of_the_caller_is_used_and_too_little_is_refused(cupy, summing):
    x, out = cupy.ones(BLOCKS * THREADS, np.float32), cupy.zeros(1, np.float32)
    scratch = cupy.zeros(summing.scratch_bytes(x, out), cupy.uint8)
    summing.prepare(x, out, scratch=scratch)()
    cupy.cuda.Device().synchronize()
    assert float(out[0]) == 2 * x.size
    assert (scratch.view(np.float32) == 2).all()
    with pytest.raises(km.ContractError, match="scratch has 4095 bytes, expected at least 4096"):
        summing.prepare(x, out, scratch=scratch[:-1])


def test_tensor_map_copies_a_box_and_reads_zeros_outside_the_matrix(cupy, tmp_path):
    def plan(bound, entries):
        tensor = TensorMap(bound.views["x"], (4, 8), "none")
        return LaunchPlan("copy_box", (1, 1, 1), (tensor, 12, bound.views["out"]))

    arrays = (("x", ("N", "K"), "in"), ("out", ("SIZE",), "out"))
    handle = opened(tmp_path, BOX, "copy_box", ("tensormap", "i32", "ptr"), arrays, plan)
    x, out = cupy.arange(5 * 16, dtype=np.float32).reshape(5, 16), cupy.full(32, np.nan, np.float32)
    handle(x, out)
    expected = np.zeros((4, 8), np.float32)
    expected[:3, :4] = cupy.asnumpy(x)[2:5, 12:16]
    np.testing.assert_array_equal(cupy.asnumpy(out).reshape(4, 8), expected)
