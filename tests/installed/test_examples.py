"""The examples, built and installed with pip, and used through their entry points."""

from typing import Any

import pytest

pytestmark = pytest.mark.install

SOFTCAP, SILU, GATE = "acme_softcap::softcap", "silu::silu_mul", "residual_add::sigmoid_gate_mul_batched"


@pytest.fixture(scope="module")
def examples(make_environment, copy_example):
    environment = make_environment()
    environment.install(copy_example("acme_kernels"), copy_example("ten_lines"))
    return environment


@pytest.fixture(scope="module")
def found(examples):
    return examples.discover()


@pytest.fixture(scope="module")
def passed(examples):
    return examples.muster_json("audit", "acme-tiny", "--target", "cpu")


def _findings(report: Any, *codes: str) -> list[Any]:
    return [finding for finding in report["findings"] if finding["code"] in codes]


def test_examples_installed_are_loaded_without_a_finding(found):
    rows = {row["name"]: row for row in found["plugins"]}
    assert found["findings"] == []
    for name, distribution, version in (("acme", "acme-kernels", "1.2.0"), ("ten_lines", "ten-lines", "1.0")):
        assert (rows[name]["distribution"], rows[name]["version"]) == (distribution, version)
        assert rows[name]["status"] == "loaded"


def test_acme_kernels_installed_bring_everything_a_plugin_can(found, examples):
    assert [SOFTCAP, "acme", "acme-kernels"] in found["kernels"]
    assert [SILU, "acme", "acme-kernels"] in found["kernels"]
    assert "acme_softcap" in found["contracts"]
    assert "acme_mlp" in found["builders"]
    assert "MUSTER_ACME_NO_SOFTCAP" in found["levers"]
    assert str(examples.site_packages / "acme_kernels" / "manifests") in found["manifest_folders"]


def test_acme_tiny_audited_on_cpu_passes_with_its_own_kernels(passed):
    assert passed["verdict"] == "passed"
    served = {row["key"]: row["distribution"] for row in passed["kernels"]}
    assert served[SOFTCAP] == served[SILU] == "acme-kernels"
    assert served["residual_add::bf16_residual_add"] == served["norm::rms_norm"] == "kernel-muster"


def test_acme_tiny_boots_and_decodes_itself(examples):
    booted = examples.muster_json("boot", "acme-tiny", "--target", "cpu", "--tokens", "4")
    assert [len(row) for row in booted["decode"]["tokens"]] == [4, 4]
    assert booted["decode"]["size"] == ""


def test_acme_tiny_without_its_cap_is_compared_with_itself(examples):
    arms = ("--b", "MUSTER_ACME_NO_SOFTCAP=1", "--sequences", "1", "--tokens", "4", "--repeats", "1")
    compared = examples.muster_json("ab", "acme-tiny", "--target", "cpu", *arms)
    assert compared["verdict"] == "agree"
    assert compared["models"][0]["rows"][0]["kernels"]["differing"] == [SOFTCAP]


def test_overrides_of_both_examples_are_reported(passed):
    overridden = {finding["subject"]: finding["why"] for finding in _findings(passed, "OVERRIDDEN")}
    assert set(overridden) == {SILU, GATE}
    assert overridden[SILU].startswith("acme-kernels 1.2.0 replaces kernel-muster ")
    assert overridden[GATE].startswith("ten-lines 1.0 replaces kernel-muster ")


def test_shipped_model_audited_with_examples_installed_takes_the_overrides(examples):
    report = examples.muster_json("audit", "qwen3.6-27b", "--target", "cpu")
    served = {row["key"]: row["distribution"] for row in report["kernels"]}
    assert (served[SILU], served[GATE]) == ("acme-kernels", "ten-lines")


def test_acme_lever_on_issues_no_lookup_and_passes(examples):
    report = examples.muster_json("audit", "acme-tiny", "--target", "cpu", MUSTER_ACME_NO_SOFTCAP="1")
    assert report["verdict"] == "passed"
    assert SOFTCAP not in {row["key"] for row in report["kernels"]}
    lever = next(row for row in report["levers"] if row["name"] == "MUSTER_ACME_NO_SOFTCAP")
    assert (lever["value"], lever["origin"]) == (True, "environment")


def test_acme_kernel_disabled_refuses_and_names_key_and_site(examples):
    report = examples.muster_json("audit", "acme-tiny", "--target", "cpu", code=1, MUSTER_DISABLE=SOFTCAP)
    (finding,) = _findings(report, "DISABLED")
    assert finding["subject"] == SOFTCAP
    assert "acme_kernels/model.py" in finding["where"][0]


def test_acme_blocked_refuses_its_model(examples):
    report = examples.muster_json("audit", "acme-tiny", "--target", "cpu", "--no-plugin", "acme", code=1)
    assert _findings(report, "UNKNOWN_MODEL")


def _installed_variant(make_environment, folder, path: str, old: str, new: str):
    file = folder / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    environment = make_environment()
    environment.install(folder)
    return environment


def test_acme_kernel_removed_refuses_and_names_key_site_and_remedy(make_environment, copy_example):
    environment = _installed_variant(
        make_environment,
        copy_example("acme_kernels"),
        "src/acme_kernels/plugin.py",
        "return silu.SILU_MUL, softcap.SOFTCAP_ROWS",
        "return (silu.SILU_MUL,)",
    )
    done = environment.muster("audit", "acme-tiny", "--target", "cpu")
    assert done.returncode == 1
    report = environment.muster_json("audit", "acme-tiny", "--target", "cpu", code=1)
    (finding,) = _findings(report, "MISSING")
    assert finding["subject"] == SOFTCAP
    assert "acme_kernels/model.py" in finding["where"][0]
    assert finding["layers"] == ["lm_head"]
    for said in ("MISSING", SOFTCAP, finding["where"][0], finding["remedies"][0]):
        assert said in done.stdout


def test_ten_lines_with_a_wrong_key_refuses_and_names_it(make_environment, copy_example):
    environment = _installed_variant(
        make_environment,
        copy_example("ten_lines"),
        "ten_lines.py",
        'sigmoid_gate_mul_batched", "',
        'sigmoid_gate_rows", "',
    )
    report = environment.muster_json("audit", "qwen3.6-27b", "--target", "cpu", code=1)
    (finding,) = _findings(report, "BAD_SPEC")
    assert finding["subject"] == "ten_lines"
    assert "residual_add::sigmoid_gate_rows" in finding["why"]
    assert finding["where"] == ["ten-lines 1.0 (ten_lines)"]


_PROVE = """
import json
import numpy as np
import kernel_muster as km

kernels = km.open_registry("cpu")
builtin = km.open_registry("cpu", no_plugins=("acme", "ten_lines"))
rng = np.random.default_rng(7)
worst, cases = 0.0, 0
for key in ("acme_softcap::softcap", "silu::silu_mul", "residual_add::sigmoid_gate_mul_batched"):
    handle = kernels.kernel(*key.split("::"))
    for case in handle.contract.cases:
        arguments = handle.contract.arguments(case, rng)
        expected = handle.contract.reference(arguments, case.dims)
        handle(**arguments)
        cases += 1
        for name, exact in expected.items():
            tolerance = handle.contract.tolerance_of(name, case)
            excess = np.abs(arguments[name].astype(np.float64) - exact) - (
                tolerance.absolute + tolerance.relative * np.abs(exact.astype(np.float64)))
            worst = max(worst, float(np.max(excess, initial=-1.0))) if np.isfinite(excess).all() else np.inf

gate = np.arange(1 << 16, dtype=np.uint16).view(kernels.kernel("silu", "silu_mul").contract.arguments(
    kernels.kernel("silu", "silu_mul").contract.cases[0], rng)["gate"].dtype).reshape(64, 1024)
gate = np.where(np.isfinite(gate.astype(np.float32)), gate, np.zeros_like(gate))
up, outs = np.full_like(gate, -1.5), []
for registry in (kernels, builtin):
    outs.append(np.empty_like(gate))
    registry.kernel("silu", "silu_mul")(gate=gate, up=up, out=outs[-1])
print(json.dumps({"cases": cases, "worst": worst, "same_bits": outs[0].tobytes() == outs[1].tobytes()}))
"""


def test_example_kernels_meet_their_contracts(examples):
    proof = examples.python_json(_PROVE)
    assert proof["cases"] >= 12
    assert proof["worst"] <= 0.0
    assert proof["same_bits"]


_DECODE = """
import json
import ml_dtypes
import numpy as np
import kernel_muster as km
from kernel_muster.registry.contract.weights import Bf16Weight

rng = np.random.default_rng(3)
H, I, V = 64, 96, 256

def bf16(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(ml_dtypes.bfloat16)

weights = {"embedding.table": bf16(V, H), "lm_head.weight": Bf16Weight(bf16(V, H))}
for layer in ("layers.0", "layers.1"):
    weights |= {f"{layer}.norm": np.ones(H, ml_dtypes.bfloat16), f"{layer}.down": Bf16Weight(bf16(H, I))}
    weights |= {f"{layer}.{name}": Bf16Weight(bf16(I, H)) for name in ("gate", "up")}
with km.boot("acme-tiny", target="cpu", levers={}) as boot:
    model = km.build_model(boot.manifest, boot.kernels, weights)
ids = np.arange(0, V, 16, dtype=np.int32)
together = model.decode(ids)
apart = [int(model.decode(ids[i : i + 1])[0]) for i in range(len(ids))]

def wide(name):
    return getattr(weights[name], "values", weights[name]).astype(np.float64)

h = wide("embedding.table")[ids]
for layer in ("layers.0", "layers.1"):
    x = h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-6) * wide(f"{layer}.norm")
    gate, up = x @ wide(f"{layer}.gate").T, x @ wide(f"{layer}.up").T
    h = h + (gate / (1 + np.exp(-gate)) * up) @ wide(f"{layer}.down").T
logits = 30 * np.tanh(h @ wide("lm_head.weight").T / 30)
short = logits.max(1) - logits[np.arange(len(ids)), together]
print(json.dumps({"together": together.tolist(), "apart": apart, "short": short.max(), "spread": logits.std()}))
"""


def test_acme_model_decoding_on_cpu_chooses_what_float64_does(examples):
    decoded = examples.python_json(_DECODE)
    assert decoded["together"] == decoded["apart"]
    assert decoded["short"] <= 0.02 * decoded["spread"]  # a near tie may fall either way in BF16
