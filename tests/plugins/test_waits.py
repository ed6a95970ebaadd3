"""Kernels that begin before the previous launch has ended read none of its results before their wait.

The compiler or ptxas may move a load of a ``const __restrict__`` parameter above the wait. Then some tokens are wrong
now and then, which tests of results miss. So these tests read the machine code.
"""

import sys
from fnmatch import fnmatchcase

import pytest
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cuda_kernel import CudaKernel
from kernel_muster.registry.backends.pool import build_all
from kernel_muster.registry.backends.request import BuildRequest, EntryPoint
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.hardware.arch import parse_arch

ARCH = "sm_90a"

# Early reads of entries: parameters by position, never written by a launch. They are weights: a model's parameters
# exist before its first launch. The first matching pattern of an entry counts.
AHEAD = {
    "causal_conv1d_decode": {1: "weight"},
    "compute_gdn_gates": {2: "a_log", 3: "dt_bias"},
    "delta_rule_norm_*_128": {4: "weight"},
    "dense_gemm_split": {1: "weight"},
    "dense_gemv_*": {0: "weight"},
    "fused_down_*": {0: "down", 1: "down_scale", 2: "shared"},
    "fused_gate_up_*": {4: "shared_gate", 5: "shared_up"},
    "gemm_t*": {1: "weight"},
    "gemv_any_m*": {0: "weight"},
    "gemv_dual_silu_*": {0: "gate", 1: "up"},
    "gemv_gdn_in_*": {0: "weight", 1: "ba", 3: "a_log", 4: "dt_bias", 5: "taps"},
    "gemv_k*": {0: "weight"},
    "gemv_parts_*": {0: "weight", 1: "weight_a", 2: "weight_b"},
    "gemv_wide_*": {0: "weight"},
    "grouped_down_*": {0: "down"},
    "paged_decode_fresh_*": {3: "q_weight", 4: "k_weight"},
    "pairwise_down_*": {0: "down", 1: "down_scale"},
    "qk_norm_rope_append_small_d": {3: "q_weight", 4: "k_weight"},
    "rms_norm_gated_*_w8": {2: "weight"},
    "rms_norm_residual_*_w8": {2: "weight"},
    "rms_norm_*_w8": {1: "weight"},
    "w4a16_*": {0: "codes", 1: "scales"},
}
# Early reads of entries (peek() in ahead.cuh) that bring memory into L2 and are repeated behind the wait.
PEEKED = {
    "causal_conv1d_decode": {3: "slots"},
    "delta_rule_norm_*_128": {6: "slots"},
    "delta_rule_decode_128": {4: "slots"},
    "fused_down_*": {5: "ids"},
    "gemv_gdn_in_*": {7: "slots"},
    "grouped_down_*": {4: "work"},
    "pairwise_down_*": {3: "ids"},
    "unpermute_reduce_*": {1: "slots"},
}
# Maps that this reader cannot tell from the weight's. The threads that fetch x have waited (w4a16_hopper/gemm.cuh,
# dense_gemm/gemm_split_k.cuh and gemv_tma.cuh).
NOT_TAKEN = {"dense_gemm_split": {0: "x"}, "dense_gemv_m16_brought": {1: "x"}, "gemm_t*": {0: "x"}}
TABLES = (AHEAD, PEEKED, NOT_TAKEN)

PLANTED = """\
extern "C" __global__ void __launch_bounds__(128) planted(const float* x, const float* weight, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  %s
}
"""
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
# The last value comes from memory that is written, so the compiler must not read it later.
PINNED = 'float w; asm volatile("ld.global.f32 %0, [%1];" : "=f"(w) : "l"(weight + i));'


def allowed(table, entry):
    """Return the positions that a table allows an entry, by the first pattern that fits."""
    return next((set(positions) for pattern, positions in table.items() if fnmatchcase(entry, pattern)), set())


def complaint(entry, access):
    """Say what is wrong with an access before the wait; nothing if it is declared."""
    positions = (
        allowed(AHEAD, entry) | allowed(NOT_TAKEN, entry) | (allowed(PEEKED, entry) if access.is_peek else set())
    )
    if access.parameters and access.parameters <= positions:
        return ""
    made_of = f"parameters {sorted(access.parameters)}" if access.parameters else "nothing that is known"
    return f"{entry}: {access.text}: its address is made of {made_of}; declared are {sorted(positions)}"


@pytest.fixture(scope="module")
def read(machine_code, tmp_path_factory):
    """Build requests and follow each entry up to its wait: (entry, what it does before)."""
    if machine_code.disassembler() is None:
        if sys.platform == "darwin":
            pytest.skip("NVIDIA ships no disassembler for macOS")
        pytest.fail("nvidia-cuda-nvdisasm is not installed: pip install '.[test]' brings it")
    folder = tmp_path_factory.mktemp("code")

    def read(builder, requests):
        outcomes = build_all(builder, requests)
        assert [str(outcome.failure) for outcome in outcomes if outcome.failure] == []
        codes = machine_code.read_entries(ARCH, [outcome.built for outcome in outcomes], folder)
        for outcome, code in zip(outcomes, codes, strict=True):
            for entry in outcome.request.entries:
                offsets = outcome.built.entries[entry.name].parameters
                base = machine_code.PARAMETERS_AT[ARCH]
                yield entry, machine_code.before_wait(code[entry.name], entry, offsets, base)

    return read


@pytest.fixture(scope="module")
def entries(read, build_cache):
    """Return all entries of the built-in sources."""
    backends = [r.spec.backend for r in discover().kernels if isinstance(r.spec.backend, CudaKernel)]
    assert len(backends) > 50
    return list(read(Builder(build_cache), [backend.request(parse_arch(ARCH)) for backend in backends]))


@pytest.fixture
def planted(read, tmp_path):
    def planted(body):
        source = tmp_path / "planted.cu"
        source.write_text(PLANTED % body)
        entry = EntryPoint("planted", ("ptr", "ptr", "ptr", "i32"))
        ((_, found),) = read(Builder(), [BuildRequest("planted", source, parse_arch(ARCH), (entry,))])
        return found

    return planted


def test_kernels_read_and_write_nothing_before_their_wait_but_what_is_declared(entries):
    said = {complaint(entry.name, access) for entry, before in entries for access in before.accesses} - {""}
    assert not said, "\n".join(sorted(said))


def test_kernels_all_wait_as_any_of_them_may_be_launched_early(entries):
    assert [entry.name for entry, before in entries if not before.waits] == []


def test_what_is_declared_is_a_pointer_of_an_entry(entries):
    # Whether an entry really reads it early is the compiler's choice where the source does not pin it.
    for pattern, positions in (row for table in TABLES for row in table.items()):
        fitting = [entry.parameters for entry, _ in entries if fnmatchcase(entry.name, pattern)]
        assert fitting, f"no entry fits {pattern}"
        assert {parameters[at] for parameters in fitting for at in positions} <= {"ptr", "tensormap"}


@pytest.mark.parametrize(
    ("body", "positions"),
    [
        (f"{WAIT} if (i < n) out[i] = x[i] * weight[i];", []),
        (f"{PINNED} {WAIT} if (i < n) out[i] = x[i] * w;", [1]),
        (f"float a = *(volatile const float*)(x + i); {WAIT} if (i < n) out[i] = a * weight[i];", [0]),
        (f"out[i] = n; {WAIT}", [2]),
        (f"atomicAdd(out + i, 1.0f); {WAIT}", [2]),
        (f"if (i < 7) {{ {WAIT} }} if (i < n) out[i] = *(volatile const float*)(x + i);", [0, 2]),
        (f"if (threadIdx.x) {{ {WAIT} }} else {{ {WAIT} }} out[i] = x[i];", []),
        (f"const float* p = *(const float* volatile*)weight; out[i] = p[i]; {WAIT}", [-1, 1, 2]),
    ],
)  # fmt: skip
def test_planted_access_before_the_wait_is_found_with_the_parameter_that_it_goes_by(planted, body, positions):
    found = planted(body)
    assert found.waits
    assert sorted({min(access.parameters, default=-1) for access in found.accesses}) == positions


def test_planted_load_that_is_not_declared_is_complained_about(planted):
    (access,) = planted(f"{PINNED} {WAIT} if (i < n) out[i] = x[i] * w;").accesses
    assert "planted: LDG" in complaint("planted", access)
    assert "is made of parameters [1]; declared are []" in complaint("planted", access)
    assert complaint("causal_conv1d_decode", access) == ""
    assert "declared are [0]" in complaint("gemv_any_m8", access)


def test_planted_kernel_that_never_waits_is_found(planted):
    assert not planted("if (i < n) out[i] = x[i];").waits


def test_planted_peek_is_told_from_a_load(planted):
    found = planted(
        f'int g; asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(g) : "l"(x)); {WAIT} out[i] = g;'
    )
    assert [(access.is_peek, set(access.parameters)) for access in found.accesses] == [(True, {0})]
