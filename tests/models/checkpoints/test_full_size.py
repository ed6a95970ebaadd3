"""The script for models at full size: its checkpoint and its reference, at reduced size."""

import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_muster.MODEL_toml import load_manifest, manifest_folder
from kernel_muster.models.checkpoints import LogicalWeights, open_checkpoint
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.reduced import reduced
from kernel_muster.registry.contract import nvfp4

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "full_size"
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import checkpoint
        import reference
    finally:
        sys.path.remove(str(SCRIPTS))
    return checkpoint, reference


@pytest.fixture(params=["qwen3.6-27b", "qwen3.6-35b-a3b"])
def dims(request):
    manifest, _ = load_manifest(manifest_folder() / request.param / "MODEL.toml")
    assert manifest is not None
    return reduced(model_dims(manifest))


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_loader_and_script_dequantise_alike(scripts, dims, tmp_path, format):
    checkpoint, reference = scripts
    folder = checkpoint.Writer(dims, tmp_path, format, 1, "cpu").write()
    weights = reference.Streamed(folder, checkpoint.config_of(dims), "cpu")._weights("layer-3", "", torch.float32)
    logical = LogicalWeights(open_checkpoint(folder))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module = f"model.layers.3.self_attn.{name}"
        exact = nvfp4.dequantize(logical.load(module))
        theirs = weights[f"{module}.weight"].numpy()
        assert (np.abs(theirs - exact) <= 3.01 * 2.0**-24 * np.abs(exact)).all()
        assert exact.std() > 0


def test_streamed_model_is_the_whole_model(scripts, dims, tmp_path):
    checkpoint, reference = scripts
    folder = checkpoint.Writer(dims, tmp_path, "compressed-tensors", 1, "cpu").write()
    config = checkpoint.config_of(dims)
    streamed = reference.Streamed(folder, config, "cpu")
    got = streamed.logits([IDS], 2, torch.float32)[0]
    whole = type(checkpoint.empty_model(config))(config).eval()
    state = {}
    for shard in ("outside", *(f"layer-{index}" for index in range(len(dims.layer_kinds)))):
        state |= streamed._weights(shard, "", torch.float32)
    whole.load_state_dict(state)
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, -2:]
    assert (got - expected.float()).abs().max() <= 1e-4 * expected.abs().max()
    assert expected.std() > 0.5  # the logits are not flat
