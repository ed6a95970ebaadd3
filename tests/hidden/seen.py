"""Run by test_hidden.py with a plugin installed beside kernel-muster."""

import os
import subprocess
import sys

from kernel_muster.registry.discovery.entry_points import scan

LISTED = (
    "from kernel_muster.registry.discovery.entry_points import scan; print({e.distribution for e in scan().entries})"
)


def _child(**environment):
    return subprocess.check_output([sys.executable, "-P", "-c", LISTED], text=True, env={**os.environ, **environment})


def test_no_stranger_is_seen():
    assert {entry.distribution for entry in scan().entries} == {"kernel-muster"}
    assert _child() == _child(PYTHONPATH=os.pathsep.join(filter(None, sys.path))) == "{'kernel-muster'}\n"
