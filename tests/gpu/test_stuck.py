"""A kernel on the device that does not end: it is found, the device is given up, and the command ends without it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from twice import GOOD, HEAD, boot, plugin

pytestmark = pytest.mark.gpu

# Long enough to expose any wait for it. Then all launches have ended, whatever became of the process.
SPIN_S = 25
SPINS = f"""
__device__ unsigned long long first;
__device__ unsigned long long now() {{
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}}
{HEAD}  const unsigned long long own = now(), other = atomicCAS(&first, 0, own);
  for (const unsigned long long start = other == 0 ? own : other; now() - start < {SPIN_S}000000000ull;) {{
  }}
{GOOD.removeprefix(HEAD)}"""

# A kernel that does not end needs a separate process, and ends with it.
_PLUGIN = """
from pathlib import Path

import kernel_muster as km
from twice import plugin

folder = Path({folder!r})
made = plugin(folder, (folder / "spins.cu").read_text())
muster_contracts, muster_kernels = made.muster_contracts, made.muster_kernels


@km.hookimpl
def muster_models():
    return [km.ModelBuilder("acme", ("acme_type",), "production", build)]


def build(manifest, kernels, weights=None):
    for key in ("acme::twice", "gemv::dense_gemv_bf16"):
        kernels.kernel(*key.split("::"))
"""
_COMMAND = """
import sys
from kernel_muster.audit import checking
from kernel_muster.bench import race
checking.CASE_S = 2
race.LONGEST_WAIT_S = 2
from kernel_muster.__main__ import main
sys.exit(main())
"""
_BOOTS = """
import json, os, sys
import kernel_muster as km
from kernel_muster.audit import checking
checking.CASE_S = 2
found = []
for _ in range(2):
    try:
        with km.boot(manifest=sys.argv[1], target="cuda", stage="proven") as boot:
            km.build_model(boot.manifest, boot.kernels)
    except km.BootRefused as refused:
        rows = [row for row in refused.report.findings if row.severity != "note" and "TUNING" not in row.code]
        found.append([[row.code, row.subject] for row in rows])
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.fixture
def spinning(tmp_path, cache):
    """Return what runs a script where a plugin is installed whose kernel spins: its result, and how long it took."""
    site = tmp_path / "site"
    info = site / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernel_muster.v1]\nacme = acme_spins\n")
    (tmp_path / "spins.cu").write_text(SPINS)
    (site / "acme_spins.py").write_text(_PLUGIN.format(folder=str(tmp_path)))
    manifest = tmp_path / "spins" / "MODEL.toml"
    manifest.parent.mkdir()
    manifest.write_text('[model]\nname = "spins"\nquant = "nvfp4"\nmodel_type = "acme_type"\n')
    path = os.pathsep.join([str(site), str(Path(__file__).parent), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "PYTHONPATH": path, "MUSTER_CACHE_DIR": cache}

    def run(script, *arguments):
        command = [sys.executable, "-c", script, *(str(manifest) if part == "MANIFEST" else part for part in arguments)]
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        return done, time.monotonic() - start

    return run


def test_kernel_that_does_not_end_refuses_the_audit_and_the_command_ends_without_it(spinning, tmp_path, cache):
    options = ("audit", "--target", "cuda", "--stage", "proven", "--format", "json", "--manifest", "MANIFEST")
    done, seconds = spinning(_COMMAND, *options)
    assert done.returncode == 1, done.stderr
    assert seconds < SPIN_S - 2
    report = json.loads(done.stdout)
    rows = [row for row in report["findings"] if row["severity"] != "note" and "TUNING" not in row["code"]]
    found = {row["code"]: row for row in rows}
    assert {code: row["subject"] for code, row in found.items()} == {
        "NUMERICS_FAILED": "acme::twice",
        "UNCHECKED": "gemv::dense_gemv_bf16",
    }
    assert found["NUMERICS_FAILED"]["why"] == "case one: it was still running after 2 s, and cuda:0 is given up"
    assert {row["stage"] for row in report["kernels"]} == {"loaded"}
    again = boot(tmp_path, cache, "acme::good", local={"acme": plugin(tmp_path, GOOD)})
    assert again.report.passed


def test_boot_on_a_device_that_is_stuck_is_refused(spinning):
    done, seconds = spinning(_BOOTS, "MANIFEST")
    assert done.returncode == 0, done.stderr
    assert seconds < SPIN_S - 2
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first == [["NUMERICS_FAILED", "acme::twice"], ["UNCHECKED", "gemv::dense_gemv_bf16"]]
    assert second == [["NO_DEVICE", "cuda"]]


def test_launches_that_do_not_end_end_the_measurement(spinning):
    done, seconds = spinning(_COMMAND, "bench", "acme::twice", "--no-peers")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert seconds < SPIN_S - 2
    wanted = "muster: error: cuda:0 still runs the launches of acme::twice, which did not end: "
    assert wanted in done.stderr
