"""The page on PyTorch runs as it is shown."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # warnings of torch's compiler

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"


def test_examples_of_the_page_run_in_order():
    blocks = re.findall(r"^```python torch\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102  (the page's own code)
        assert names["layer"](names["x"]).shape == (4, 512)
    finally:
        names["kernels"].close()
    x, out = names["x"].double(), names["out"].double()
    assert torch.allclose(out, torch.nn.functional.rms_norm(x, (256,), None, 1e-6), rtol=2**-7)
