"""The MoE family of ``muster bench``: its problems, without a device."""

import pytest
from kernel_muster.bench.families.moe import FAMILY, parse_shape, shapes_of
from kernel_muster.bench.measure import family
from kernel_muster.MODEL_toml import Catalogue, manifest_folder
from kernel_muster.registry.errors import UsageError


def test_moe_family_is_found_by_name_and_takes_decode_rows():
    assert family("moe") is FAMILY
    FAMILY.check_rows((1, 64, 128))
    for rows in (0, 129):
        with pytest.raises(UsageError, match=f"--rows {rows}: moe takes 1 to 128 rows"):
            FAMILY.check_rows((rows,))


def test_moe_shapes_of_models_name_each_size_once():
    catalogue = Catalogue.from_folders([manifest_folder()])
    names = ("qwen3.6-35b-a3b", "qwen3.6-27b", "holo-3.1-35b-a3b")
    found = shapes_of(tuple(catalogue.resolve(name).manifest for name in names))
    assert found == [("qwen3.6-35b-a3b / holo-3.1-35b-a3b", 256, 8, 2048, 512)]


def test_moe_shape_is_read():
    assert parse_shape("128x4x2880x1440") == ("128x4x2880x1440", 128, 4, 2880, 1440)


@pytest.mark.parametrize("text", ["256x8x2048", "0x1x16x16", "4x8x16x16", "8x2x2048x500", "8x2x40x16", "axbxcxd", ""])
def test_moe_shape_that_no_kernel_takes_is_a_usage_error(text):
    with pytest.raises(UsageError, match="expected EXPERTSxTOP_KxHIDDENxINTERMEDIATE"):
        parse_shape(text)
