import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIM = Path(__file__).parents[1] / "sim"


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
def test_numba_kernels_have_the_bits_of_the_reference_on_the_simulator():
    """In a process of its own: Numba chooses between simulator and compiler when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "sim", "-p", "no:cacheprovider", str(SIM)]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
