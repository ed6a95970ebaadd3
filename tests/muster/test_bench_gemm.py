"""The GEMM family of ``muster bench``: its problems, without a device."""

import kernel_muster as km
import pytest
from kernel_muster.bench.families.gemm import ARMS, FAMILY, arms, sizes_of
from kernel_muster.bench.problem import Request
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.errors import UsageError


def test_gemm_family_takes_rows_of_prefill():
    FAMILY.check_rows(FAMILY.default_rows)
    for rows in (0, 8193):
        with pytest.raises(UsageError, match=f"--rows {rows}: gemm takes 1 to 8192 rows"):
            FAMILY.check_rows((rows,))


def test_gemm_sizes_of_a_model_are_its_projections_without_the_vocabulary():
    catalogue = Catalogue.from_folders([manifest_folder()])
    sizes = sizes_of(Request((catalogue.resolve("qwen3.6-27b").manifest,)))
    assert {size[1:] for size in sizes} == {(14336, 5120), (5120, 6144), (16384, 5120), (17408, 5120), (5120, 17408)}


def test_gemm_sizes_that_were_asked_for_are_taken_whatever_their_features():
    assert sizes_of(Request((), (("248320x2048", 248320, 2048),))) == [("248320x2048", 248320, 2048)]


def test_gemm_arms_are_those_that_the_target_has():
    keys = [str(handle.key) for handle in arms(km.open_registry("cpu"))]
    assert keys == [f"{module}::{func}" for module, func in ARMS]
    assert "w4a16_hopper::w4a16_hopper_gemm" not in [str(h.key) for h in arms(km.open_registry("sm_80"))]


def test_gemm_without_an_arm_is_a_usage_error():
    with pytest.raises(UsageError, match="has no W4A16 GEMM to measure"):
        arms(km.open_registry("sm_75"))
