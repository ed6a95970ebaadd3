import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_muster.MODEL_toml import manifest_folder
from kernel_muster.MODEL_toml.loader import load_manifest
from kernel_muster.MODEL_toml.schema import ModelTable
from kernel_muster.models.build import MODEL_TYPES, build_from_dims, build_model
from kernel_muster.models.dims import ModelDims
from kernel_muster.models.layers.ffn import NoneFfn
from kernel_muster.models.manifest_dims import model_dims
from kernel_muster.models.memory.state import StateSizes
from kernel_muster.models.weights.source import SyntheticWeights
from kernel_muster.registry.errors import UsageError
from kernel_muster.registry.hardware.arch import parse_arch
from kernel_muster.registry.hardware.target import CPU_TARGET, Target
from kernel_muster.registry.levers import Levers
from kernel_muster.registry.selection.catalog import Catalog
from kernel_muster.registry.selection.lookup_session import LookupSession
from kernel_muster.registry.selection.lookups import Lookups

Make = Callable[..., LookupSession]
TINY: dict[str, Any] = {
    "name": "tiny", "quant": "nvfp4", "model_type": "qwen3_5", "hidden_size": 64, "num_layers": 2,
    "layer_pattern": ["gdn", "full"], "ffn": "dense", "intermediate_size": 96, "vocab_size": 48, "rms_norm_eps": 1e-6,
    "attention": {"heads": 4, "kv_heads": 2, "head_dim": 64, "gated": True},
    "gdn": {"key_heads": 2, "key_dim": 16, "value_heads": 4, "value_dim": 16, "conv_width": 4},
    "rope": {"theta": 1e7, "partial_factor": 0.25}, "rms_norm_zero_centred": True,
}  # fmt: skip
MOE = {"ffn": "moe", "intermediate_size": None, "moe": {"experts": 4, "top_k": 2, "intermediate_size": 32}}


def manifest(**changes: Any) -> Any:
    table = {key: value for key, value in {**TINY, **changes}.items() if value is not None}
    return SimpleNamespace(model=ModelTable.model_validate(table))


@pytest.mark.parametrize("changes", [{}, MOE, {"ffn": "none", "intermediate_size": None}, {"quant": "bf16"}])
def test_built_model_computes_through_every_layer(make_session: Make, changes: dict[str, Any]) -> None:
    model = build_model(manifest(**changes), Lookups(make_session()), SyntheticWeights(), max_rows=8)
    state = model.new_state(StateSizes(2, 8, 4))
    one, two = state.open(), state.open()
    (read,) = model.prefill(state, [one, two], [[1, 2, 3], [4]])
    for done in (read, model.decode(state, [one, two], model.greedy(read.logits))):
        assert done.logits.shape == (2, 48)
        assert np.isfinite(done.logits.astype(np.float64)).all()
    assert (one.length, two.length) == (4, 2)
    assert model.maturity == "partial"
    assert isinstance(model.layers[1].ffn, NoneFfn) == (changes.get("ffn") == "none")


@pytest.mark.parametrize("max_rows", [0, -1, 1.5, "8", True, 2**40])
def test_rows_of_a_pass_that_make_no_sense_are_refused(make_session: Make, max_rows: Any) -> None:
    with pytest.raises(UsageError, match=r"^tiny: max_rows is .*, expected 1 to 1048576$"):
        build_model(manifest(), Lookups(make_session()), max_rows=max_rows)


class FromCheckpoint(SyntheticWeights):
    """Weights that fit, beside a config.json that says more than they do."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.checkpoint = SimpleNamespace(folder="/models/other", config={"model_type": "qwen3_5", **config})


@pytest.mark.parametrize("config", [
    {}, {"rope_theta": 1e7, "vocab_size": 48}, {"num_hidden_layers": 64},
    {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "mlp_only_layers": []},
])  # fmt: skip
def test_checkpoint_of_the_model_or_of_more_layers_of_it_builds_it(make_session: Make, config: dict[str, Any]) -> None:
    assert build_model(manifest(), Lookups(make_session()), FromCheckpoint(**config), max_rows=4).maturity == "partial"


@pytest.mark.parametrize(("config", "said"), [
    ({"hidden_size": 4096}, r"the config\.json says model_type qwen3_5, hidden_size 4096; tiny is model_type qwen3_5"),
    ({"model_type": "llama"},
     r"the config\.json says model_type llama, hidden_size not given; tiny is model_type qwen3_5"),
    ({"model_type": 5}, r"it is malformed: model_type is 5, expected text"),
    ({"rope_theta": 1e6},
     r"config\.json: rope_theta 1000000\.0; manifest: rope\.theta 10000000\.0; to accept it write "),
    ({"text_config": {"rms_norm_eps": 1e-5}},
     r"config\.json: rms_norm_eps 1e-05; manifest: rms_norm_eps 1e-06; to acc"),
    ({"tie_word_embeddings": True},
     r"config\.json: tie_word_embeddings true; manifest: tie_word_embeddings false; to "),
    ({"hidden_act": "gelu"},
     r'config\.json: hidden_act "gelu"; manifest: "silu", built in; no manifest accepts it: no '),
    ({"text_config": {"use_sliding_window": True}},
     r"config\.json: use_sliding_window true; manifest: false, built in; "),
    ({"final_logit_softcapping": 30.0},
     r"config\.json: final_logit_softcapping 30\.0; manifest: none, built in; no ma"),
    ({"quantization_config": {"quant_method": "fp8"}},
     r"config\.json: quantization_config has model\.layers\.0\..* fp8; "),
])  # fmt: skip
def test_checkpoint_of_another_model_whose_weights_would_fit_is_refused(
    make_session: Make, config: dict[str, Any], said: str
) -> None:
    session = make_session()
    contradicts = "tiny cannot be built from /models/other, whose config.json contradicts its manifest: "
    with pytest.raises(UsageError, match=f"^{contradicts}{said}"):
        build_model(manifest(), Lookups(session), FromCheckpoint(**config), max_rows=4)
    (request,) = session.requests
    assert (request.lever, request.site) == ("checkpoint of tiny", "/models/other/config.json")


def test_doubt_about_a_checkpoint_is_a_finding_of_the_boot(make_session: Make) -> None:
    session = make_session()
    config = {"attention_sharpness": 2.0, "num_hidden_layers": 2, "mtp_num_hidden_layers": 0}
    build_model(manifest(), Lookups(session), FromCheckpoint(**config), max_rows=4)
    assert [(one.code, one.where) for one in session.notices] == [
        ("UNKNOWN_CONFIG_FIELD", ("config.json",)), ("WEIGHTS_NOT_QUANTISED", ("config.json",)),
    ]  # fmt: skip
    assert session.requests == ()


def test_pattern_of_no_weight_is_refused_when_the_whole_model_is_built(make_session: Make) -> None:
    source, session = FromCheckpoint(), make_session()
    source.unmatched = ("layers.*.gdm.*",)  # type: ignore[attr-defined]
    refused = r"^no weight of tiny is named like layers\.\*\.gdm\.\*: correct the requantise patterns"
    with pytest.raises(UsageError, match=refused):
        build_model(manifest(), Lookups(session), source, max_rows=4)
    assert [request.lever for request in session.requests] == ["weights of tiny"]


def test_weights_given_by_name_equal_the_synthetic_ones(make_session: Make) -> None:
    class Recorder(SyntheticWeights):
        def __init__(self) -> None:
            super().__init__(1)
            self.found: dict[str, Any] = {}

        def find(self, spec: Any) -> Any:
            self.found[spec.name] = super().find(spec)
            return self.found[spec.name]

    source = Recorder()
    first = build_model(manifest(), Lookups(make_session()), source, max_rows=4)
    second = build_model(manifest(), Lookups(make_session()), source.found, max_rows=4)
    ids = np.array([3, 1], np.int32)
    x = first.embedding.forward(ids)
    for layers in zip(first.layers, second.layers, strict=True):
        outputs = [layer.ffn.forward(x, "decode").tobytes() for layer in layers]
        assert outputs[0] == outputs[1]
    del source.found["layers.1.ffn.down_proj"]
    with pytest.raises(UsageError, match=r"layers\.1\.ffn\.down_proj: no such weight, expected nvfp4 \(64, 96\)"):
        build_model(manifest(), Lookups(make_session()), source.found)


@pytest.mark.parametrize(("lever", "changes", "why"), [
    ("FP4_PROJ_DECODE", {}, "attention of tiny has nvfp4 weights already"),
    ("FP4_PROJ_DECODE", {"layer_pattern": ["gdn"], "attention": None, "rope": None}, "attention of tiny is not there"),
    ("FP32_ROUTING", {}, "tiny has no experts"),
    ("MOE_GROUPED_DECODE", {}, "tiny has no experts"),
    ("MTP_GATE_FORCE", {}, "it has no MTP head"),
])  # fmt: skip
def test_lever_that_the_model_cannot_honour_is_one_failed_request(
    make_session: Make, lever: str, changes: dict[str, Any], why: str
) -> None:
    session = make_session(**{lever: True})
    build_model(manifest(**changes), Lookups(session))
    (request,) = session.requests
    assert request.lever == f"MUSTER_{lever}"
    assert why in request.why
    assert "models/build.py" in request.site


@pytest.mark.parametrize("lever", ["NO_MOE_GROUPED_DECODE", "NO_K64_N64"])
def test_kill_switch_that_kills_nothing_here_is_no_failed_request(make_session: Make, lever: str) -> None:
    session = make_session(**{lever: True})
    build_model(manifest(), Lookups(session))
    assert session.requests == ()


@pytest.mark.parametrize(("changes", "message"), [
    ({"quant": "fp8"}, "quant is fp8, the layers take nvfp4 and bf16"),
    ({"vocab_size": None}, "model.vocab_size is missing"),
    ({"hidden_size": 72}, "hidden_size is 72, expected a multiple of 16"),
    ({"attention": {"heads": 4, "kv_heads": 2, "head_dim": 48}}, "head_dim is 48, expected one of 64, 128, 256"),
    ({**MOE, "moe": {"experts": 2048, "top_k": 33, "intermediate_size": 32}}, "experts is 2048"),
    ({**MOE, "moe": {"experts": 2048, "top_k": 33, "intermediate_size": 32}}, "top_k is 33"),
    ({**MOE, "moe": {**MOE["moe"], "renormalise": False}}, "renormalise is false"),  # type: ignore[dict-item]
    ({**MOE, "quant": "bf16"}, "the expert kernels take nvfp4"),
])  # fmt: skip
def test_model_that_cannot_be_built_is_an_error_and_a_finding(
    make_session: Make, changes: dict[str, Any], message: str
) -> None:
    session = make_session()
    with pytest.raises(UsageError, match=message):
        build_model(manifest(**changes), Lookups(session))
    (request,) = session.requests
    assert message in request.why


def test_dims_derive_the_projections_of_the_shipped_shapes() -> None:
    attention = {"heads": 24, "kv_heads": 4, "head_dim": 256, "gated": True}
    gdn = {"key_heads": 16, "key_dim": 128, "value_heads": 48, "value_dim": 128, "conv_width": 4}
    dims = model_dims(manifest(hidden_size=5120, intermediate_size=17408, attention=attention, gdn=gdn))
    assert dims.attention is not None
    assert dims.gdn is not None
    assert (dims.attention.q_rows, dims.attention.kv_dim, dims.attention.q_dim) == (12288, 1024, 6144)
    assert (dims.gdn.qkvz_rows, dims.gdn.qkv_dim, dims.gdn.z_dim, dims.gdn.ba_rows) == (16384, 10240, 6144, 96)
    assert dims.layer_kinds == ("gdn", "attn")


def test_weights_for_an_architecture_without_a_device_are_refused(
    catalog: Catalog, make_levers: Callable[..., Levers]
) -> None:
    target = Target("sm_90a", parse_arch("sm_90a"))
    session = LookupSession(catalog, target, make_levers())
    with pytest.raises(UsageError, match="with weights: sm_90a is an architecture without a device"):
        build_model(manifest(), Lookups(session), SyntheticWeights())
    assert build_model(manifest(), Lookups(session)).dims.name == "tiny"


def test_model_types_are_those_of_the_family() -> None:
    assert set(MODEL_TYPES) == {"qwen3_5", "qwen3_5_moe", "qwen3_6_moe"}


class Full(SyntheticWeights):
    """Weights of a machine whose memory ends."""

    def find(self, spec: Any) -> Any:
        if spec.name == "layers.2.gdn.out_proj":
            raise MemoryError("no more")
        return super().find(spec)


def test_weights_that_do_not_fit_into_memory_are_a_finding(
    catalog: Catalog, make_levers: Callable[..., Levers], tiny_dims: dict[str, ModelDims]
) -> None:
    session = LookupSession(catalog, CPU_TARGET, make_levers())
    with pytest.raises(UsageError, match="tiny with weights does not fit into memory"):
        build_from_dims(tiny_dims["dense"], Lookups(session), Full(1), 16)
    [request] = session.requests
    assert "does not fit into memory" in request.why


@pytest.mark.parametrize(
    ("old", "new", "said", "line"),
    [
        ("head_dim = 256", "head_dim = 192", "head_dim is 192, expected one of", "head_dim = 192"),
        ('quant = "nvfp4"', 'quant = "fp8"', "quant is fp8, the layers take", 'quant = "fp8"'),
        ("intermediate_size = 17408", "intermediate_size = 17409", "_size is 17409", "intermediate_size = 17409"),
    ],
)  # fmt: skip
def test_model_that_cannot_be_built_names_the_line_that_says_so(
    make_session: Make, tmp_path: Path, old: str, new: str, said: str, line: str
) -> None:
    text = (manifest_folder() / "qwen3.6-27b" / "MODEL.toml").read_text()
    text = re.sub(r"mrope_\w+ = .*\n", "", text)  # they must add up to the rotated part of a head
    assert text.count(old) >= 1
    file = tmp_path / "MODEL.toml"
    file.write_text(text.replace(old, new, 1))
    found, problems = load_manifest(file)
    assert found is not None, problems
    session = make_session()
    with pytest.raises(UsageError, match="cannot be built: "):
        build_model(found, Lookups(session), None)
    (request,) = session.requests
    assert said in request.why
    number = file.read_text().splitlines().index(line) + 1
    assert request.site == f"{file}:{number}"
