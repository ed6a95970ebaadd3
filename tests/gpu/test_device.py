"""Loading and proving compiled kernels on a real device."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_muster.registry.backends import builder
from kernel_muster.registry.hardware.arch import parse_arch
from twice import GOOD, HEAD, INDEX, THREADS, boot, codes, plugin

pytestmark = pytest.mark.gpu

BROKEN = {
    "NUMERICS_FAILED": GOOD.replace("* 2;", "* 2.02f;"),
    "UNWRITTEN_OUTPUT": GOOD.replace("i < n", f"i < (n < {THREADS} ? n : n / {THREADS} * {THREADS})"),
    "OUT_OF_BOUNDS": GOOD.replace("if (i < n) out[i] = x[i] * 2", "out[i] = i < n ? x[i] * 2 : 0.0f"),
    "NOT_DETERMINISTIC": GOOD.replace("* 2;", "* 2 + 1e-5f * (clock64() % 97);"),
}
CHANGED_INPUT = (
    HEAD.replace("const float* x", "float* x") + INDEX + "  if (i < n) { out[i] = x[i] * 2; x[i] = 0; }\n}\n"
)
WILD = GOOD.replace("out[i] =", "out[i + (1ll << 40)] =")
FAMILY = (
    *(f"w4a16_gemv::w4a16_gemv{tier}" for tier in ("", *(f"_batch{rows}" for rows in (*range(2, 9), 16, 256)))),
    *(f"w4a16_gemv::w4a16_gemv_{form}{tier}" for form in ("qg", "dual") for tier in ("", "_batch2", "_batch3")),
    "w4a16_gemv::w4a16_gemv_qkvz",
    "gemv::dense_gemv_bf16",
    "gemv::dense_gemv_bf16_batchm",
)


def test_boot_without_a_stage_loads_every_kernel(tmp_path, cache):
    session = boot(tmp_path, cache, "w4a16_gemv::w4a16_gemv", stage=None)
    assert (codes(session), session.report.stage_reached) == ([], "loaded")
    assert session.report.device


def test_gemv_family_is_proven(tmp_path, cache):
    session = boot(tmp_path, cache, *FAMILY)
    assert codes(session) == []
    assert {row.key: row.stage for row in session.report.kernels} == dict.fromkeys(FAMILY, "proven")


def test_good_kernel_is_proven(tmp_path, cache):
    session = boot(tmp_path, cache, "acme::twice", local={"acme": plugin(tmp_path, GOOD)})
    assert (codes(session), session.report.stage_reached) == ([], "proven")


@pytest.mark.parametrize(
    ("code", "text"), [*BROKEN.items(), ("OUT_OF_BOUNDS", CHANGED_INPUT)], ids=[*BROKEN, "CHANGED_INPUT"]
)
def test_broken_kernel_trips_exactly_its_code_on_the_device(tmp_path, cache, code, text):
    session = boot(tmp_path, cache, "acme::twice", "acme::good", local={"acme": plugin(tmp_path, text)})
    assert codes(session) == [(code, "acme::twice")]
    assert {row.key: row.stage for row in session.report.kernels} == {"acme::twice": "loaded", "acme::good": "proven"}


def test_static_and_dynamic_shared_memory_may_exceed_48_kib_together(tmp_path, cache):
    text = HEAD + INDEX + (
        "  __shared__ float fixed[8192];\n  extern __shared__ float asked[];\n"
        "  fixed[8191 - threadIdx.x] = i < n ? x[i] : 0; asked[8191 - (threadIdx.x ^ 1)] = 2;\n  __syncthreads();\n"
        "  if (i < n) out[i] = fixed[8191 - threadIdx.x] * asked[8191 - threadIdx.x];\n}\n"
    )  # fmt: skip
    local = {"acme": plugin(tmp_path, text, dynamic_shared_bytes=32768)}
    assert codes(boot(tmp_path, cache, "acme::twice", local=local)) == []


def test_claim_of_other_bits_is_broken_on_the_device(tmp_path, cache):
    local = {"acme": plugin(tmp_path, GOOD.replace("* 2;", "* 2.0000002f;"), bit_identical_to=("acme::good",))}
    assert codes(boot(tmp_path, cache, "acme::twice", local=local)) == [("BIT_IDENTITY_BROKEN", "acme::twice")]


Builder = builder.Builder


class OtherCode(Builder):
    """A compiler whose code no driver of this device takes."""

    def finish(self, begun):
        return self.changed(super().finish(begun), begun.request)


class Corrupted(OtherCode):
    def changed(self, built, request):
        return replace(built, cubin=bytes(64) + built.cubin[64:])


class ForAnotherChip(OtherCode):
    def changed(self, built, request):
        other = "sm_80" if str(request.arch) != "sm_80" else "sm_90a"
        cubin = Builder().build(replace(request, arch=parse_arch(other))).cubin
        return replace(built, cubin=cubin)


@pytest.mark.parametrize("compiler", [Corrupted, ForAnotherChip])
def test_code_that_the_driver_refuses_is_load_failed(tmp_path, cache, monkeypatch, compiler):
    monkeypatch.setattr(builder, "Builder", compiler)
    session = boot(tmp_path, cache, "acme::twice", local={"acme": plugin(tmp_path, GOOD)}, stage=None)
    assert codes(session) == [("LOAD_FAILED", "acme::twice")]
    assert "cuModuleLoadData: CUDA_ERROR_" in session.report.findings[0].why
    assert session.report.kernels[0].stage == "compiled"


# An access that destroys the device's context needs a separate process.
_CHILD = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from twice import boot, plugin
folder = Path(sys.argv[2])
local = {"acme": plugin(folder, sys.argv[4])}
session = boot(folder, sys.argv[3], "acme::twice", "gemv::dense_gemv_bf16", local=local)
report = session.report
found = [[f.code, f.subject, f.why] for f in report.findings if f.severity == "refuse"]
print(json.dumps([found, {row.key: row.stage for row in report.kernels}]))
"""


def test_access_that_stops_the_device_is_out_of_bounds_and_ends_the_proofs(tmp_path, cache):
    command = [sys.executable, "-c", _CHILD, str(Path(__file__).parent), str(tmp_path), cache, WILD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (((code, subject, why),), stages) = json.loads(done.stdout.splitlines()[-1])
    assert (code, subject) == ("OUT_OF_BOUNDS", "acme::twice")
    assert "the device stopped" in why
    assert stages == {"acme::twice": "loaded", "gemv::dense_gemv_bf16": "loaded"}
