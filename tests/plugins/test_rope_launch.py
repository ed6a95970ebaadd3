"""Decisions of the launcher of rotary position embedding before a launch."""

import numpy as np
import pytest
from kernel_muster.plugins import rope
from kernel_muster.plugins.rope import launch
from kernel_muster.registry.contract.contracts import Case
from kernel_muster.registry.contract.signature import ScalarParam
from kernel_muster.registry.errors import ContractError

CONTRACT = next(contract for contract in rope.muster_contracts() if contract.name == "rope_forward")


def plan(**dims):
    ones = {p.name: 1 for p in CONTRACT.signature.params if isinstance(p, ScalarParam) and p.name not in dims}
    arguments = CONTRACT.arguments(Case("here", dims, ones), np.random.default_rng(3))
    arguments = {name: value for name, value in arguments.items() if name in CONTRACT.signature.names}
    return launch.FORWARD.plan(CONTRACT.signature.bind("test", (), arguments), {})


def test_rope_has_a_block_for_every_row():
    (made,) = plan(M=5, Hq=4, Hk=2, D=128, rotary_dim=64)
    assert (made.entry, made.grid) == ("rope_w8", (5, 1, 1))


def test_rope_of_more_pairs_than_it_counts_is_refused():
    with pytest.raises(ContractError, match="rope: a row has 1048576 pairs of values, expected fewer than 1048576"):
        plan(M=0, Hq=2**14, Hk=0, D=128, rotary_dim=128)
