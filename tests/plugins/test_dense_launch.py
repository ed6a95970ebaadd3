"""What the launcher of the dense GEMM decides, and what it reads the sizes of its Hopper forms from."""

import re
from pathlib import Path

import numpy as np
import pytest
from kernel_muster.plugins import w4a16_gemv
from kernel_muster.plugins.w4a16_gemv import contracts, dense_launch
from kernel_muster.registry.backends.request import EntryResources
from kernel_muster.registry.contracts import Case
from kernel_muster.registry.errors import ContractError

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


def test_rows_in_falling_order_are_refused_and_those_that_overlap_take_no_bulk_copies():
    contract, entries = contracts.DENSE_GEMM, dict.fromkeys(names(), EntryResources(1, 0, 0, 256, (), (), 3))
    given = contract.arguments(Case("here", {"M": 100, "N": 600, "K": 64}), np.random.default_rng(1))
    plan = dense_launch.DENSE_GEMM_HOPPER.plan

    def planned(x):
        return plan(contract.signature.bind("test", (), {**given, "x": x}), entries)[0].entry

    assert planned(given["x"]) == "dense_gemm_n64"
    assert planned(np.lib.stride_tricks.as_strided(given["x"], (100, 64), (64, 2))) == "dense_gemm_any"
    with pytest.raises(ContractError, match="rows are -64 elements apart"):
        planned(given["x"][::-1])


def test_shared_memory_is_what_the_source_asks_for():
    listed = re.findall(r"DENSE_WGMMA\((\w+), (\d+), (\d+)\)", (SOURCE / "dense_gemm_hopper.cu").read_text())
    asked = {name: (int(n), int(stages) * (128 + int(n)) * 128 + 8 * 2048 + int(stages) * 16 + 1024)
             for name, n, stages in listed}  # fmt: skip
    assert {name: form[:2] for name, form in dense_launch._WGMMA.items()} == asked


def names():
    return [entry.name for entry in dense_launch.DENSE_GEMM_HOPPER.entries]


def test_hopper_has_every_entry_that_the_plan_can_name_there():
    entries = {entry.name for entry in dense_launch.DENSE_GEMM_HOPPER.entries}
    others = {entry.name for entry in dense_launch.DENSE_GEMM.entries}
    assert others - entries == {"dense_gemm_wide"}
    assert entries - others == {f"dense_gemm_{form}" for form in dense_launch._WGMMA}
