"""Keys without a built-in family that models ask for: an installed third party provides them."""

import shutil
from pathlib import Path

import pytest
from kernel_muster.MODEL_toml import manifest_folder

pytestmark = pytest.mark.install

V3, ATTENTION, FFN = "w4a16_v3::w4a16_gemm_t_m128_v3", "w4a4::w4a4_gemm_mfast", "w4a4::w4a4_gemm"
MODEL = "qwen3.6-27b"

SOURCE = f'''
import numpy as np

import kernel_muster as km
from kernel_muster.registry.contract import nvfp4


def gemm(x, w, out):
    out[...] = x.astype(np.float64) @ nvfp4.dequantize(w).T


def fp4_gemm(x, w, out):
    for row, to in zip(x, out):
        to[...] = nvfp4.dequantize(nvfp4.quantize(row[None]))[0] @ nvfp4.dequantize(w).T


@km.hookimpl
def muster_kernels():
    shared = {{"archs": ("cpu",), "weight_layout": "nvfp4_row_major"}}
    yield km.KernelSpec(key="{V3}", contract="w4a16_gemm", backend=km.PythonKernel(gemm),
                        opt_in="MUSTER_W4A16_VARIANT", **shared)
    for key in ("{ATTENTION}", "{FFN}"):
        yield km.KernelSpec(key=key, contract="w4a4_gemm", backend=km.PythonKernel(fp4_gemm), **shared)
'''

# The GEMMs that the layers of a small model launch for a prompt of 70 rows.
RUN = """
import json
from collections import Counter

import kernel_muster as km
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.layers.linear import Nvfp4Linear
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.reduced import reduced
from kernel_muster.models.weights.source import SyntheticWeights

with km.boot("qwen3.6-27b", target="cpu", levers={"MUSTER_W4A16_VARIANT": "v3"}) as boot:
    model = build_from_dims(reduced(model_dims(boot.manifest)), boot.kernels, SyntheticWeights(1), 70)
state = model.new_state(StateSizes(1, 8, 16))
list(model.prefill(state, [state.open()], [list(range(70))]))
used = {"attention": Counter(), "gdn": Counter(), "ffn": Counter()}
for layer in model.layers:
    glu = layer.ffn.swiglu
    used["ffn"] += glu.gate.used + glu.up.used + glu.down.used
    if hasattr(layer.mixer, "linears"):
        used["attention"] += layer.mixer.linears.o.used
    else:
        used["gdn"] += layer.mixer.out.used
print(json.dumps(used))
"""


@pytest.fixture(scope="module")
def installed(make_environment, distribution):
    """Return a maker of environments with the distribution of some source."""

    def make(source=SOURCE):
        environment = make_environment()
        environment.install_tiny(distribution("acme-gemms", {"acme_gemms.py": source}, {"acme": "acme_gemms"}))
        return environment

    return make


@pytest.fixture(scope="module")
def acme(installed):
    return installed()


def bare_manifest(folder: Path) -> Path:
    """Copy the shipped manifest without its waivers of what is there now."""
    file = folder / MODEL / "MODEL.toml"
    shutil.copytree(manifest_folder() / MODEL, file.parent)
    text = file.read_text(encoding="utf-8")
    assert "[expected_absent.w4a4]" in text
    file.write_text(text.partition("[expected_absent.w4a4]")[0], encoding="utf-8")
    return file


def test_author_of_open_keys_gets_all_of_them_proven(acme):
    report = acme.muster_json("plugin", "check", "acme-gemms")
    proven = {step["subject"] for step in report["steps"] if (step["kind"], step["outcome"]) == ("prove", "ok")}
    assert (report["verdict"], report["findings"], proven) == ("passed", [], {V3, ATTENTION, FFN})


def test_kernel_that_breaks_the_contract_of_an_open_key_is_not_proven(installed):
    environment = installed(SOURCE.replace("nvfp4.dequantize(nvfp4.quantize(row[None]))[0]", "row"))
    report = environment.muster_json("plugin", "check", "acme-gemms", code=1)
    assert {(f["code"], f["subject"]) for f in report["findings"]} == {
        ("NUMERICS_FAILED", key) for key in (ATTENTION, FFN)
    }


def test_open_key_is_served_by_whoever_provides_it(acme, tmp_path):
    options = ("--target", "cpu", "--manifest", bare_manifest(tmp_path))
    report = acme.muster_json("audit", MODEL, *options, MUSTER_W4A16_VARIANT="v3")
    assert (report["verdict"], report["findings"]) == ("passed", [])
    rows = {row["key"]: row for row in report["kernels"]}
    assert {rows[key]["distribution"] for key in (V3, ATTENTION, FFN)} == {"acme-gemms"}
    assert rows[FFN]["reached_by"] == "choose_tile: prefill"
    assert rows[V3]["reached_by"] == "m128_variant: m128_v3"


def test_waiver_of_the_shipped_manifest_is_stale_where_the_key_is_provided(acme):
    report = acme.muster_json("audit", MODEL, "--target", "cpu")
    assert report["verdict"] == "passed"
    assert {(f["code"], f["subject"]) for f in report["findings"]} == {("STALE_WAIVER", k) for k in (ATTENTION, FFN)}
    assert V3 not in {row["key"] for row in report["kernels"]}


def test_decisions_of_a_model_take_the_kernels_of_the_third_party(acme):
    used = acme.python_json(RUN)
    assert set(used["attention"]) == set(used["ffn"]) == {"fp4"}
    assert set(used["gdn"]) == {"m128_v3"}


def test_variant_that_nobody_provides_is_still_a_request_not_honored(make_environment):
    environment = make_environment()
    report = environment.muster_json("audit", MODEL, "--target", "cpu", code=1, MUSTER_W4A16_VARIANT="v3")
    assert [(f["code"], f["subject"]) for f in report["findings"]] == [("REQUEST_NOT_HONORED", "MUSTER_W4A16_VARIANT")]


def test_open_key_under_another_contract_is_refused(installed):
    environment = installed(SOURCE.replace('contract="w4a4_gemm"', 'contract="w4a16_gemm"'))
    report = environment.muster_json("audit", MODEL, "--target", "cpu", code=1)
    found = [f for f in report["findings"] if f["code"] == "BAD_SPEC"]
    assert {f["why"] for f in found} == {
        f"{key}: it implements contract w4a16_gemm, and this key is open under w4a4_gemm alone"
        for key in (ATTENTION, FFN)
    }
