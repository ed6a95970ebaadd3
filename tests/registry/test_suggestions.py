"""Suggestions: possible meanings of a misspelt name, at a bounded cost."""

import random

import pytest
from kernel_muster.registry import suggestions
from kernel_muster.registry.keys import KernelKey, KeyNames
from kernel_muster.registry.suggestions import LONGEST, MOST_PAIRS, Allowance, Names
from work import growth, instructions

MANY = [f"lever_{number:05}_of_the_engine" for number in range(15_000)]


def test_prefix_counts_for_nothing_and_comes_back():
    names = Names(("MUSTER_SIZE", "MUSTER_SLOW"), "MUSTER_")
    assert names.near("MUSTER_SIZ") == ["MUSTER_SIZE"]
    assert names.did_you_mean("MUSTER_SIZ") == "; did you mean MUSTER_SIZE?"
    assert names.did_you_mean("MUSTER_QRX") == ""


@pytest.mark.parametrize(
    "slip",
    [
        "lever_07123_of_the_engin",
        "lever_07123_off_the_engine",
        "levr_07123_of_the_engine",
        "lever_7123_of_the_engine",
    ],
)
def test_slip_is_found_among_thousands_wherever_it_is(slip):
    shuffled = random.Random(1).sample(MANY, len(MANY))  # noqa: S311  (reproducible on purpose)
    assert Names(MANY).near(slip, 1) == Names(shuffled).near(slip, 1) == ["lever_07123_of_the_engine"]


def test_thousands_of_unknown_names_among_thousands_cost_no_more_than_the_allowance():
    allowance = Allowance()
    names = Names(MANY, allowance=allowance)
    said = [names.near(f"lever_{number:05}_of_the_engin") for number in range(12_000)]
    assert said[0] == names.near("lever_00000_of_the_engin") != []
    assert 100 < sum(map(bool, said)) < 1000
    assert allowance.pairs == 0


def test_name_after_the_allowance_is_used_up_costs_nothing():
    names = Names(["acme"], allowance=Allowance(12))
    assert (names.near("acm"), names.near("acn")) == (["acme"], [])
    spent = instructions(lambda: names.near("another"))
    assert spent == instructions(lambda: names.near("a_much_longer_name_than_that")) < 100


def test_same_question_gets_the_same_answer_after_the_allowance_is_used_up():
    names = Names(["acme", "acne"], allowance=Allowance(24))
    first = names.near("acm")
    assert names.near("acn") == []
    assert names.near("acm") == first != []


@pytest.mark.parametrize("length", [LONGEST + 1, 100_000])
def test_name_that_nobody_spells_out_is_neither_looked_for_nor_suggested(length):
    allowance = Allowance()
    assert Names(["a" * 20, "a" * length], allowance=allowance).near("a" * length) == []
    assert Names(["a" * length], allowance=allowance).near("a" * LONGEST) == []
    assert allowance.pairs == MOST_PAIRS


def test_index_is_made_once_and_not_for_each_name(monkeypatch):
    monkeypatch.setattr(suggestions, "MOST_COMPARED", 8)

    def make(size):
        names = Names(f"name_{number}" for number in range(size))
        return lambda: [names.near(f"nam_{number}") for number in range(size)]

    assert growth(make, 100) < 2.4


def test_keys_of_one_module_share_one_allowance_with_those_of_others():
    keys = KeyNames([KernelKey(f"m{number}", "a" * 60) for number in range(4000)])
    said = [keys.like(KernelKey(f"m{number}", "a" * 59)) for number in range(4000)]
    assert said[0] == ["m0::" + "a" * 60]
    assert said[-1] == []


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        (KernelKey("acme", "mul"), ["moe::mul"]),
        (KernelKey("moe", "mull"), ["moe::mul"]),
        (KernelKey("x", "silu"), ["silu::gate"]),
        (KernelKey("moe", "tile_k64"), []),  # a sibling of tile_k32, and no slip
        (KernelKey("moe", "tille_k32"), ["moe::tile_k32"]),
    ],
)
def test_key_is_meant_by_one_with_a_slip_in_it(key, meant):
    known = KeyNames([KernelKey("moe", "mul"), KernelKey("moe", "tile_k32"), KernelKey("silu", "gate")])
    assert known.like(key) == meant
