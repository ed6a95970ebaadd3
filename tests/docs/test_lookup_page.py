from dataclasses import replace
from pathlib import Path

import pytest
from kernel_muster.registry.discovery.discover import discover
from kernel_muster.registry.errors import MusterError
from kernel_muster.registry.selection.catalog import Catalog, PluginRow
from lookup_page import LEVER_SETTINGS, asker_of, page_text, recorded_entries

PAGE = Path(__file__).parents[2] / "docs" / "lookups.md"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return discover()


@pytest.fixture(scope="module")
def text(catalog: Catalog) -> str:
    return page_text(catalog)


def test_page_of_the_manual_is_current(text: str) -> None:
    assert PAGE.read_text(encoding="utf-8") == text, "python docs/generate.py"


@pytest.mark.parametrize("line", [
    "| w4a16_gemv_qg | R, chain w4a16_gemv_qgkv > w4a16_gemv_qg | MTP attention, attention: attention is gated, "
    "attention weights are NVFP4, stored or requantised | qkv_arm: 1 row, or a tile of that | w4a16_gemv_qg |",
    "| rope_mrope_interleaved | O | MTP attention, attention: rope is interleaved mrope |",
    "| rope_yarn | R | attention: rope is stretched by YaRN | every pass |",
    "| w4a16_gemm_t_k64 | R, chain w4a16_gemm_t_k64_n64_p3 > w4a16_gemm_t_k64 | GDN: projections are NVFP4, "
    "MUSTER_NO_K64_N64 is off, MUSTER_NO_K64_PIPELINE3 is on<br>MTP FFN, ",
    "| moe_fused_batch2_down | R | MTP FFN, MoE: always | MUSTER_FFN_ARM |",
    "| w4a16_gemm_t_k64 | R, chain w4a16_gemm_t_k64_p3 > w4a16_gemm_t_k64 | GDN: projections are NVFP4<br>",
    "| w4a16_gemm_t_m128_v3 | O | ",
    "| moe_router_logits_f32 | O | MTP FFN, MoE: MUSTER_FP32_ROUTING is on (asked for by MUSTER_FP32_ROUTING) | "
    "MUSTER_FP32_ROUTING |",
    "| quantize_bf16_to_nvfp4 | O | attention: BF16 attention weights are requantised (asked for by "
    "MUSTER_FP4_PROJ_DECODE) |",
    "| w4a4_gemm | O | MTP FFN, dense FFN: FFN weights are NVFP4 | choose_tile: prefill | w4a4_gemm | none "
    "yet: open to any plugin |",
    "| gather | R | embedding: always | every pass | gather | embedding on cpu (reference, python)",
])  # fmt: skip
def test_page_says_who_asks_for_what_and_when(text: str, line: str) -> None:
    assert line in text


def test_page_does_not_depend_on_what_third_parties_installed(catalog: Catalog, text: str) -> None:
    one = catalog.kernels[0]
    other = replace(one, provider=replace(one.provider, distribution="acme"))
    assert page_text(replace(catalog, kernels=(*catalog.kernels, other))) == text


def test_page_needs_every_built_in_family(catalog: Catalog) -> None:
    broken = PluginRow("rope", "kernel-muster", "1", "failed")
    with pytest.raises(MusterError, match="every built-in family, but rope did not load"):
        page_text(replace(catalog, plugins=(broken,)))


def test_every_setting_asks_for_something_that_the_manifests_do_not(catalog: Catalog) -> None:
    def asked(setting: dict[str, str]) -> set[object]:
        return {(entry.members, entry.kind, entry.when) for entry in recorded_entries(catalog, [setting])}

    plain = asked({})
    settings = [dict(setting) for setting in LEVER_SETTINGS[1:] if "MUSTER_FP4_PROJ_DECODE" not in setting]
    assert all(asked(setting) - plain for setting in settings)


def test_asker_of_an_unknown_label_is_the_label() -> None:
    assert (asker_of("layers.12.attn"), asker_of("mtp.0.moe"), asker_of("sampler")) == (
        "attention",
        "MTP FFN",
        "sampler",
    )
