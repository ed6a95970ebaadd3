"""Whole models on the device, through the decode engine, against the published architecture in float64.

The reference (tests/models/reference_model.py) agrees with transformers' own classes to 1e-4. With transformers
installed, they are compared too. The bound is derived: all BF16 roundings of the layers move at random in the
reference, by at most one rounding each, and their effect on the logits is the bound.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_muster as km
import numpy as np
import pytest
from kernel_muster.models.build import build_from_dims
from kernel_muster.models.decode import DecodeEngine
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.reduced import reduced
from kernel_muster.models.weights.random_weights import RandomWeights

pytestmark = pytest.mark.gpu
MODELS = ("qwen3.6-27b", "qwen3.6-35b-a3b")
PROMPT = [3, 141, 59, 265, 358, 97, 93, 238, 462, 64, 338, 327, 95, 28, 84, 197, 16, 93, 99, 375]
OTHERS = [[7, 11], [400] * 9, [5, 4, 3, 2, 1]]
NEW, RUNS = 12, 8


def load(name: str) -> ModuleType:
    """Return a module of the model tests."""
    path = Path(__file__).resolve().parents[1] / "models" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=MODELS)
def decoded(request: Any) -> Any:
    """Return dimensions, weights, and tokens and logits of the prompt in company."""
    with km.boot(request.param, target="cuda", levers={}, stage="loaded") as boot:
        dims = reduced(model_dims(boot.manifest))
        model = build_from_dims(dims, boot.kernels, RandomWeights(1), 64)
    with DecodeEngine(model, StateSizes(4, 64, 16), 128) as engine:
        run = engine.generate([PROMPT, *OTHERS], NEW, keep_logits=True)
    return dims, RandomWeights(1), run.tokens[0], np.stack(run.logits[0]).astype(np.float64)


def exact_logits(decoded: Any, jitter: Any = None) -> Any:
    dims, weights, tokens, _ = decoded
    ids = [*PROMPT, *tokens[:-1]]
    return load("reference_model").Reference(dims, weights, jitter).logits(ids)[len(PROMPT) - 1 :]


def test_engine_on_the_device_gives_the_logits_of_the_reference(decoded: Any) -> None:
    exact, got = exact_logits(decoded), decoded[3]
    noisy = [exact_logits(decoded, np.random.default_rng(run)) for run in range(RUNS)]
    # For each position the largest error of the runs. A router's near tie turns in some runs only, so positions are
    # judged by the worst of all runs, and by their median.
    allowed = np.abs(np.array(noisy) - exact).max(axis=2)
    errors = np.abs(got - exact).max(axis=1)
    assert errors.max() <= 1.5 * allowed.max()
    assert np.median(errors) <= 1.5 * np.median(allowed)


def test_reference_at_this_size_agrees_with_transformers(decoded: Any) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    oracle = load("test_oracle")
    dims, weights, tokens, _ = decoded
    oracle.IDS = [*PROMPT, *tokens[:-1]]
    model, exact = oracle.theirs(load("reference_model"), dims, weights)
    assert np.abs(oracle.run(model) - exact).max() <= oracle.AGREES * np.abs(exact).max()
