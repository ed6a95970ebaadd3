"""Tests see no other installed plugin, neither in their process nor in its children."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LISTED = (
    "from kernel_muster.registry.discovery.entry_points import scan; "
    "print(sorted({e.distribution for e in scan().entries}))"
)


def with_a_stranger(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    info = folder / "stranger-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kernel_muster.v1]\nstranger = nothing_at_all\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=300)


def test_tests_see_no_plugin_that_is_installed_beside_them(tmp_path):
    assert "stranger" in with_a_stranger(tmp_path / "seen", "-c", LISTED).stdout
    tests = ("tests/audit/test_chains.py::test_chain_row_names_what_serves", "tests/hidden/seen.py")
    done = with_a_stranger(tmp_path / "hidden", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
