"""The shipped manifests against the published shapes of their projections."""

import pytest
from kernel_muster.MODEL_toml import Catalogue, Manifest, manifest_folder

MOE = ("qwen3.6-35b-a3b", "ornith-1.0-35b", "qwen3.6-35b-a3b-heretic", "holo-3.1-35b-a3b")
DENSE = ("qwen3.6-27b", "qwen3.8-27b")
DRAFTER = "qwen3.6-35b-a3b-dflash"
MFAST, GEMM = "w4a4::w4a4_gemm_mfast", "w4a4::w4a4_gemm"


@pytest.fixture(scope="module")
def shipped() -> dict[str, Manifest]:
    catalogue = Catalogue.from_folders([manifest_folder()])
    assert catalogue.findings == ()
    return {manifest.name: manifest for manifest in catalogue.manifests}


def test_all_seven_are_there_in_folders_of_their_names(shipped: dict[str, Manifest]) -> None:
    assert sorted(shipped) == sorted((*MOE, *DENSE, DRAFTER))
    for name, manifest in shipped.items():
        assert manifest.path.parent.name == name
        assert manifest.quant == "nvfp4"
        assert manifest.model.missing_dimensions == ()
        assert manifest.model_type


# name -> N of attn.q_proj (gate included), k_proj, fused qkv, gdn in_proj_qkvz, in_proj_ba, conv, and K of both outputs
SHAPES = {
    **dict.fromkeys(MOE, (8192, 512, 9216, 12288, 64, 8192, 4096)),
    **dict.fromkeys(DENSE, (12288, 1024, 14336, 16384, 96, 10240, 6144)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_projection_shapes_follow_from_the_dimensions(shipped: dict[str, Manifest], name: str) -> None:
    attention, gdn = shipped[name].model.attention, shipped[name].model.gdn
    assert attention is not None
    assert gdn is not None
    assert attention.gated
    query, key_value = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    keys, values = gdn.key_heads * gdn.key_dim, gdn.value_heads * gdn.value_dim
    shapes = (
        2 * query,
        key_value,
        2 * query + 2 * key_value,
        2 * (keys + values),
        2 * gdn.value_heads,
        2 * keys + values,
    )
    assert (*shapes, query) == SHAPES[name]
    assert values == query
    assert gdn.conv_width == 4


@pytest.mark.parametrize("name", MOE)
def test_moe_models_have_forty_layers_and_256_experts(shipped: dict[str, Manifest], name: str) -> None:
    model = shipped[name].model
    assert (model.hidden_size, model.vocab_size, model.ffn) == (2048, 248320, "moe")
    assert model.layer_kinds == ("gdn", "gdn", "gdn", "full") * 10
    assert model.moe is not None
    assert (model.moe.experts, model.moe.top_k, model.moe.router) == (256, 8, "softmax")
    assert (model.moe.intermediate_size, model.moe.shared_intermediate_size) == (512, 512)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_have_48_gdn_and_16_full_layers(shipped: dict[str, Manifest], name: str) -> None:
    model = shipped[name].model
    assert (model.hidden_size, model.vocab_size, model.ffn, model.intermediate_size) == (5120, 248320, "dense", 17408)
    assert (model.layer_kinds.count("gdn"), model.layer_kinds.count("full")) == (48, 16)


def test_what_sets_models_of_one_shape_apart(shipped: dict[str, Manifest]) -> None:
    ornith, heretic, holo = (shipped[name].model for name in MOE[1:])
    assert ornith.attention is not None
    assert ornith.attention.weights == "bf16_requantised"
    assert shipped["ornith-1.0-35b"].defaults == {"MUSTER_FP4_PROJ_DECODE": True}
    assert heretic.attention is not None
    assert heretic.attention.weights == "native"
    assert not shipped["ornith-1.0-35b"].model_types
    assert not shipped["qwen3.6-35b-a3b-heretic"].model_types
    assert holo.mtp is None
    for name in (*MOE[:3], *DENSE):
        mtp = shipped[name].model.mtp
        assert mtp is not None
        assert mtp.layers == 1
    for name in (*MOE, *DENSE):
        model = shipped[name].model
        assert model.rope is not None
        assert (model.rope.theta, model.rope.partial_factor) == (1e7, 0.25)
        assert (model.rope.mrope_sections, model.rope.mrope_interleaved) == ((11, 11, 10), True)


def test_drafter_reads_its_targets_layers(shipped: dict[str, Manifest]) -> None:
    manifest = shipped[DRAFTER]
    attention = manifest.model.attention
    assert attention is not None
    assert (attention.heads, attention.kv_heads, manifest.model.layer_kinds) == (32, 4, ("full",) * 8)
    target = shipped[manifest.dflash["target"]].model
    assert (target.hidden_size, target.vocab_size) == (manifest.model.hidden_size, manifest.model.vocab_size)
    assert manifest.dflash["target_layer_ids"] == [1, 10, 19, 28, 37]
    assert (manifest.dflash["gamma"], manifest.dflash["window"], manifest.dflash["mask_token_id"]) == (16, 4096, 248070)


@pytest.mark.parametrize(
    ("name", "keys"),
    [*((name, {MFAST}) for name in MOE), *((name, {MFAST, GEMM}) for name in DENSE), (DRAFTER, {MFAST})],
)
def test_waivers_are_those_that_follow_from_the_lookups(
    shipped: dict[str, Manifest], name: str, keys: set[str]
) -> None:
    waivers = shipped[name].waivers
    assert {str(waiver.key) for waiver in waivers} == keys
    assert all(len(waiver.reason.split()) > 8 for waiver in waivers)
