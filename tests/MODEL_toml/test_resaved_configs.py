"""Config files as transformers 5 and the quantisation libraries write them, from the published ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import public_configs as public
import pytest
from kernel_muster.MODEL_toml import Catalogue, manifest_folder

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
Config = dict[str, Any]
Save = Callable[[Config, str], Path]


@pytest.fixture
def save_again(tmp_path: Path) -> Save:
    """Read a config with transformers, and save it again into a folder of that name."""
    transformers = pytest.importorskip("transformers", minversion="5")

    def save_again(config: Config, name: str) -> Path:
        before, after = tmp_path / "before", tmp_path / name
        before.mkdir(exist_ok=True)
        (before / "config.json").write_text(json.dumps(config), encoding="utf-8")
        transformers.AutoConfig.from_pretrained(before).save_pretrained(after)
        return after

    return save_again


CASES = {
    "Qwen3.6-27B": (lambda: public.whole(public.text_27b(), public.modelopt()), "qwen3.6-27b"),
    "Qwen3.8-27B-text": (lambda: public.text_27b() | {"quantization_config": public.modelopt()}, "qwen3.8-27b"),
    "35b": (lambda: public.whole(public.text_35b(), public.nvfp4_experts()), "qwen3.6-35b-a3b"),
    "35b-text": (lambda: public.text_35b() | {"quantization_config": public.nvfp4_experts()}, "qwen3.6-35b-a3b"),
    "Holo-3.1-35B-A3B": (
        lambda: public.whole(public.text_35b() | {"mtp_num_hidden_layers": None}, public.nvfp4_experts()),
        "holo-3.1-35b-a3b",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_config_saved_again_by_transformers_resolves_as_before(save_again: Save, name: str) -> None:
    make, expected = CASES[name]
    found = Catalogue.from_folders([manifest_folder()]).resolve(str(save_again(make(), name)))
    assert found.finding is None, found.finding
    assert found.manifest is not None
    assert (found.manifest.name, found.doubts) == (expected, ())


@pytest.mark.parametrize(("outer", "nested"), [(False, True), (False, None), (None, False)])
def test_untied_config_saved_again_is_untied(save_again: Save, outer: bool | None, nested: bool | None) -> None:
    config = public.whole(public.text_35b(), public.nvfp4_experts())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = outer, nested
    for level in (config, config["text_config"]):
        if level["tie_word_embeddings"] is None:
            del level["tie_word_embeddings"]
    found = Catalogue.from_folders([manifest_folder()]).resolve(str(save_again(config, "35b")))
    assert (found.finding, found.doubts) == (None, ())


def test_tied_config_saved_again_is_refused_as_tied(save_again: Save) -> None:
    config = public.whole(public.text_35b(), public.nvfp4_experts(), tie_word_embeddings=True)
    finding = Catalogue.from_folders([manifest_folder()]).resolve(str(save_again(config, "35b"))).finding
    assert finding is not None
    assert "tie_word_embeddings true (text_config: false); manifest: tie_word_embeddings false" in finding.why


def test_scheme_of_compressed_tensors_is_read(tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    ignored = ["lm_head", "re:.*mtp.*"]
    for preset, said in (("NVFP4A16", None), ("NVFP4", None), ("FP8", "fp8"), ("W8A8", "'int' of 8 bits")):
        scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
        stated = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignored)
        if said is None:
            stated.format = "nvfp4-pack-quantized"
        where = tmp_path / f"Qwen3.6-27B-{preset}"
        where.mkdir()
        text = json.dumps(public.whole(public.text_27b(), stated.model_dump(mode="json")))
        (where / "config.json").write_text(text, encoding="utf-8")
        found = Catalogue.from_folders([manifest_folder()]).resolve(str(where))
        assert found.doubts == ()
        assert (found.finding is None) == (said is None)
        assert said is None or (found.finding is not None and f"in {said}; manifest" in found.finding.why)
