"""What the launcher of the dense GEMM decides, and what it reads the sizes of its Hopper forms from."""

import re
from pathlib import Path

import pytest
from kernel_muster.plugins import w4a16_gemv
from kernel_muster.plugins.w4a16_gemv import dense_launch

SOURCE = Path(w4a16_gemv.__file__).parent


@pytest.mark.parametrize(
    ("rows", "features", "form"),
    [
        (128, 5120, "n64"),  # one round of any: the smallest tile takes least
        (256, 14336, "n256"),  # 112 tiles are one round, 150 and 224 are two
        (512, 5120, "n192"),  # 108 tiles in a round, 160 of n128 in two, 320 of n64 in three
        (2048, 14336, "n256"),
    ],
)
def test_form_of_the_wide_tile_by_rounds(rows, features, form):
    assert dense_launch.wgmma_form(rows, features, 132) == form


def test_router_and_few_rows_never_take_the_wide_tile():
    assert dense_launch.tile_of(4096, 256) != "wide"
    assert dense_launch.tile_of(64, 5120) != "wide"
    assert dense_launch.tile_of(65, 513) == "wide"


def test_shared_memory_is_what_the_source_asks_for():
    listed = re.findall(r"DENSE_WGMMA\((\w+), (\d+), (\d+)\)", (SOURCE / "dense_gemm_hopper.cu").read_text())
    asked = {name: (int(n), int(stages) * (128 + int(n)) * 128 + 8 * 2048 + int(stages) * 16 + 1024)
             for name, n, stages in listed}  # fmt: skip
    assert {name: form[:2] for name, form in dense_launch._WGMMA.items()} == asked


def test_hopper_has_every_entry_that_the_plan_can_name_there():
    entries = {entry.name for entry in dense_launch.DENSE_GEMM_HOPPER.entries}
    others = {entry.name for entry in dense_launch.DENSE_GEMM.entries}
    assert others - entries == {"dense_gemm_wide"}
    assert entries - others == {f"dense_gemm_{form}" for form in dense_launch._WGMMA}
